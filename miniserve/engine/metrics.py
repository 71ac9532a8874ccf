"""What the engine reports about itself: hooks that are told of each step and of each output.

A hook is told and never asked; what is done with it (statistics, Prometheus, log lines) is its own business. Hooks run
on the engine's thread, and one that raises is none of the engine's business either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from miniserve.core.request import Request
from miniserve.core.schedule import SchedulerOutput
from miniserve.core.scheduler import Scheduler
from miniserve.outputs import EngineOutput, FinishReason


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. Counters (`preemptions`, `prefix_*`) count from the start of the engine."""

    duration: float  # seconds
    num_scheduled_requests: int
    num_scheduled_tokens: int
    num_running: int
    num_waiting: int
    kv_usage: float  # share of the KV blocks in use, in [0, 1]
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int

    @classmethod
    def of(cls, step: SchedulerOutput, scheduler: Scheduler, duration: float) -> StepStats:
        """The stats after `step` was computed and taken in."""
        return cls(
            duration=duration,
            num_scheduled_requests=len(step.scheduled),
            num_scheduled_tokens=step.num_tokens,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=scheduler.kv.usage,
            preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.kv.num_prefix_query_tokens,
            prefix_hit_tokens=scheduler.kv.num_prefix_hit_tokens,
        )


class MetricsHook(Protocol):
    """Gets the numbers of each step and of each output. In metrics, a request is one choice of one prompt."""

    def on_step(self, stats: StepStats) -> None:
        """A step is done; its outputs have been told of."""

    def on_output(self, request: Request, output: EngineOutput, gap: float | None) -> None:
        """A request got tokens or ended (also by an abort or an error); `output` is what its client gets.

        `gap`: seconds since its previous output with tokens; None if there was none.
        """


def completes_prompt(request: Request, output: EngineOutput, gap: float | None) -> bool:
    """Whether `output` is the one to count its prompt's tokens with: each prompt that was computed is counted once.

    That is the first output with tokens or, where only the prompt was wanted, the end. The other choices of a prompt
    do not count it again.
    """
    is_first = bool(output.token_ids) and gap is None
    is_prompt_only = output.finish_reason is FinishReason.LENGTH and output.usage.completion_tokens == 0
    return not request.is_fork and (is_first or is_prompt_only)
