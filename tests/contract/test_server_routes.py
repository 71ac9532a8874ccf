"""The endpoints beside the completions: models, tokens, health, stats, version."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.calls import CHAT, Server, check_error


def test_models(server: Server) -> None:
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert card["id"] == server.model and card["object"] == "model"
    assert card["max_model_len"] == {"scripted": 4096, "smollm2": 1024}[server.model]
    assert server.http.get(f"/v1/models/{server.model}").json() == card
    check_error(server.http.get("/v1/models/other"), 404, "model_not_found")
    check_error(server.http.get("/v1/models/a/b/c"), 404, "model_not_found")


def test_health_and_version(server: Server) -> None:
    response = server.http.get("/health")
    assert response.status_code == 200 and response.json()["status"] == "ok"
    assert response.json()["last_step_age_seconds"] >= 0
    assert server.http.get("/version").json()["version"]


TEXTS = ["Hello world", "", " leading", "äöü 你好 \N{GRINNING FACE}", "a\n\n\tb", "<|im_end|><eos>", "x" * 1000]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_there_and_back(server: Server, text: str) -> None:
    answer = server.post("/tokenize", prompt=text).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] > 0
    assert server.post("/detokenize", tokens=answer["tokens"]).json()["prompt"] == text


def test_tokenize_counts_as_completions_do(server: Server) -> None:
    prompt = "Hello, how are you?"
    count = server.post("/tokenize", prompt=prompt).json()["count"]
    assert server.complete(prompt, max_tokens=1).usage["prompt_tokens"] == count
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    count = server.post("/tokenize", messages=messages).json()["count"]
    assert server.post(CHAT, messages=messages, max_tokens=1).json()["usage"]["prompt_tokens"] == count


def test_the_tokens_as_text(server: Server) -> None:
    answer = server.post("/tokenize", prompt="Hello, how are you?", return_token_strs=True).json()
    assert "".join(answer["token_strs"]) == "Hello, how are you?"
    assert len(answer["token_strs"]) == answer["count"]


def test_tokenize_refuses(scripted: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    check_error(scripted.post("/tokenize"), 400, "invalid_value")
    check_error(scripted.post("/tokenize", prompt="Hi", messages=messages), 400, "invalid_value")
    for field, value in (("prompt", 5), ("prompt", ["Hi"]), ("messages", []), ("messages", "Hi")):
        check_error(scripted.post("/tokenize", **{field: value}), 400, "invalid_value", field)
    check_error(scripted.post("/tokenize", messages=messages, tools=[{}]), 400, "invalid_value", "tools")
    refused: dict[str, Any] = {"documents": [{}], "chat_template": "x", "truncate_prompt_tokens": 1}
    for field, value in refused.items():
        response = scripted.post("/tokenize", messages=messages, **{field: value})
        check_error(response, 400, "unsupported_parameter", field)


def test_detokenize_refuses(scripted: Server) -> None:
    for tokens in (None, "1", [1.5], ["1"], [True], [-1], [263], [2**70], {"a": 1}):
        check_error(scripted.post("/detokenize", tokens=tokens), 400, "invalid_value", "tokens")
    assert scripted.post("/detokenize", tokens=[]).json()["prompt"] == ""


def test_stats(server: Server) -> None:
    server.wait_until_idle()
    before = server.stats()
    usages = [server.complete("Hi", max_tokens=2, n=2).usage, server.complete_stream("Hi you", max_tokens=1).usage]
    after = server.stats()
    assert after["model"] == server.model and after["device"] == "cpu" and after["backend"]
    for name in ("running", "waiting", "kv_blocks_used"):
        assert after[name] == 0
    assert after["kv_blocks_total"] > 0 and 0 <= after["prefix_cache_hit_rate"] <= 1
    for name, part in (("prompt_tokens_total", "prompt_tokens"), ("generation_tokens_total", "completion_tokens")):
        assert after[name] - before[name] == sum(usage[part] for usage in usages)
    assert sum(after["requests_finished"].values()) - sum(before["requests_finished"].values()) == 3
    assert after["uptime_seconds"] > before["uptime_seconds"] and after["preemptions"] >= 0
    assert after["tokens_per_second"] > 0 and after["last_step_age_seconds"] >= 0


def test_a_running_request_shows_in_stats(scripted: Server) -> None:
    with scripted.http.stream(
        "POST", CHAT, json={"messages": [{"role": "user", "content": "<<endless>><<pause 5>>"}], "stream": True}
    ):
        numbers = scripted.wait_for(lambda numbers: numbers["running"] == 1)
        assert numbers["kv_blocks_used"] > 0 and numbers["waiting"] == 0
        assert scripted.http.get("/health").status_code == 200
    scripted.wait_until_idle()
