"""`make sample-run`: start the server, use it in every way, and keep what came of it in output/.

    uv run python scripts/sample_run.py [--skip-pictures]

Owns the order of the run and the life of what it starts. A run that breaks off leaves output/ as it was. Chromium and
Prometheus draw two of the pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import httpx

from demos.load_client import Load
from miniserve.tui.errors import ChatError
from miniserve.tui.spawned_server import SpawnedServer
from scripts.sample_files import INPUT, OUTPUT, Artifact, artifacts, check_complete, publish, readme
from scripts.sample_load import LoadRun, run_load
from scripts.sample_pictures import chat, draw_svg, draw_targets, find_program
from scripts.sample_plots import plot_load
from tui import SERVE_COMMAND

MODEL = "smollm2"
LONG_FLAGS = ("--max-model-len", "8192")
START_SECONDS = 120.0
CALL_SECONDS = 120.0
STREAMED_QUESTION = "List five fruits."
CHAT_QUESTIONS = (
    "Write a Python function that returns the square of a number.",
    "Now write one that returns the cube.",
)
SHORT_LOAD = Load("", MODEL, requests=24, gap=0.35, seed=1)
# More at once than the server runs (16), each prompt about 970 tokens long.
LONG_LOAD = Load("", MODEL, requests=32, gap=0.75, prompt_chars=6150, max_tokens=128, timeout=600.0, seed=2)


@dataclass(frozen=True, slots=True)
class Programs:
    """What draws pictures of screens: two programs, by path."""

    chromium: str
    prometheus: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print one line a file; 0 when output/ is new."""
    args = _parse(arguments)
    started = time.monotonic()
    try:
        programs = None if args.skip_pictures else find_programs(args)
        with tempfile.TemporaryDirectory(prefix="miniserve-sample-run-") as name:
            folder = Path(name)
            files = artifacts(*_commands())
            record(folder, args.port, programs)
            (folder / "README.md").write_text(readme(files, programs is not None), encoding="utf-8")
            check_complete(folder, files, programs is not None)
            publish(folder, OUTPUT)
    except (ChatError, OSError, ValueError, httpx.HTTPError) as error:
        print(f"sample_run: error: {error}\noutput/ is as it was", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sample_run: stopped; output/ is as it was", file=sys.stderr)
        return 130
    _say(f"done in {time.monotonic() - started:.0f} s")
    _list(files, programs is not None)
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """A signal leaves by way of every `finally`, as ctrl+c does."""
    raise SystemExit(128 + number)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Regenerate output/: the artifacts of one real run of the server.")
    parser.add_argument("--port", type=int, default=8123, help="for the server, on 127.0.0.1 (default: %(default)s)")
    parser.add_argument("--chromium", metavar="FILE", help="the program (default: on PATH)")
    parser.add_argument("--prometheus", metavar="FILE", help="the program (default: on PATH)")
    parser.add_argument(
        "--skip-pictures", action="store_true", help="without both programs: keep the old pictures of screens"
    )
    return parser.parse_args(arguments)


def find_programs(args: argparse.Namespace) -> Programs:
    """The programs that draw.

    Raises:
        ValueError: one is missing; the message tells what to do.
    """
    browsers = (args.chromium,) if args.chromium else ("chromium", "chromium-browser", "google-chrome")
    return Programs(
        find_program(browsers, "chromium", "--chromium"),
        find_program((args.prometheus or "prometheus",), "prometheus", "--prometheus"),
    )


def _commands() -> tuple[str, str, str, str]:
    serve = f"main.py serve --model {MODEL}"
    return serve, shlex.join((*shlex.split(serve), *LONG_FLAGS)), load_command(SHORT_LOAD), load_command(LONG_LOAD)


def load_command(load: Load) -> str:
    """The command line that sends this load to a server on the default port."""
    flags = {"requests": load.requests, "gap": load.gap, "prompt-chars": load.prompt_chars}
    flags |= {"max-tokens": load.max_tokens, "timeout": load.timeout, "seed": load.seed}
    return " ".join(("demos/load_client.py", *(f"--{name} {value:g}" for name, value in flags.items())))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _list(files: Sequence[Artifact], with_pictures: bool) -> None:
    for each in files:
        old = each.is_picture and not with_pictures
        if (OUTPUT / each.name).exists() or not old:
            _list_file(each.name, "  (old: --skip-pictures)" if old else "")
    _list_file("README.md")


def _list_file(name: str, remark: str = "") -> None:
    print(f"{(OUTPUT / name).stat().st_size / 1024:8.1f} KiB  output/{name}{remark}")


# The run


def record(folder: Path, port: int, programs: Programs | None) -> None:
    """Everything into `folder`."""
    url = f"http://127.0.0.1:{port}"
    with serving(url, folder / "miniserve-serve.log"):
        _say("one answer, and one streamed")
        _answers(url, folder)
        _say("a chat in the terminal")
        (folder / "tui.svg").write_text(asyncio.run(chat(f"{url}/v1", CHAT_QUESTIONS)), encoding="utf-8")
        _say(f"a load of {SHORT_LOAD.requests} requests")
        run = run_load(replace(SHORT_LOAD, base_url=f"{url}/v1"))
        run.write(folder / "load-run.jsonl", folder / "stats-load-run.jsonl", folder / "load-run-summary.txt")
        _plot(folder / "load-run.png", run)
        (folder / "output-metrics.txt").write_bytes(_get(url, "/metrics"))
        if programs is not None:
            _say("pictures of the terminal chat and of Prometheus")
            draw_svg(programs.chromium, folder / "tui.svg", folder / "tui.png")
            draw_targets(programs.chromium, programs.prometheus, url, folder / "prometheus-targets.png")
    with serving(url, folder / "miniserve-serve-long.log", *LONG_FLAGS):
        _say(f"a load of {LONG_LOAD.requests} long requests")
        run = run_load(replace(LONG_LOAD, base_url=f"{url}/v1"))
        run.write(folder / "load-run-long.jsonl", folder / "stats-load-run-long.jsonl", folder / "long-run-summary.txt")
        _plot(folder / "load-run-long.png", run)
        stats = json.loads(_get(url, "/stats"))
        (folder / "stats-long-run.json").write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
        (folder / "metrics-long-run.txt").write_bytes(_get(url, "/metrics"))


@contextmanager
def serving(url: str, log: Path, *flags: str) -> Iterator[SpawnedServer]:
    """A server, ready, until the context ends; then its log lies in `log`."""
    command = (*SERVE_COMMAND, "--model", MODEL, *flags)
    server = SpawnedServer(command, f"{url}/v1")
    _say(f"the server starts: --model {shlex.join((MODEL, *flags))}")
    server.start()
    try:
        _wait_ready(server, url)
        yield server
    except ValueError as error:
        raise ValueError(f"{error}\nthe server's log ends with:\n{server.last_lines(20)}") from error
    finally:
        server.stop()
        log.write_text(without_sampling(server.log.read_text(encoding="utf-8")), encoding="utf-8")
        server.log.unlink()


def _wait_ready(server: SpawnedServer, url: str) -> None:
    give_up = time.monotonic() + START_SECONDS
    while server.exit_code is None and time.monotonic() < give_up:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    if server.exit_code is None:
        raise ValueError(f"the server was not ready after {START_SECONDS:g} s")
    raise ValueError(f"the server ended with code {server.exit_code}")


def without_sampling(log: str) -> str:
    """The log without the access lines of the sampling, four a second."""
    return "".join(line for line in log.splitlines(keepends=True) if '"GET /stats ' not in line)


def _answers(url: str, folder: Path) -> None:
    asked = (OUTPUT / INPUT).read_bytes()
    answer = json.loads(_post(url, asked))
    text = json.dumps(answer, indent=2, ensure_ascii=False) + "\n"
    (folder / "output-chat-completions.json").write_text(text, encoding="utf-8")
    body = stream_body()
    head = f": {curl_command(url, body)}\n\n"  # a comment in an event stream: the file stays one
    (folder / "input-and-output-chat-stream.sse").write_bytes(head.encode() + _post(url, body.encode()))


def stream_body() -> str:
    """The JSON of the streamed chat."""
    messages = [{"role": "user", "content": STREAMED_QUESTION}]
    options = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({"model": MODEL, "messages": messages, **options})


def curl_command(url: str, body: str) -> str:
    """One line for a shell. -N shows each event as it comes."""
    target, header = f"{url}/v1/chat/completions", "Content-Type: application/json"
    return shlex.join(("curl", "-N", target, "-H", header, "-d", body))


def _post(url: str, body: bytes) -> bytes:
    headers = {"Content-Type": "application/json"}
    target = f"{url}/v1/chat/completions"
    return _checked(httpx.post(target, content=body, headers=headers, timeout=CALL_SECONDS, trust_env=False))


def _get(url: str, path: str) -> bytes:
    return _checked(httpx.get(f"{url}{path}", timeout=CALL_SECONDS, trust_env=False))


def _checked(answer: httpx.Response) -> bytes:
    if not answer.is_success:
        raise ValueError(f"{answer.request.url} answers {answer.status_code}: {answer.text[:300]}")
    return answer.content


def _plot(path: Path, run: LoadRun) -> None:
    load = run.load
    tokens = sum(result.prompt_tokens or 0 for result in run.results) / len(run.results)
    title = (
        f"{load.requests} requests, Poisson arrivals, mean gap {load.gap:g} s; "
        f"prompts of {tokens:.0f} tokens on average, answers of at most {load.max_tokens}"
    )
    plot_load(path, title, run.results, run.samples)


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, _end)
    os.environ.pop("MINISERVE_API_KEY", None)  # this server is open
    sys.exit(main())
