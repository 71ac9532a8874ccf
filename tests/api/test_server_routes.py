from __future__ import annotations

from importlib.metadata import version
from typing import Any

from miniserve.api.schemas.server import HealthResponse, ModelCard, ModelList
from miniserve.api.schemas.tokenize import TokenizeResponse
from tests.api.driver import MODEL, Api
from tests.engine.scripted import EOS, TOKENIZER, tokens


def test_models_are_the_names_of_one_model(api: Api) -> None:
    listed = api.call("GET", "/v1/models").json()
    ModelList.model_validate(listed, strict=True)
    assert [card["id"] for card in listed["data"]] == [MODEL, "alias"]
    assert {card["max_model_len"] for card in listed["data"]} == {256}
    assert {card["root"] for card in listed["data"]} == {MODEL}


def test_a_models_name_may_have_slashes(api: Api) -> None:
    for name in (MODEL, "alias"):
        card = api.call("GET", f"/v1/models/{name}").json()
        ModelCard.model_validate(card, strict=True)
        assert card["id"] == name
    assert api.call("GET", "/v1/models/org").brief() == (404, "invalid_request_error", "model_not_found")


def test_health_while_it_lives_and_after(api: Api) -> None:
    alive = api.call("GET", "/health")
    HealthResponse.model_validate(alive.json(), strict=True)
    assert alive.status == 200 and alive.json()["status"] == "ok"
    api.run(api.engine.drain(0.0))
    assert (api.call("GET", "/health").status, api.call("GET", "/health").json()["status"]) == (503, "draining")
    api.run(api.engine.stop())
    assert (api.call("GET", "/health").status, api.call("GET", "/health").json()["status"]) == (503, "stopped")


def test_a_dead_engine_fails_its_callers_and_its_health(api: Api) -> None:
    def broken(*_: Any) -> Any:
        raise AssertionError("scheduler")

    api.engine.parts.engine.scheduler.schedule = broken  # type: ignore[method-assign]
    assert api.complete().brief() == (503, "server_error", "engine_unavailable")
    assert api.call("GET", "/health").status == 503 and api.call("GET", "/health").json()["status"] == "dead"
    assert api.call("GET", "/metrics").status == 200 and api.call("GET", "/stats").status == 200


def test_stats_are_what_a_person_looks_at(api: Api) -> None:
    api.chat()
    stats = api.call("GET", "/stats").json()
    assert stats["requests_finished"]["stop"] == 1 and stats["generation_tokens_total"] == 3
    assert {"model", "device", "backend", "running", "waiting", "kv_blocks_used", "uptime_seconds"} <= stats.keys()


def test_metrics_equal_the_usage_of_the_answers(api: Api) -> None:
    answers = [api.chat(n=2), api.complete(["a", "bc"]), api.complete(stream=True, n=2)]
    usage = [answer.json()["usage"] for answer in answers[:2]]
    prompt_tokens = sum(part["prompt_tokens"] for part in usage) + 3
    completion_tokens = sum(part["completion_tokens"] for part in usage) + 6
    assert api.metric('miniserve_prompt_tokens_total{model_name="scripted"}') == prompt_tokens
    assert api.metric('miniserve_generation_tokens_total{model_name="scripted"}') == completion_tokens
    answer = api.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")


def test_version(api: Api) -> None:
    assert api.call("GET", "/version").json() == {"version": version("miniserve")}


def test_tokenize_text(api: Api) -> None:
    answer = api.post("/tokenize", {"prompt": "aHello", "return_token_strs": True}).json()
    TokenizeResponse.model_validate(answer, strict=True)
    assert answer == {
        "count": 2,
        "max_model_len": 256,
        "tokens": tokens("aHello"),
        "token_strs": ["a", "Hello"],
    }
    assert api.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_tokenize_messages_gives_what_a_chat_would_start_with(api: Api) -> None:
    messages = [{"role": "user", "content": "hi <eos>"}]
    answer = api.post("/tokenize", {"messages": messages}).json()
    assert answer["count"] == api.post("/v1/chat/completions", {"messages": messages}).json()["usage"]["prompt_tokens"]
    assert TOKENIZER.decode(answer["tokens"]) == "user: hi <eos>\n" and EOS not in answer["tokens"]


def test_tokenize_wants_one_of_both(api: Api) -> None:
    messages = [{"role": "user", "content": "hi"}]
    both: dict[str, Any] = {"prompt": "a", "messages": messages}
    assert api.post("/tokenize", {}).error["param"] == "prompt"
    assert api.post("/tokenize", both).error["param"] == "prompt"
    wrong_bodies: tuple[dict[str, Any], ...] = (
        {"prompt": 1},
        {"prompt": ["a"]},
        {"messages": []},
        {"prompt": "a", "add_special_tokens": "no"},
    )
    for body in wrong_bodies:
        assert api.post("/tokenize", body).status == 400


def test_detokenize(api: Api) -> None:
    assert api.post("/detokenize", {"tokens": [*tokens("é你"), EOS]}).json() == {"prompt": "é你<eos>"}
    assert api.post("/detokenize", {"tokens": tokens("é")[:1]}).json() == {"prompt": "\ufffd"}
    assert api.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for wrong in ([263], [-1], [True], ["a"], [1.0], "a", None, [10**30]):
        answer = api.post("/detokenize", {"tokens": wrong})
        assert answer.status == 400 and answer.error["param"] == "tokens"
