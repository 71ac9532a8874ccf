"""What the scheduler and the model runner tell each other each step. All that the runner sees of `core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miniserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The part of one request that a step computes: tokens `start` to `end` (exclusive) of `token_ids`.

    `token_ids` and `block_ids` are read-only views of the scheduler's lists: valid during the step.
    `samples` is True when `end` reaches the last known token, so that the step yields a new one.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    end: int
    block_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    samples: bool

    @property
    def num_new_tokens(self) -> int:
        """How many tokens this step computes for the request."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what to compute, in order, and which requests lost their blocks to make room."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted_ids: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(item.num_new_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The sampled tokens, one tuple per `SchedulerOutput.scheduled` item: empty where it does not sample."""

    token_ids: tuple[tuple[int, ...], ...]
