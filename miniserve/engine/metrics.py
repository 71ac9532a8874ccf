"""What the engine reports about itself: a hook that is called once a step and once a finished request.

The hook is told numbers and never asked anything; what is done with them (a progress bar, Prometheus) is its own
business. It runs on the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from miniserve.core.schedule import SchedulerOutput
from miniserve.core.scheduler import Scheduler
from miniserve.outputs import EngineOutput


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
    """Gets the numbers of each step and of each finished request."""

    def on_step(self, stats: StepStats) -> None:
        """A step is done; its outputs are about to be handed out."""

    def on_finished(self, output: EngineOutput) -> None:
        """A request ended: `output` is its last, with usage and timing."""
