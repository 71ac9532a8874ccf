"""What the way through HTTP costs: a scripted engine that returns tokens at once, behind the real server, and a client.

    uv run python -m miniserve.benchmarks.http_overhead

The server runs in a process of its own, and streams chat completions of one token a chunk to several connections. The
client counts events on raw sockets, so that it measures the server and not an SDK's parsing. All but the model is
real: scheduler, KV blocks, detokenizer, the hand-over between the threads, the application, uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from miniserve.config import EngineConfig, ServerConfig, resolve
from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.schedule import RunnerOutput, RunnerResult, SchedulerOutput
from miniserve.core.scheduler import Scheduler
from miniserve.engine.build import EngineParts
from miniserve.engine.metrics import MetricsHook
from miniserve.server import SWITCH_INTERVAL

MODEL = "smollm2"  # its tokenizer and template; the weights are not loaded
URL_LINE = "serving on "
NO_MASKS: Mapping[str, Any] = MappingProxyType({})
ARMS = {"the server's switch interval, 0.5 ms": SWITCH_INTERVAL, "Python's, 5 ms": 0.005}


def main() -> None:
    """Start the server, measure, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="connections at once (default: 16)")
    parser.add_argument("--tokens", type=int, default=1000, help="chunks a stream (default: 1000)")
    parser.add_argument("--repeat", type=int, default=5, help="measurements; the median counts (default: 5)")
    parser.add_argument("--serve", type=float, metavar="SWITCH_INTERVAL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        _serve(args.serve)
        return
    rates: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(args.repeat):
        for name, switch_interval in ARMS.items():
            with _server(switch_interval) as url:
                asyncio.run(_measure(url, args.streams, 50))  # a warm-up
                rates[name].append(asyncio.run(_measure(url, args.streams, args.tokens)))
    print(f"{args.streams} streams of {args.tokens} chunks, median of {args.repeat} (minimum to maximum):")
    for name, values in rates.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"  {name}: {statistics.median(values):.0f} chunks/s ({spread})")


@contextmanager
def _server(switch_interval: float) -> Iterator[str]:
    """A scripted server in a process of its own; its URL."""
    command = [sys.executable, "-m", "miniserve.benchmarks.http_overhead", "--serve", str(switch_interval)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().removeprefix(URL_LINE).strip()
        finally:
            server.terminate()


# The client


async def _measure(url: str, num_streams: int, num_tokens: int) -> float:
    """Chunks with a token per second, all streams together."""
    start = time.perf_counter()
    counts = await asyncio.gather(*(_count_chunks(url, num_tokens) for _ in range(num_streams)))
    seconds = time.perf_counter() - start
    # Role, finish and [DONE] are no token chunks; merged tokens would make fewer chunks than tokens.
    return (sum(counts) - 3 * num_streams) / seconds


async def _count_chunks(url: str, num_tokens: int) -> int:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    count, tail = 0, b""
    while not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        data = await reader.read(2**16)
        if not data:
            raise ConnectionError(f"the stream broke off after {tail!r}")
        # An event that is split between two reads is counted when its second half is there.
        count += (tail[-5:] + data).count(b"data: ") - tail[-5:].count(b"data: ")
        tail = (tail + data)[-64:]
    writer.close()
    return count


# The server


class _OneTokenRunner:
    """Samples the same token for everybody, at once."""

    def __init__(self, token_id: int) -> None:
        self._result = RunnerResult((token_id,))

    def execute(self, step: SchedulerOutput) -> None:
        """Nothing to compute."""

    def sample(self, step: SchedulerOutput, logits: Any, masks: Mapping[str, Any] = NO_MASKS) -> RunnerOutput:
        """The token, for each request whose prompt is through."""
        nothing = RunnerResult()
        return RunnerOutput(tuple(self._result if item.samples else nothing for item in step.scheduled))


def _scripted_parts(hooks: Sequence[MetricsHook]) -> EngineParts:
    from miniserve import platform
    from miniserve.engine.build import load_tokenizer
    from miniserve.engine.engine import Engine
    from miniserve.engine.input_processor import InputProcessor
    from miniserve.engine.output_processor import OutputProcessor
    from miniserve.models.checkpoint import open_checkpoint
    from miniserve.text.chat_template import ChatTemplate

    asked = EngineConfig(model=MODEL)
    checkpoint = open_checkpoint(MODEL)
    tokenizer = load_tokenizer(asked, checkpoint)
    resolved = resolve(asked, platform.detect(), model_max_len=checkpoint.config.max_position_embeddings)
    kv = KVCacheManager(resolved.max_num_seqs * resolved.max_model_len // resolved.block_size + 1, resolved.block_size)
    scheduler = Scheduler(
        kv,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
    )
    [token_id] = tokenizer.encode(" token", add_special_tokens=False)
    return EngineParts(
        engine=Engine(scheduler, _OneTokenRunner(token_id), OutputProcessor(tokenizer), hooks),
        input_processor=InputProcessor(
            tokenizer,
            num_token_ids=tokenizer.num_token_ids,
            max_model_len=resolved.max_model_len,
            kv_capacity_tokens=kv.capacity_tokens,
            eos_token_ids=frozenset(),
            chat_template=ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens),
        ),
        resolved=resolved,
        backend_name="none",
        sampling_defaults={},
        summary=(),
    )


def _serve(switch_interval: float) -> None:
    from miniserve.api.app import create_app
    from miniserve.engine.async_engine import AsyncEngine
    from miniserve.server import serve

    def announce(url: str) -> None:
        sys.setswitchinterval(switch_interval)
        print(f"{URL_LINE}{url}", flush=True)

    config = ServerConfig(port=0, access_log=False, log_level="warning")
    engine = AsyncEngine(_scripted_parts, model_name=MODEL)
    serve(create_app(engine, config, (MODEL,)), engine, config, announce)


if __name__ == "__main__":
    main()
