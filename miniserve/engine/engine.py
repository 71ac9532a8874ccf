"""The engine: one `step` after the other, for all requests at once. The loop that everything else serves.

Single-threaded: whoever owns an engine calls it from one thread only. What goes wrong is kept as small as it can be: a
request that the runner or the output processor cannot handle ends with an error, and the others do not notice. The
scheduler's state belongs to all requests, and so does the device: when they fail, the engine ends, and the exception
propagates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from miniserve.core.request import Request
from miniserve.core.schedule import RunnerOutput, RunnerResult, SchedulerOutput
from miniserve.core.scheduler import RequestNews, Scheduler
from miniserve.engine.constrained import ConstrainedSampling
from miniserve.engine.metrics import MetricsHook, StepStats
from miniserve.engine.output_processor import OutputProcessor, Processed
from miniserve.errors import DeviceFailedError, InternalError
from miniserve.outputs import EngineOutput
from miniserve.structured.masks import MaskWorker

logger = logging.getLogger(__name__)

# What users are told; the traceback is for the log.
ENGINE_FAILED = "the engine failed on this request"


class Runner(Protocol):
    """What computes a step: `runner.ModelRunner`, or a script in tests. Computing a step twice does no harm."""

    def execute(self, step: SchedulerOutput) -> Any:
        """The logits of the requests that sample, in whatever form `sample` takes them.

        Raises:
            DeviceFailedError: nothing can be computed any more. Whatever else it or `sample` raises concerns the step.
        """

    def sample(
        self, step: SchedulerOutput, logits: Any, masks: Mapping[str, Any] = MappingProxyType({})
    ) -> RunnerOutput:
        """Their next tokens. `masks`: by request id, which tokens are allowed, as `structured.masks` packs it."""


class Engine:
    """Scheduler, runner and output processor, and the order in which they act.

    `masks` computes what the grammars of requests allow; None is a worker of its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output_processor: OutputProcessor,
        hooks: Sequence[MetricsHook] = (),
        masks: MaskWorker | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.output_processor = output_processor
        self.hooks = hooks
        self.masks = MaskWorker() if masks is None else masks
        self._failed_hooks: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def close(self) -> None:
        """Let the threads end that compute masks; those that are stuck end with the process."""
        self.masks.close()

    def add(self, request: Request, forks: Sequence[Request] = (), *, arrival: float | None = None) -> None:
        """Queue a request, and `forks`, the other choices of its prompt.

        Args:
            request: the only choice, or the first one.
            forks: see `Scheduler.add`.
            arrival: when it was submitted, on the clock of `time.perf_counter`; None is now.

        Raises:
            RequestError: it can never run.
            InternalError: its text or its grammar failed. Nothing was added in either case.
        """
        choices = (request, *forks)
        try:
            states = {choice.request_id: self.output_processor.state(choice, arrival) for choice in choices}
        except Exception as error:
            logger.exception("the output of request %s cannot be followed: it is not taken in", request.request_id)
            raise InternalError(ENGINE_FAILED) from error
        self.scheduler.add(request, forks)
        self.output_processor.add(states)

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request at once and free its blocks; None if it is unknown or has ended."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        output = self.output_processor.abort(request)
        self._tell(lambda hook: hook.on_output(request, output, None))
        return output

    def step(self) -> list[EngineOutput]:
        """Compute one step of all scheduled requests; returns what it added to each that got a token or ended."""
        start = time.perf_counter()
        step = self.scheduler.schedule()
        if not step.scheduled:
            return []
        self.output_processor.scheduled(step)
        computed = self._compute(step)
        news = self.scheduler.update(step, computed)
        outputs = [output for item in news if (output := self._output(item)) is not None]
        stats = StepStats.of(step, self.scheduler, time.perf_counter() - start)
        self._tell(lambda hook: hook.on_step(stats))
        return outputs

    def _compute(self, step: SchedulerOutput) -> RunnerOutput:
        sampling = ConstrainedSampling(self.runner.sample, self.masks, *self.output_processor.constrained(step))
        try:
            return sampling.sample(step, self.runner.execute(step))
        except DeviceFailedError:
            raise
        except Exception:
            logger.exception("a step of %d requests failed: computing each alone", len(step.scheduled))
            sampling.wait()
            return RunnerOutput(tuple(self._compute_alone(alone, sampling) for alone in _steps_alone(step)))

    def _compute_alone(self, step: SchedulerOutput, sampling: ConstrainedSampling) -> RunnerResult:
        """One request in a step of its own: it is the one that fails, or it goes on unharmed."""
        [item] = step.scheduled
        try:
            [result] = sampling.sample(step, self.runner.execute(step)).results
            return result
        except DeviceFailedError:
            raise
        except Exception:
            logger.exception("request %s failed, and ends", item.request_id)
            return RunnerResult(error=ENGINE_FAILED)

    def _output(self, news: RequestNews) -> EngineOutput | None:
        request = news.request
        try:
            processed = self.output_processor.process(news)
        except Exception:
            logger.exception("the output of request %s failed, and it ends", request.request_id)
            processed = Processed(self.output_processor.fail(request, ENGINE_FAILED))
        if processed is None:
            return None
        output, gap = processed.output, processed.gap
        if output.finish_reason is not None:  # the scheduler has not seen the text, nor the grammar
            self.scheduler.finish(request, output.finish_reason, output.stop_reason)
        self._tell(lambda hook: hook.on_output(request, output, gap))
        return output

    def _tell(self, call: Callable[[MetricsHook], None]) -> None:
        """Call every hook; whatever one raises stays here, and is logged once per hook."""
        for index, hook in enumerate(self.hooks):
            try:
                call(hook)
            except Exception:
                if index not in self._failed_hooks:
                    self._failed_hooks.add(index)
                    logger.exception("%s failed; further failures of it are not logged", type(hook).__name__)


def _steps_alone(step: SchedulerOutput) -> list[SchedulerOutput]:
    """A step for each of its requests. The whole one may have failed before it had cleared any block."""
    steps = []
    for item in step.scheduled:
        to_clear = tuple(block_id for block_id in step.blocks_to_clear if block_id in item.block_ids)
        steps.append(SchedulerOutput((item,), blocks_to_clear=to_clear))
    return steps
