"""What the scheduler and the model runner tell each other each step. All that the runner sees of `core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miniserve.outputs import TokenLogprobs
from miniserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The part of one request that a step computes: tokens `start` to `end` (exclusive) of `token_ids`.

    `token_ids` and `block_ids` are read-only views of the scheduler's lists: valid during the step.

    Attributes:
        samples: `end` reaches the last known token, so that the step yields a new one.
        banned_ids: tokens that must not be sampled in this step (end tokens before `min_tokens`).
        wants_prompt_logprobs: the step owes the logprobs of the prompt tokens `start + 1` to `end`, as far as there
            are such.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    end: int
    block_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    samples: bool
    banned_ids: frozenset[int] = frozenset()
    wants_prompt_logprobs: bool = False

    @property
    def num_new_tokens(self) -> int:
        """How many tokens this step computes for the request."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what to compute, in order, and which requests lost their blocks to make room.

    Attributes:
        blocks_to_clear: newly given blocks whose memory may hold NaN of an earlier owner: to be zeroed before anything
            is written. A masked slot still takes part in attention, as 0 x its value.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted_ids: tuple[str, ...] = ()
    blocks_to_clear: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(item.num_new_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class RunnerResult:
    """What a step computed for one scheduled request.

    Attributes:
        token_ids: the sampled tokens; empty where the request does not sample.
        logprobs: one entry per sampled token, where `SamplingParams.logprobs` asks for them, else empty.
        prompt_logprobs: of the prompt tokens from position `start + 1` on, where they are wanted, else empty.
        error: why this request cannot go on, and nothing else is set; None if all is well.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """One result per `SchedulerOutput.scheduled` item, in its order."""

    results: tuple[RunnerResult, ...]
