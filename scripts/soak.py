"""`make soak`: half an hour of mixed traffic on a real server, and whether it stays as it was.

    uv run python scripts/soak.py [--minutes 30] [--output output/soak]

Sixteen to sixty-four clients ask without pause: chats, completions, several choices, streams, long prompts, constrained
answers, clients that go away, requests that must be refused. Every answer is compared with that of the quiet server.
The report says what must hold and whether it does; the exit code is 1 where something does not. Needs the native
kernels: only with them an answer is the same to the bit whatever runs beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from miniserve.tui.errors import ChatError
from scripts.sample_files import OUTPUT, machine
from scripts.sample_run import serving
from scripts.soak_report import Sample, Soak, checks, report, write
from scripts.soak_traffic import Traffic, golden_answers, questions, refusals

NUM_CYCLES = 3
PHASES = ((0.4, 16), (0.3, 32), (0.3, 64))  # (share of a cycle, clients)
SAMPLE_SECONDS = 2.0
IDLE_SECONDS = 30.0
MAX_MODEL_LEN = 1024
# A small cache, so that requests are preempted all the time.
FLAGS = ("--kernels", "native", "--max-model-len", str(MAX_MODEL_LEN), "--num-kv-blocks", "45", "--no-access-log")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if everything holds."""
    args = _parse(arguments)
    try:
        soak = run(args.minutes, args.port, args.seed)
    except (ChatError, OSError, ValueError, httpx.HTTPError) as error:
        print(f"soak: error: {error}", file=sys.stderr)
        return 2
    write(soak, args.output)
    print(report(soak))
    return 0 if all(check.holds for check in checks(soak)) else 1


def run(minutes: float, port: int, seed: int) -> Soak:
    """A server of its own under traffic for so long.

    Raises:
        ChatError, ValueError, httpx.HTTPError: the server does not start, or does not answer when it is quiet.
    """
    phases = [(share * minutes * 60 / NUM_CYCLES, clients) for share, clients in PHASES]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="miniserve-soak-") as name:
        log = Path(name) / "serve.log"
        with serving(url, log, *FLAGS) as server:
            traffic, samples = asyncio.run(_soak(url, psutil.Process(server.pid), phases, seed))
        has_traceback = "Traceback" in log.read_text(encoding="utf-8")
    return Soak(
        command=f"uv run python scripts/soak.py --minutes {minutes:g}",
        machine=machine(),
        phases=phases,
        num_cycles=NUM_CYCLES,
        outcomes=traffic.outcomes,
        samples=samples[:-1],
        idle=samples[-1],
        exit_code=-1 if server.exit_code is None else server.exit_code,
        has_traceback=has_traceback,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mixed traffic on a real server, and whether it stays as it was.")
    parser.add_argument("--minutes", type=float, default=30.0, help="of traffic (default: %(default)g)")
    parser.add_argument("--port", type=int, default=8124, help="for the server, on 127.0.0.1 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the clients' choices (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "soak", help="folder of the report")
    args = parser.parse_args(arguments)
    if not 0 < args.minutes <= 24 * 60:
        parser.error(f"--minutes is {args.minutes:g}; it must be more than 0 and at most a day's")
    return args


async def _soak(
    url: str, process: psutil.Process, phases: Sequence[tuple[float, int]], seed: int
) -> tuple[Traffic, list[Sample]]:
    """The traffic, and the samples of the server; the last sample is the one after everything has ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits, trust_env=False) as http:
        asked = questions()
        print(f"the answers of the quiet server to {len(asked)} questions", file=sys.stderr)
        traffic = Traffic(http, asked, await golden_answers(http, asked), refusals(MAX_MODEL_LEN), seed)
        samples: list[Sample] = []
        cycle_seconds = sum(seconds for seconds, _ in phases)
        sampler = asyncio.create_task(_sample(traffic, process, cycle_seconds, samples))
        await traffic.run(lambda now: clients_at(phases, now))
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
        samples.append(await _idle_sample(traffic, process))
        return traffic, samples


def clients_at(phases: Sequence[tuple[float, int]], now: float) -> int:
    """How many clients there are `now` seconds after the start; none at the end."""
    cycle_seconds = sum(seconds for seconds, _ in phases)
    if now >= NUM_CYCLES * cycle_seconds:
        return 0
    within = now % cycle_seconds
    for seconds, clients in phases:
        if within < seconds:
            return clients
        within -= seconds
    return phases[-1][1]


async def _sample(traffic: Traffic, process: psutil.Process, cycle_seconds: float, samples: list[Sample]) -> None:
    """Look until cancelled, and say each minute how it goes."""
    told = 0
    while True:
        cycle = min(int(traffic.now() / cycle_seconds), NUM_CYCLES - 1)
        samples.append(await _look(traffic, process, cycle))
        if traffic.now() > 60 * (told + 1):
            told += 1
            print(f"{told} min: {len(traffic.outcomes)} requests, {samples[-1]}", file=sys.stderr, flush=True)
        await asyncio.sleep(SAMPLE_SECONDS)


async def _look(traffic: Traffic, process: psutil.Process, cycle: int) -> Sample:
    stats = (await traffic.http.get("/stats")).raise_for_status().json()
    return Sample(
        traffic.now(),
        cycle,
        traffic.num_clients,
        process.memory_info().rss,
        process.num_fds(),
        process.num_threads(),
        *(stats[name] for name in ("running", "waiting", "kv_blocks_used", "preemptions")),
    )


async def _idle_sample(traffic: Traffic, process: psutil.Process) -> Sample:
    """When nothing runs any more: an abort takes a step. After some time, as it is."""
    give_up = time.monotonic() + IDLE_SECONDS
    while True:
        sample = await _look(traffic, process, NUM_CYCLES - 1)
        if time.monotonic() > give_up or not (sample.running or sample.waiting or sample.kv_blocks_used):
            return sample
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
