"""The benchmark of sampling: what it runs, and that arms take turns."""

from __future__ import annotations

import torch

from miniserve.benchmarks.sampling import KINDS, measure, tasks_of
from miniserve.kernels import sampling


def test_every_kind_runs() -> None:
    tasks = tasks_of(sampling, torch.randn(3, 100, generator=torch.Generator().manual_seed(0)))
    assert list(tasks) == [*KINDS, "logprobs, 5 top"]
    results = {name: run() for name, run in tasks.items()}
    assert all(len(results[name]) == 3 for name in KINDS)  # type: ignore[arg-type]
    assert results["logprobs, 5 top"].shape == (3, 2 + 2 * 5)  # type: ignore[attr-defined]


def test_arms_take_turns_after_one_call_that_does_not_count() -> None:
    calls: list[str] = []
    medians = measure({name: lambda name=name: calls.append(name) for name in "ab"}, 3)  # type: ignore[misc]
    assert calls == ["a", "b"] * 4
    assert list(medians) == ["a", "b"] and all(value >= 0 for value in medians.values())
