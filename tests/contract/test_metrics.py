"""/metrics counts exactly: scraped before and after a known load, the differences are the sums over the answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.calls import CHAT, COMPLETIONS, Server, streamed

HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds"),
    *("e2e_latency_seconds", "queue_time_seconds", "step_duration_seconds"),
)
COUNTERS = (
    *("prompt_tokens_total", "generation_tokens_total", "requests_finished_total", "preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
)
GAUGES = (
    *("requests_running", "requests_waiting", "kv_cache_usage_ratio", "kv_blocks_total", "kv_blocks_used"),
    *("batch_tokens", "uptime_seconds"),
)


def scrape(server: Server) -> dict[str, float]:
    """All values by `name{label values}`, without the prefix and the model's name; what is not there is 0."""
    response = server.http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    values: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if sample.name.startswith("miniserve_"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == server.model, sample
                inner = ",".join(value for _, value in sorted(labels.items()))
                values[sample.name.removeprefix("miniserve_") + (f"{{{inner}}}" if inner else "")] = sample.value
    return values


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was counted between two scrapes."""
    return defaultdict(float, {name: value - before[name] for name, value in after.items()})


def test_names(server: Server) -> None:
    server.complete("Hi", max_tokens=2)
    text = server.http.get("/metrics").text
    for name in (*(f"{name}_count" for name in HISTOGRAMS), *(f"{name}_bucket" for name in HISTOGRAMS), *GAUGES):
        assert f'\nminiserve_{name}{{model_name="{server.model}"' in text or f'miniserve_{name}{{le="' in text, name
    for name in COUNTERS:
        assert f"\nminiserve_{name}{{" in text, name
    for reason in ("stop", "length", "abort", "error"):
        assert f'reason="{reason}"' in text
    assert "_created" not in text


def test_exact_accounting(scripted: Server) -> None:
    scripted.wait_until_idle()
    before, before_stats = scrape(scripted), scripted.stats()
    with ThreadPoolExecutor(8) as pool:
        calls = [
            *(pool.submit(scripted.complete, f"prompt {n}", max_tokens=5) for n in range(10)),
            *(pool.submit(scripted.complete_stream, f"<<say stream {n}>>", max_tokens=50) for n in range(10)),
            *(pool.submit(scripted.chat, f"<<say chat {n}>>", n=3) for n in range(5)),
            *(pool.submit(scripted.chat_stream, f"<<say >>{n}", n=2) for n in range(5)),
            pool.submit(scripted.complete, ["one", "two", "three"], n=2, max_tokens=3),
            pool.submit(scripted.complete, "only scored", max_tokens=0, echo=True, logprobs=1),
            pool.submit(scripted.complete, "a prompt of some blocks, " * 8, n=4, max_tokens=2),
            pool.submit(scripted.complete, "a prompt of some blocks, " * 8, n=4, max_tokens=2),
        ]
        answers = [call.result() for call in calls]
    scripted.wait_until_idle()
    new, after_stats = grown(before, scrape(scripted)), scripted.stats()

    choices = sum(len(answer.texts) for answer in answers)
    prompt_tokens = sum(answer.usage["prompt_tokens"] for answer in answers)
    completion_tokens = sum(answer.usage["completion_tokens"] for answer in answers)
    cached = sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    reasons = Counter(reason for answer in answers for reason in answer.finish_reasons)
    with_tokens = choices - 1  # all but the scored prompt
    assert new["prompt_tokens_total"] == prompt_tokens
    assert new["generation_tokens_total"] == completion_tokens
    for reason in ("stop", "length", "abort", "error"):
        assert new[f"requests_finished_total{{{reason}}}"] == reasons[reason]
        assert after_stats["requests_finished"][reason] - before_stats["requests_finished"][reason] == reasons[reason]
    assert new["time_to_first_token_seconds_count"] == with_tokens
    assert new["inter_token_latency_seconds_count"] == completion_tokens - with_tokens
    assert new["e2e_latency_seconds_count"] == choices
    assert new["queue_time_seconds_count"] == choices
    assert new["prefix_cache_hits_total"] == cached
    assert cached <= new["prefix_cache_queries_total"] <= prompt_tokens
    assert new["step_duration_seconds_count"] > 0 and new["preemptions_total"] == 0
    after = scrape(scripted)
    for gauge in ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "kv_blocks_used"):
        assert after[gauge] == 0


def test_aborts_are_counted(scripted: Server) -> None:
    """Bug kind: three aborts, and the counter stayed 0."""
    scripted.wait_until_idle()
    before = scrape(scripted)
    body = {"messages": [{"role": "user", "content": "<<endless>><<pause 5>>"}]}
    for _ in range(3):
        with scripted.http.stream("POST", CHAT, json=streamed(body)) as response:
            next(response.iter_text())
    with pytest.raises(httpx.ReadTimeout):
        scripted.http.post(COMPLETIONS, json={"prompt": "<<endless>><<pause 5>>", "max_tokens": 4000}, timeout=0.3)
    scripted.wait_until_idle()
    new = grown(before, scrape(scripted))
    assert new["requests_finished_total{abort}"] == 4
    assert new["e2e_latency_seconds_count"] == 4
    assert new["requests_finished_total{stop}"] == new["requests_finished_total{length}"] == 0


def test_errors_are_counted(scripted: Server) -> None:
    scripted.wait_until_idle()
    before = scrape(scripted)
    for directive in ("<<raise 0>>", "<<error 0>>", "<<error 2>>"):
        assert scripted.post(COMPLETIONS, prompt=directive).status_code == 500
    scripted.wait_until_idle()
    new = grown(before, scrape(scripted))
    assert new["requests_finished_total{error}"] == 3
    assert new["generation_tokens_total"] == 2 and new["time_to_first_token_seconds_count"] == 1


def test_http_statuses_by_route(scripted: Server) -> None:
    before = scrape(scripted)
    scripted.complete("Hi")
    scripted.complete("Hi")
    scripted.chat_stream("Hi")
    scripted.post(CHAT, messages=[])
    scripted.http.get("/v1/models/a/b")
    for path in ("/one", "/two", "/three"):
        scripted.http.get(path)
    new = {name: value for name, value in grown(before, scrape(scripted)).items() if "http_requests" in name and value}
    new = {name: value for name, value in new.items() if "/metrics" not in name and "created" not in name}
    assert new == {
        f"http_requests_total{{POST,{COMPLETIONS},200}}": 2,
        f"http_requests_total{{POST,{CHAT},200}}": 1,
        f"http_requests_total{{POST,{CHAT},400}}": 1,
        **{name: 1 for name in new if "/v1/models/{" in name},
        "http_requests_total{GET,unmatched,404}": 3,
    }
    assert len(new) == 5  # the model's route once, whatever its id
