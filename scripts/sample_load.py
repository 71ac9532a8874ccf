"""A load on a running server, and what its /stats said four times a second meanwhile, on one clock.

The load is that of demos/load_client.py. Does not start the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from demos import load_client
from demos.load_client import Load, Result

SAMPLE_SECONDS = 0.25
AFTER_SECONDS = 1.0  # sampled on after the last answer, so that the plot shows how everything is given back
REPORT_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """What changes in /stats. `seconds`: since the first request was sent, negative before that."""

    seconds: float
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    preemptions: int
    tokens_per_second: float

    @staticmethod
    def of(stats: dict[str, Any], seconds: float) -> Sample:
        """The sample of an answer of /stats."""
        return Sample(seconds, **{each.name: stats[each.name] for each in fields(Sample) if each.name != "seconds"})


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A load, how its requests fared, the seconds until the last end, and the samples in the order of time."""

    load: Load
    results: Sequence[Result]
    seconds: float
    samples: Sequence[Sample]

    def write(self, results: Path, samples: Path, summary: Path) -> None:
        """Two JSONL files, one line a request, one line a sample; and the load client's report."""
        results.write_text("".join(f"{result.to_json()}\n" for result in self.results), encoding="utf-8")
        rows = (json.dumps(asdict(sample) | {"seconds": round(sample.seconds, 3)}) for sample in self.samples)
        samples.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        with summary.open("w", encoding="utf-8") as file:
            console = Console(file=file, width=REPORT_COLUMNS, highlight=False)
            load_client.report(console, self.load, self.results, self.seconds)
            most = max(self.samples, key=lambda sample: sample.kv_blocks_used)
            share = most.kv_blocks_used / most.kv_blocks_total
            console.print(f"most KV blocks in use: {most.kv_blocks_used} of {most.kv_blocks_total} ({share:.1%})")
            running, waiting = (max(getattr(each, name) for each in self.samples) for name in ("running", "waiting"))
            console.print(f"most requests running: {running}, waiting: {waiting}")
            console.print(f"preemptions: {self.samples[-1].preemptions}")


def run_load(load: Load) -> LoadRun:
    """Send the load, and sample /stats.

    Raises:
        ValueError: a request failed.
        httpx.HTTPError: /stats does not answer.
    """
    run = asyncio.run(_run(load))
    if failed := [result for result in run.results if result.error is not None]:
        raise ValueError(f"{len(failed)} of {load.requests} requests failed, such as: {failed[0].message}")
    return run


async def _run(load: Load) -> LoadRun:
    samples: list[tuple[float, dict[str, Any]]] = []
    starts: list[float] = []  # the client's start as each result tells it, at the earliest when it is told at once

    def done(result: Result) -> None:
        starts.append(time.perf_counter() - result.e2e - result.sent_at)

    sampler = asyncio.create_task(_sample(load.base_url.removesuffix("/v1"), samples))
    try:
        results, seconds = await load_client.run(load, {}, done)
        await asyncio.sleep(AFTER_SECONDS)
    finally:
        sampler.cancel()
    with suppress(asyncio.CancelledError):
        await sampler
    start = min(starts)
    return LoadRun(load, results, seconds, [Sample.of(stats, when - start) for when, stats in samples])


async def _sample(url: str, samples: list[tuple[float, dict[str, Any]]]) -> None:
    """Ask until cancelled."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            answer = (await client.get("/stats")).raise_for_status().json()
            samples.append((time.perf_counter(), answer))
            await asyncio.sleep(SAMPLE_SECONDS)
