"""The page that Prometheus reads: names, conventions, and a page before there is an engine.

What the numbers are is asked in `test_async_engine`, after a known load.
"""

from __future__ import annotations

import re

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from miniserve.core.scheduler import RequestNews
from miniserve.engine.prometheus import PrometheusMetrics
from miniserve.outputs import EngineOutput, FinishReason, Timing, Usage
from tests.engine.scripted import make_parts, make_request

COUNTERS = {
    "prompt_tokens",
    "generation_tokens",
    "requests_finished",
    "preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
}
GAUGES = {
    "requests_running",
    "requests_waiting",
    "kv_cache_usage_ratio",
    "kv_blocks_used",
    "batch_tokens",
    "uptime_seconds",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "e2e_latency_seconds",
    "queue_time_seconds",
    "step_duration_seconds",
}


def page(metrics: PrometheusMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def used_metrics() -> PrometheusMetrics:
    metrics = PrometheusMetrics("some/model")
    engine = make_parts(hooks=[metrics]).engine
    metrics.bind(engine)
    engine.add(make_request("a", max_tokens=3))
    while engine.has_work:
        engine.step()
    return metrics


def test_names_and_types() -> None:
    families = {family.name: family for family in text_string_to_metric_families(page(used_metrics()))}
    types = {name.removeprefix("miniserve_"): family.type for name, family in families.items()}
    expected = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    assert types == expected | dict.fromkeys(HISTOGRAMS, "histogram") | {"kv_blocks_total": "unknown"}
    for family in families.values():
        assert family.name.startswith("miniserve_") and family.documentation
        assert all(sample.labels["model_name"] == "some/model" for sample in family.samples)


def test_conventions_that_checkers_know() -> None:
    """Counters, and nothing else, end with _total; base units; no creation times as further gauges."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page(used_metrics()), re.MULTILINE))
    assert {name for name, kind in types.items() if kind == "counter"} == {f"miniserve_{n}_total" for n in COUNTERS}
    assert not [name for name, kind in types.items() if name.endswith("_total") and kind in ("gauge", "histogram")]
    assert "_created" not in page(used_metrics())


def test_all_reasons_are_there_from_the_start() -> None:
    metrics = PrometheusMetrics("m")
    for reason in ("stop", "length", "abort", "error"):
        labels = {"model_name": "m", "reason": reason}
        assert metrics.registry.get_sample_value("miniserve_requests_finished_total", labels) == 0


def test_a_page_before_the_engine_is_there() -> None:
    text = page(PrometheusMetrics("m"))
    assert "miniserve_uptime_seconds" in text and "miniserve_requests_running" not in text


def test_two_engines_in_one_process() -> None:
    """Bug: the library's own registry is one for the process, and the second server could not be made."""
    first, second = PrometheusMetrics("a"), PrometheusMetrics("b")
    assert first.registry is not second.registry


@pytest.mark.parametrize(("gap", "count", "total"), [(None, 2, 0.0), (0.6, 3, 0.6)])
def test_tokens_of_one_step_share_its_time(gap: float | None, count: int, total: float) -> None:
    metrics = PrometheusMetrics("m")
    request = make_request("a")
    news = RequestNews(request, (1, 2, 3))
    output = EngineOutput("a", news.token_ids, "abc", Usage(3, 3, 0), timing=Timing(0.1, 0.2, 0.3))
    metrics.on_output(request, output, gap)
    value = metrics.registry.get_sample_value
    assert value("miniserve_inter_token_latency_seconds_count", {"model_name": "m"}) == count
    assert value("miniserve_inter_token_latency_seconds_sum", {"model_name": "m"}) == pytest.approx(total)


def test_time_per_output_token_leaves_out_the_first() -> None:
    metrics = PrometheusMetrics("m")
    output = EngineOutput("a", (), "", Usage(3, 5, 0), FinishReason.ABORT, timing=Timing(0.5, 2.0, 10.0))
    metrics.on_output(make_request("a"), output, None)
    value = metrics.registry.get_sample_value
    assert value("miniserve_time_per_output_token_seconds_sum", {"model_name": "m"}) == pytest.approx(2.0)
    assert value("miniserve_e2e_latency_seconds_sum", {"model_name": "m"}) == pytest.approx(10.0)
