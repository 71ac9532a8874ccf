from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from miniserve.api.errors import MAX_MESSAGE_LENGTH, describe_error
from miniserve.config import ServerConfig
from miniserve.errors import InternalError, InvalidParameterError, MiniserveError, QueueFullError
from tests.api.driver import CHAT, COMPLETIONS, HELLO, Api
from tests.engine.scripted import EOS, tokens

INVALID = (400, "invalid_request_error", "invalid_value")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"1",
        b'{"prompt": "a"} x',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "\\udcf0"}',
        b'{"prompt": "a", "user": "\\ud83d"}',
        b'{"prompt": "a\x01"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "metadata": {"x": [-1e999]}}',
        b'{"prompt": "a", "metadata": ' + b"9" * 400 + b".0}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "metadata": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 5000,
    ],
)
def test_a_body_that_is_not_a_json_object_is_a_400(api: Api, body: bytes) -> None:
    """20,000 nested arrays, even in an ignored field, were a RecursionError; half a surrogate pair was a 500."""
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        assert api.post(path, parts=[body]).brief() == INVALID


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_another_content_type_is_a_400(api: Api, content_type: str) -> None:
    answer = api.post(COMPLETIONS, {"prompt": "a"}, headers=[("content-type", content_type)])
    assert answer.brief() == INVALID and "application/json" in answer.error["message"]


def test_a_content_type_may_have_parameters(api: Api) -> None:
    headers = [("content-type", "Application/JSON; charset=utf-8")]
    assert api.post(COMPLETIONS, {"prompt": "a"}, headers=headers).status == 200


def test_a_compressed_body_is_refused_by_name(api: Api) -> None:
    answer = api.post(COMPLETIONS, parts=[b"\x1f\x8b"], headers=[("content-encoding", "gzip")])
    assert answer.brief() == INVALID and "'gzip'" in answer.error["message"]


def test_unknown_model(api: Api) -> None:
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        answer = api.post(path, body | {"model": "other"})
        assert answer.brief() == (404, "invalid_request_error", "model_not_found")
        assert answer.error["param"] == "model" and "'other'" in answer.error["message"]
    assert api.post("/detokenize", {"tokens": [1], "model": "other"}).status == 404


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_for_the_context(api: Api, stream: bool) -> None:
    code = (400, "invalid_request_error", "context_length_exceeded")
    prompt = api.complete("a" * 300, stream=stream)
    assert prompt.brief() == code and all(number in prompt.error["message"] for number in ("300", "256"))
    both = api.complete("a" * 200, max_tokens=100, stream=stream)
    assert both.brief() == code and all(number in both.error["message"] for number in ("200", "100", "256"))
    chat = api.post(CHAT, {"messages": [{"role": "user", "content": "a" * 300}], "stream": stream})
    assert chat.brief() == code


def test_a_prompt_of_the_whole_context_is_refused_and_one_token_less_is_not(api: Api) -> None:
    assert api.complete("a" * 256).brief() == (400, "invalid_request_error", "context_length_exceeded")
    # The default of 16 tokens gives way: nobody asked for them.
    answer = api.complete("a" * 255).json()
    assert answer["usage"]["completion_tokens"] == 1 and answer["choices"][0]["finish_reason"] == "length"
    assert api.complete("a" * 255, max_tokens=16).status == 400


def test_the_queue_is_full() -> None:
    with Api(max_queued_requests=1, max_num_seqs=1) as api:
        api.model.gate.clear()

        async def scenario() -> None:
            running = [api.exchange("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}).start() for _ in range(2)]
            while not _is_full(api):
                await asyncio.sleep(0.002)
            for stream in (False, True):
                body = {"prompt": "a", "stream": stream}
                refused = await api.exchange("POST", COMPLETIONS, body).start().finish()
                assert refused.brief() == (429, "rate_limit_error", "queue_full")
                assert int(refused.headers["retry-after"]) > 0
            api.model.gate.set()
            for exchange in running:
                assert (await exchange.finish()).status == 200

        api.run(scenario())


def _is_full(api: Api) -> bool:
    try:
        api.engine.check_admission()
    except QueueFullError:
        return True
    return False


def test_a_body_over_the_limit_is_a_413_and_is_not_kept() -> None:
    with Api(config=ServerConfig(api_key=(), max_body_bytes=1024)) as api:
        too_large = (413, "invalid_request_error", "request_too_large")
        parts = [b"x" * 100] * 100
        exchange = api.exchange("POST", COMPLETIONS, parts=parts)
        answer = api.run(_finish(exchange))
        assert answer.brief() == too_large and answer.headers["connection"] == "close"
        # As much again is read and dropped, so that a client which still sends sees the answer; no more.
        assert 11 < exchange.received <= 23

        declared = api.exchange("POST", COMPLETIONS, parts=parts, headers=[("content-length", "10000")])
        assert api.run(_finish(declared)).brief() == too_large

        waiting = [("content-length", "10000"), ("expect", "100-continue")]
        polite = api.exchange("POST", COMPLETIONS, parts=parts, headers=waiting)
        assert api.run(_finish(polite)).brief() == too_large and polite.received == 0

        fits = b'{"prompt": "a", "user": "' + b"x" * (1024 - 27) + b'"}'
        assert len(fits) == 1024 and api.post(COMPLETIONS, parts=[fits]).status == 200
        assert api.post(COMPLETIONS, parts=[fits, b" "]).brief() == too_large
        assert api.post("/tokenize", parts=[fits, b" "]).brief() == too_large


async def _finish(exchange: Any) -> Any:
    return await exchange.start().finish()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_is_a_500_with_the_request_id(stream: bool) -> None:
    with Api() as api:
        api.engine.parts.engine.runner = _AlwaysRaises()
        answer = api.complete(stream=stream)
        assert answer.brief() == (500, "server_error", "internal_error")
        assert answer.headers["x-request-id"] in answer.error["message"]
        assert "secret" not in answer.error["message"]


class _AlwaysRaises:
    def execute(self, step: Any) -> Any:
        raise ValueError("secret /root/path")

    def sample(self, step: Any, logits: Any, masks: Any = None) -> Any:
        raise AssertionError


def test_an_unexpected_error_is_a_500_that_tells_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("secret at /root/path")

    monkeypatch.setattr(type(api.engine.stats), "snapshot", broken)
    monkeypatch.setattr(api.engine.parts.input_processor, "process_prompt", broken, raising=False)
    with caplog.at_level(logging.ERROR, logger="miniserve.api"):
        for answer in (api.call("GET", "/stats"), api.complete()):
            assert answer.brief() == (500, "server_error", "internal_error")
            request_id = answer.headers["x-request-id"]
            assert request_id in answer.error["message"] and "secret" not in answer.body.decode()
            # The log has what the client does not.
            assert any(request_id in record.getMessage() and record.exc_info for record in caplog.records)


def test_no_engine_is_a_503() -> None:
    unavailable = (503, "server_error", "engine_unavailable")
    with Api(start=False) as api:
        for answer in (api.complete(), api.chat(), api.chat(stream=True), api.post("/tokenize", {"prompt": "a"})):
            assert answer.brief() == unavailable
        assert api.call("GET", "/v1/models").brief() == unavailable
        assert api.call("GET", "/health").status == 503
    with Api() as api:
        api.run(api.engine.drain(0.0))
        assert api.complete().brief() == unavailable
        assert api.chat(stream=True).brief() == unavailable
        api.run(api.engine.stop())
        assert api.complete().brief() == unavailable


def test_unknown_urls_and_wrong_methods_have_the_same_form(api: Api) -> None:
    assert api.call("GET", "/").brief() == (404, "invalid_request_error", "unknown_url")
    assert api.post("/v1/embeddings", {}).brief() == (404, "invalid_request_error", "unknown_url")
    assert api.call("GET", "/v1/completions/").status == 404
    wrong = api.call("GET", COMPLETIONS)
    assert wrong.brief() == (405, "invalid_request_error", "method_not_supported")
    assert wrong.headers["allow"] == "POST"
    assert api.call("DELETE", "/v1/models").status == 405
    assert api.call("QUERY", "/health").status == 405


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "x" * 100_000},
        {"temperature": "\u0000" * 100_000},
        {"prompt": {"a" * 100_000: 1}},
        {"logit_bias": {"b" * 100_000: 1}},
        {"logit_bias": {"1": "c" * 100_000}},
        {"model": "\U0001f600" * 100_000},
        {"stop_token_ids": ["d" * 100_000] * 100},
        {"seed": int("9" * 4000)},
        {"stream_options": {"include_usage": "e" * 100_000}, "stream": True},
    ],
)
def test_error_bodies_are_small_whatever_was_sent(api: Api, fields: dict[str, Any]) -> None:
    """The whole bad input was sent back."""
    answer = api.post(COMPLETIONS, {"prompt": "a"} | fields)
    assert answer.status in (400, 404) and answer.error["message"]


@pytest.mark.parametrize("character", ["a", "\x00", "\U0001f600", "\ud83d", '"', "é"])
@pytest.mark.parametrize("error_type", [InvalidParameterError, InternalError])
def test_an_error_body_is_under_4_kb_however_it_is_escaped(character: str, error_type: type[MiniserveError]) -> None:
    body = bytes(describe_error(error_type(character * 10_000), "r" * 128).response().body)
    assert len(body) < 4096
    assert body.decode()  # valid UTF-8, whatever the message held
    assert MAX_MESSAGE_LENGTH >= 500


def test_the_fault_is_named_with_its_place(api: Api) -> None:
    answer = api.post(CHAT, {"messages": [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}]})
    assert answer.error["param"] == "messages"
    assert "messages[1].role" in answer.error["message"] and "'wizard'" in answer.error["message"]
    missing = api.post(CHAT, {})
    assert missing.error["param"] == "messages" and "required" in missing.error["message"]


def test_a_template_that_refuses_is_a_400() -> None:
    with Api(lambda _: [*tokens("a"), EOS]) as api:
        part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}
        answer = api.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert answer.brief() == INVALID and "image_url" in answer.error["message"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_names_its_field(api: Api, number: str) -> None:
    for field in ("temperature", "metadata"):
        answer = api.post(COMPLETIONS, parts=[f'{{"prompt": "a", "{field}": [{number}]}}'.encode()])
        assert answer.brief() == INVALID and answer.error["param"] == field
        assert "not finite" in answer.error["message"]


def test_half_a_surrogate_pair_is_called_so(api: Api) -> None:
    answer = api.post(COMPLETIONS, parts=[b'{"prompt": "\\ud83d"}'])
    assert answer.brief() == INVALID and "surrogate pair" in answer.error["message"]


def test_the_prompt_at_fault_is_named(api: Api) -> None:
    answer = api.complete(["fine", "fine", "x" * 1000])
    assert answer.error["param"] == "prompt" and answer.error["message"].startswith("prompt[2]: ")


def test_the_limit_that_was_sent_is_named(api: Api) -> None:
    """Bug: the message and `param` named max_tokens, which nobody had sent."""
    for name in ("max_tokens", "max_completion_tokens"):
        answer = api.chat(**{name: 99_999})
        assert answer.error["code"] == "context_length_exceeded" and answer.error["param"] == name
        assert "99999 more are asked for" in answer.error["message"]


@pytest.mark.parametrize("tool_calls", [5, True, {}, {"a": 1}, "x", [1]])
def test_tool_calls_of_a_wrong_shape(api: Api, tool_calls: Any) -> None:
    """Bug: a number was a 500."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": tool_calls}]
    for path in (CHAT, "/tokenize"):
        answer = api.post(path, {"messages": messages})
        assert answer.brief() == INVALID and answer.error["param"] == "messages"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages must have at least 1 entries, got an array"),
        ({"messages": ["hi"]}, "messages[0] must be an object, got 'hi'"),
        ({"messages": 5}, "messages must be an array, got 5"),
        ({"messages": HELLO["messages"], "stream": "yes"}, "stream must be true or false, got 'yes'"),
        ({"messages": HELLO["messages"], "seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"messages": HELLO["messages"], "stop_token_ids": {}}, "stop_token_ids must be an array, got an object"),
        ({"messages": HELLO["messages"], "logit_bias": []}, "logit_bias must be an object, got an array"),
        ({"messages": HELLO["messages"], "seed": {}}, "seed must be an integer, got an object"),
        ({"messages": HELLO["messages"], "tools": {}}, "tools must be an array of functions, got {}"),
        ({"messages": HELLO["messages"], "top_p": 0}, "top_p must be greater than 0, got 0"),
        ({"messages": HELLO["messages"], "n": 0}, "n must be greater than or equal to 1, got 0"),
        ({"messages": HELLO["messages"], "n": 200}, "n must be less than or equal to 128, got 200"),
        ({"messages": HELLO["messages"], "cache_salt": ""}, "cache_salt must have at least 1 characters, got ''"),
        (
            {"messages": [{"role": None}]},
            "messages[0].role must be 'system', 'developer', 'user', 'assistant', 'tool' or 'function', got null",
        ),
    ],
)
def test_complaints_are_in_the_words_of_json(api: Api, body: Any, words: str) -> None:
    assert api.post(CHAT, body).error["message"] == words
