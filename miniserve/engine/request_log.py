"""Log lines about the engine's work: one per finished request, and a summary now and then. Never any text of a user."""

from __future__ import annotations

import logging
import time

from miniserve.core.request import Request
from miniserve.engine.metrics import StepStats, completes_prompt
from miniserve.outputs import EngineOutput

SUMMARY_SECONDS = 10.0

logger = logging.getLogger(__name__)


class RequestLog:
    """A hook that writes to the log. The summary comes with a step, so an idle engine is silent."""

    def __init__(self) -> None:
        self._since = self._last_step = float("-inf")  # the start of the summary's interval, and the end of a step
        self._prompt_tokens = self._generation_tokens = 0  # in the interval
        self._new_prompt_tokens = self._new_generation_tokens = 0  # of the step that is being told of

    def on_step(self, stats: StepStats) -> None:
        """Write the summary when it is due."""
        now = time.monotonic()
        start = now - stats.duration
        if start - self._last_step >= SUMMARY_SECONDS:  # a long idle time is not part of an interval
            self._start_interval(start)
        self._prompt_tokens += self._new_prompt_tokens
        self._generation_tokens += self._new_generation_tokens
        self._new_prompt_tokens = self._new_generation_tokens = 0
        if now - self._since >= SUMMARY_SECONDS:
            self._log_summary(stats, now - self._since)
            self._start_interval(now)
        self._last_step = now

    def on_output(self, request: Request, output: EngineOutput, gap: float | None) -> None:
        """Count, and write the line of a request that ended."""
        self._new_generation_tokens += len(output.token_ids)
        if completes_prompt(request, output, gap):
            self._new_prompt_tokens += output.usage.prompt_tokens
        if output.finish_reason is not None:
            _log_finished(output)

    def _start_interval(self, now: float) -> None:
        self._since = now
        self._prompt_tokens = self._generation_tokens = 0

    def _log_summary(self, stats: StepStats, seconds: float) -> None:
        queries = stats.prefix_query_tokens
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
            "KV cache %.1f%%, prefix hit rate %.1f%%",
            self._prompt_tokens / seconds,
            self._generation_tokens / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_usage,
            100 * stats.prefix_hit_tokens / queries if queries else 0.0,
        )


def _log_finished(output: EngineOutput) -> None:
    usage, timing = output.usage, output.timing
    assert timing is not None
    logger.info(
        "request %s: prompt %d (%d cached), output %d tokens, first token %s, total %.3f s, %s",
        output.request_id,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        "none" if timing.first_token is None else f"{timing.first_token:.3f} s",
        timing.total,
        output.finish_reason,
    )
