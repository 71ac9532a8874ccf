"""The engine's metrics for Prometheus. With the API, the only place that knows `prometheus_client`.

Counters and histograms are fed by the hook, on the engine's thread. Gauges are read from the scheduler when Prometheus
asks: they cannot be out of date. A request, in all of them, is one choice of one prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from miniserve.core.request import Request
from miniserve.engine.engine import Engine
from miniserve.engine.metrics import StepStats, completes_prompt
from miniserve.outputs import EngineOutput, FinishReason

# From a small model on a GPU to a large prompt on a CPU.
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)


class PrometheusMetrics:
    """A hook, and the registry with what it counted.

    Attributes:
        registry: the engine's own; the API adds its HTTP metrics to it.
    """

    def __init__(self, model_name: str) -> None:
        self.registry: CollectorRegistry = _Registry()
        self._gauges = _EngineGauges(model_name)
        self.registry.register(self._gauges)
        make = _Maker(self.registry, model_name)
        self._prompt_tokens = make.counter("prompt_tokens", "Tokens of the prompts that were computed or cached.")
        self._generation_tokens = make.counter("generation_tokens", "Tokens that were generated.")
        self._finished = make.finished_counters()
        self._preemptions = make.counter("preemptions", "Requests that lost their KV blocks, to be computed again.")
        self._prefix_queries = make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._time_to_first_token = make.histogram(
            "time_to_first_token", "From the submission of a request to its first token.", _WAIT_BUCKETS
        )
        self._inter_token_latency = make.histogram(
            "inter_token_latency", "Between two tokens of a request.", _STEP_BUCKETS
        )
        self._time_per_output_token = make.histogram(
            "time_per_output_token", "Mean time per token after the first, of requests that ended.", _STEP_BUCKETS
        )
        self._e2e_latency = make.histogram(
            "e2e_latency", "From the submission of a request to its end, whatever the reason.", _E2E_BUCKETS
        )
        self._queue_time = make.histogram(
            "queue_time", "From the submission of a request to its first step.", _WAIT_BUCKETS
        )
        self._step_duration = make.histogram(
            "step_duration", "One step of the engine, for all requests in it.", _STEP_BUCKETS
        )
        self._last: StepStats | None = None

    def bind(self, engine: Engine) -> None:
        """Read the gauges from this engine from now on."""
        self._gauges.engine = engine

    def on_step(self, stats: StepStats) -> None:
        """Take in what the step counted; `stats` has totals, counters want what is new."""
        last, self._last = self._last, stats
        self._gauges.batch_tokens = stats.num_scheduled_tokens
        self._step_duration.observe(stats.duration)
        self._preemptions.inc(stats.preemptions - (last.preemptions if last else 0))
        self._prefix_queries.inc(stats.prefix_query_tokens - (last.prefix_query_tokens if last else 0))
        self._prefix_hits.inc(stats.prefix_hit_tokens - (last.prefix_hit_tokens if last else 0))

    def on_output(self, request: Request, output: EngineOutput, gap: float | None) -> None:
        """Count tokens, times and ends."""
        if completes_prompt(request, output, gap):
            self._prompt_tokens.inc(output.usage.prompt_tokens)
        if output.token_ids:
            self._count_tokens(output, gap)
        if output.finish_reason is not None:
            self._count_end(output, output.finish_reason)

    def _count_tokens(self, output: EngineOutput, gap: float | None) -> None:
        num_tokens = len(output.token_ids)
        self._generation_tokens.inc(num_tokens)
        if gap is None:
            assert output.timing is not None and output.timing.first_token is not None
            self._time_to_first_token.observe(output.timing.first_token)
            self._observe_queue_time(output)
        # Several tokens of one step came together: they share the time since the tokens before them.
        for _ in range(num_tokens - (gap is None)):
            self._inter_token_latency.observe((gap or 0.0) / num_tokens)

    def _count_end(self, output: EngineOutput, reason: FinishReason) -> None:
        self._finished[reason].inc()
        timing, num_tokens = output.timing, output.usage.completion_tokens
        assert timing is not None
        self._e2e_latency.observe(timing.total)
        if timing.first_token is None:
            self._observe_queue_time(output)
        elif num_tokens > 1:
            self._time_per_output_token.observe((timing.total - timing.first_token) / (num_tokens - 1))

    def _observe_queue_time(self, output: EngineOutput) -> None:
        if output.timing is not None and output.timing.queue is not None:
            self._queue_time.observe(output.timing.queue)


class _Maker:
    """Registers metrics under our prefix, with the model's name as a label."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

    def counter(self, name: str, help_text: str) -> Counter:
        family = Counter(f"miniserve_{name}", help_text, ["model_name"], registry=self._registry)
        return family.labels(self._model_name)

    def finished_counters(self) -> dict[FinishReason, Counter]:
        """One counter a reason, all of them there from the start: a rate needs its zero."""
        family = Counter(
            "miniserve_requests_finished",
            "Requests that ended, by reason.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        return {reason: family.labels(self._model_name, reason.value) for reason in FinishReason}

    def histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"miniserve_{name}_seconds", help_text, ["model_name"], buckets=buckets, registry=self._registry
        )
        return family.labels(self._model_name)


class _EngineGauges(Collector):
    """What the engine is doing at the moment of the scrape."""

    def __init__(self, model_name: str) -> None:
        self.engine: Engine | None = None
        self.batch_tokens = 0  # of the last step
        self._labels = {"model_name": model_name}
        self._start = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        yield from (self._gauge(name, help_text, value) for name, help_text, value in self._values())
        # Declared without a type: by convention only counters end with "total", and checkers insist.
        if self.engine is not None:
            blocks = UnknownMetricFamily("miniserve_kv_blocks_total", "KV blocks that requests can hold.")
            yield self._with_sample(blocks, self.engine.scheduler.kv.pool.capacity)

    def _values(self) -> Iterator[tuple[str, str, float]]:
        yield "uptime_seconds", "Time since the server was started.", time.monotonic() - self._start
        if self.engine is None:
            return
        scheduler, kv = self.engine.scheduler, self.engine.scheduler.kv
        yield "requests_running", "Requests that hold KV blocks.", scheduler.num_running
        yield "requests_waiting", "Requests in the queue.", scheduler.num_waiting
        yield "kv_cache_usage_ratio", "Share of the KV blocks that requests hold.", kv.usage
        yield "kv_blocks_used", "KV blocks that requests hold.", kv.pool.num_used
        yield "batch_tokens", "Tokens in the last step; 0 when idle.", self.batch_tokens if scheduler.has_work else 0

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        return self._with_sample(GaugeMetricFamily(f"miniserve_{name}", help_text), value)

    def _with_sample(self, metric: Metric, value: float) -> Metric:
        metric.add_sample(metric.name, self._labels, value)
        return metric


class _Registry(CollectorRegistry):
    """Without the library's `_created` series, which double the page; its own switch would be for the whole process."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
