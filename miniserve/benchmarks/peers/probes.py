"""How fast the machine is right now: memory bandwidth and matrix products, in a process of its own.

    uv run python -m miniserve.benchmarks.peers.probes 2

A shared machine drifts; these figures stand beside each measurement, and tell a slow server from a slow minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

READ_BYTES = 2**30  # more than any cache holds
SIZE = 1024
SECONDS = 0.5  # for each of the two
MODULE = "miniserve.benchmarks.peers.probes"


@dataclass(frozen=True, slots=True)
class Speed:
    """Of the machine: bytes read from memory, and bf16 multiplications and additions of square matrices."""

    gigabytes_per_second: float
    teraflops: float


def probe(threads: int) -> Speed:
    """Measure in a fresh process, whose threads are gone afterwards."""
    command = [sys.executable, "-m", MODULE, str(threads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Speed(**json.loads(done.stdout))


def measure(threads: int) -> Speed:
    """Measure in this process. The median of many: a core that is busy for a moment does not count."""
    import torch

    torch.set_num_threads(threads)
    left, right = (torch.randn(SIZE, SIZE).to(torch.bfloat16) for _ in range(2))
    return Speed(
        gigabytes_per_second=bandwidth(),
        teraflops=2 * SIZE**3 / _median_seconds(lambda: left @ right) / 1e12,
    )


def bandwidth() -> float:
    """GB/s that torch's threads read from memory, which lies in huge pages: in small ones it is two thirds of that."""
    import torch

    from miniserve.kernels.layout import huge_pages

    memory = huge_pages(READ_BYTES // 4, torch.float32).fill_(1.0)
    return READ_BYTES / _median_seconds(memory.sum) / 1e9


def _median_seconds(call: Callable[[], object]) -> float:
    call()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1])))))
