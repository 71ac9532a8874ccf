"""The engine: one `step` after the other, for all requests at once. The loop that everything else serves.

Single-threaded: whoever owns an engine calls it from one thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from miniserve.core.request import Request
from miniserve.core.schedule import RunnerOutput, SchedulerOutput
from miniserve.core.scheduler import Scheduler
from miniserve.engine.metrics import MetricsHook, StepStats
from miniserve.engine.output_processor import OutputProcessor
from miniserve.outputs import EngineOutput, FinishReason


class Runner(Protocol):
    """What computes a step: `runner.ModelRunner`, or a script in tests."""

    def execute(self, step: SchedulerOutput) -> Any:
        """The logits of the requests that sample, in whatever form `sample` takes them."""

    def sample(self, step: SchedulerOutput, logits: Any) -> RunnerOutput:
        """Their next tokens."""


class Engine:
    """Scheduler, runner and output processor, and the order in which they act."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output_processor: OutputProcessor,
        hooks: Sequence[MetricsHook] = (),
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.output_processor = output_processor
        self.hooks = hooks

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run.
        """
        self.scheduler.add(request)
        self.output_processor.add(request)

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request at once and free its blocks; None if it is unknown or has ended."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        output = self.output_processor.abort(request)
        self._report_finished(output)
        return output

    def step(self) -> list[EngineOutput]:
        """Compute one step of all scheduled requests; returns what it added to each that got a token."""
        start = time.perf_counter()
        step = self.scheduler.schedule()
        if not step.scheduled:
            return []
        logits = self.runner.execute(step)
        sampled = self.runner.sample(step, logits)
        news = self.scheduler.update(step, sampled)
        outputs = [self._output(request, token_ids) for request, token_ids in news]
        stats = StepStats.of(step, self.scheduler, time.perf_counter() - start)
        for hook in self.hooks:
            hook.on_step(stats)
        return outputs

    def _output(self, request: Request, token_ids: tuple[int, ...]) -> EngineOutput:
        output, stop = self.output_processor.process(request, token_ids)
        if stop is not None:
            self.scheduler.finish(request, FinishReason.STOP, stop)
        if output.finish_reason is not None:
            self._report_finished(output)
        return output

    def _report_finished(self, output: EngineOutput) -> None:
        for hook in self.hooks:
            hook.on_finished(output)
