"""Every row of the error table and every bound: refused in OpenAI's form, by a server that lives on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contract.calls import CHAT, COMPLETIONS, Server, check_error

MESSAGES = [{"role": "user", "content": "Hi"}]
REQUIRED: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "Hi"}}
BOTH = (CHAT, COMPLETIONS)

# Bodies that are no JSON object

BROKEN_BODIES = {
    "empty": b"",
    "not JSON": b"{",
    "a comma too many": b'{"prompt": "Hi", "messages": [],}',
    "two objects": b"{}{}",
    "an array": b"[]",
    "a string": b'"prompt"',
    "null": b"null",
    "invalid UTF-8": b'{"prompt": "\xff\xfe", "messages": [{"role": "user", "content": "\xff"}]}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf", "messages": [{"role": "user", "content": "\xc0\xaf"}]}',
    "UTF-16": '{"prompt": "Hi"}'.encode("utf-16"),
    "NUL": b'{"prompt": "Hi"}\x00',
    "nested arrays": b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "nested objects": b'{"messages": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
    "nested and never closed": b"[" * 100_000,
}


@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("kind", BROKEN_BODIES)
def test_broken_bodies(scripted: Server, path: str, kind: str) -> None:
    check_error(scripted.post_raw(path, BROKEN_BODIES[kind]), 400, "invalid_value")


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_wrong_content_type(scripted: Server, path: str, content_type: str) -> None:
    body = json.dumps({"prompt": "Hi", "messages": MESSAGES})
    check_error(scripted.post_raw(path, body, content_type), 400, "invalid_value")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_another_spelling(scripted: Server, content_type: str) -> None:
    assert scripted.post_raw(COMPLETIONS, '{"prompt": "Hi"}', content_type).status_code == 200


# Numbers and texts that JSON can spell and nobody can use

NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "-1" + "0" * 400)
NUMERIC_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("n", "seed", "max_tokens", "min_tokens", "logit_bias", "stop_token_ids"),
)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("field", NUMERIC_FIELDS)
def test_numbers_beyond_measure(scripted: Server, path: str, field: str) -> None:
    # An integer without an upper bound is as good as the largest one that makes a difference.
    for number in NUMBERS if field != "top_k" else (*NUMBERS[:5], NUMBERS[6]):
        value = {"logit_bias": f'{{"1": {number}}}', "stop_token_ids": f"[{number}]"}.get(field, number)
        body = json.dumps(REQUIRED[path])[:-1] + f', "{field}": {value}}}'
        check_error(scripted.post_raw(path, body), 400, "invalid_value")


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_beyond_measure_in_an_ignored_field(scripted: Server, path: str, number: str) -> None:
    body = json.dumps(REQUIRED[path])[:-1] + f', "metadata": {{"deep": [{number}]}}}}'
    check_error(scripted.post_raw(path, body), 400, "invalid_value")


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("field", ["metadata", "unknown_extra", "user"])
def test_deep_nesting_in_an_ignored_field(scripted: Server, path: str, field: str) -> None:
    """Bug kind: nesting in a field that nobody reads ended the process."""
    deep = "[" * 20_000 + "]" * 20_000
    body = json.dumps(REQUIRED[path])[:-1] + f', "{field}": {deep}}}'
    check_error(scripted.post_raw(path, body), 400, "invalid_value")


@pytest.mark.parametrize("path", BOTH)
def test_nesting_is_bounded_and_said(scripted: Server, path: str) -> None:
    """Bug: such a body was said to be no valid JSON."""
    for depth, expected in ((198, 200), (300, 400)):
        deep = "[" * depth + "]" * depth
        body = json.dumps(REQUIRED[path])[:-1] + f', "metadata": {{"deep": {deep}}}}}'
        response = scripted.post_raw(path, body)
        assert response.status_code == expected
    message = check_error(response, 400, "invalid_value")
    assert "nests too deep" in message and "make it flatter" in message and "not valid JSON" not in message


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("text", [r"emoji \ud83d", r"\udcf0", r"\ude00\ud83d"])
def test_lone_surrogates(scripted: Server, stream: str, text: str) -> None:
    """Bug kind: half of a surrogate pair was a 500, or a 200 with a TypeError in the stream."""
    bodies = {
        CHAT: (
            rf'{{"messages": [{{"role": "user", "content": "{text}"}}], "stream": {stream}}}',
            rf'{{"messages": [{{"role": "user", "content": [{{"type": "text", "text": "{text}"}}]}}], '
            rf'"stream": {stream}}}',
            rf'{{"messages": [{{"role": "user", "content": "Hi"}}], "stop": "{text}", "stream": {stream}}}',
        ),
        COMPLETIONS: (
            rf'{{"prompt": "{text}", "stream": {stream}}}',
            rf'{{"prompt": ["Hi", "{text}"], "stream": {stream}}}',
            rf'{{"prompt": "Hi", "stop": ["{text}"], "stream": {stream}}}',
        ),
    }
    for path, own in bodies.items():
        for body in own:
            check_error(scripted.post_raw(path, body), 400, "invalid_value")
    check_error(scripted.post_raw("/tokenize", f'{{"prompt": "{text}"}}'), 400, "invalid_value")


def test_a_whole_surrogate_pair_is_a_character(scripted: Server) -> None:
    response = scripted.post_raw(COMPLETIONS, r'{"prompt": "\ud83d\ude00", "max_tokens": 9}')
    assert response.json()["choices"][0]["text"] == "\N{GRINNING FACE}"


# Bounds

INTEGER_KINDS: tuple[Any, ...] = (1.5, "1", True, [1], {})
NUMBER_KINDS: tuple[Any, ...] = ("1", True, [1], {})
BOUNDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # field: (allowed, refused)
    "n": ((1, 2, 128, None), (0, -1, 129, 10**9, 2**63, *INTEGER_KINDS)),
    "temperature": ((0, 0.0, 1e-300, 1, 2, 2.0, None), (-0.1, 2.01, 1e300, *NUMBER_KINDS)),
    "top_p": ((1, 1.0, 1e-300, 0.5, None), (0, -0.1, 1.01, *NUMBER_KINDS)),
    "top_k": ((-1, 0, 1, 100_000, None), (-2, *INTEGER_KINDS)),
    "min_p": ((0, 0.5, 1, None), (-0.1, 1.1, *NUMBER_KINDS)),
    "presence_penalty": ((-2, 0, 2, None), (-2.1, 2.1, *NUMBER_KINDS)),
    "frequency_penalty": ((-2, 0, 2, None), (-2.1, 2.1, *NUMBER_KINDS)),
    "repetition_penalty": ((0.01, 1, 2, None), (0, -1, *NUMBER_KINDS)),
    "min_tokens": ((0, 1, None), (-1, *INTEGER_KINDS)),
    "seed": ((0, -1, 2**63 - 1, -(2**63), None), INTEGER_KINDS),
    "stop": (
        ("a", "x" * 512, [], ["x" * 512] * 16, None),
        ("", [""], ["a", ""], "x" * 513, ["x"] * 17, 5, [5], [None], {}),
    ),
    "stop_token_ids": (([], [0], [0, 262], None), ([263], [-1], [2**40], ["1"], [True], [1.0], 5)),
    "logit_bias": (
        ({}, {"0": 100, "262": -100}, {"5": 0.5}, None),
        (*({key: 1} for key in ("263", "-1", "x", "", "1.5", "9" * 30)), {"1": 100.1}, {"1": -101}, {"1": "1"}, [1], 5),
    ),
    "stream": ((True, False, None), (1, "true", [])),
    "ignore_eos": ((True, False, None), (1, "true")),
    "include_stop_str_in_output": ((True, False, None), (1, "true")),
    "skip_special_tokens": ((True, False, None), (1, "true")),
    "add_special_tokens": ((True, False, None), (1, "true")),
    "model": (("scripted", None), (5, [], {})),
}
CHAT_BOUNDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "max_tokens": ((1, 2, None), (0, -1, *INTEGER_KINDS)),
    "max_completion_tokens": ((1, 2, None), (0, -1, *INTEGER_KINDS)),
    "logprobs": ((True, False, None), (1, 5, "true")),
    "messages": (
        (
            [{"role": "user", "content": ""}],
            [{"role": "assistant", "content": None}, *MESSAGES],
            [{"role": "assistant"}, *MESSAGES],
            [{"role": "user", "content": "Hi", "name": "bob"}],
        ),
        (
            *(None, [], "Hi", {}, [None], ["Hi"], [[]], [{}], [{"content": "Hi"}], [{"role": "user", "content": 5}]),
            *([{"role": role, "content": "Hi"}] for role in (None, "", "robot", 5, ["user"])),
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]}],
            *([{"role": "user", "content": [part]}] for part in ({}, {"type": "text"}, {"type": "text", "text": 5}, 5)),
        ),
    ),
}
COMPLETIONS_BOUNDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "max_tokens": ((0, 1, 2, None), (-1, *INTEGER_KINDS)),
    "logprobs": ((0, 1, 20, None), (21, -1, 1.5, "1", True)),
    "echo": ((True, False, None), (1, "true")),
    "best_of": ((1, None), (0, -1, "1", True)),
    "prompt": (
        ("Hi", ["Hi"], ["Hi"] * 1024, [1, 2], [[1, 2], [3]]),
        (
            *(None, "", [""], ["Hi", ""], [], [[]], [[1], []], 5, {}, True, [None], [1.5], [True], [[True]], ["Hi", 5]),
            *([["Hi"]], [5, "Hi"], [[[5]]], ["Hi"] * 1025, [263], [-1], [[1], [263]], [2**70]),
        ),
    ),
}
CASES = [
    *((path, field, bounds) for path in BOTH for field, bounds in BOUNDS.items()),
    *((CHAT, field, bounds) for field, bounds in CHAT_BOUNDS.items()),
    *((COMPLETIONS, field, bounds) for field, bounds in COMPLETIONS_BOUNDS.items()),
]


@pytest.mark.parametrize(("path", "field", "bounds"), CASES, ids=[f"{path[4:]}-{field}" for path, field, _ in CASES])
def test_bounds(scripted: Server, path: str, field: str, bounds: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    allowed, refused = bounds
    body = {**REQUIRED[path], "max_tokens": 2}
    for value in allowed:
        response = scripted.post(path, **{**body, field: value})
        assert response.status_code == 200, (value, response.text)
    for value in refused:
        message = check_error(scripted.post(path, **{**body, field: value}), 400, "invalid_value", field)
        assert field in message or field == "prompt", message


@pytest.mark.parametrize("field", ["seed", "max_tokens", "top_k", "min_tokens"])
@pytest.mark.parametrize("value", [2**31, 2**63, -(2**63) - 1, 2**64, 10**30])
def test_large_integers_are_clamped_or_refused(scripted: Server, field: str, value: int) -> None:
    for path in BOTH:
        response = scripted.post(path, **{**REQUIRED[path], "max_tokens": 2, field: value})
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            check_error(response, 400, response.json()["error"]["code"], field)


def test_top_logprobs(scripted: Server) -> None:
    for number in (None, 0, 1, 20):
        answer = scripted.chat("Hi", max_tokens=1, logprobs=True, top_logprobs=number)
        assert answer.logprobs[0] is not None and len(answer.logprobs[0][0]["top_logprobs"]) == (number or 0)
    wrong: tuple[Any, ...] = (21, -1, 1.5, "1", True)
    for value in wrong:
        response = scripted.post(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=value)
        check_error(response, 400, "invalid_value", "top_logprobs")
    for logprobs in ({}, {"logprobs": False}):
        response = scripted.post(CHAT, messages=MESSAGES, top_logprobs=2, **logprobs)
        check_error(response, 400, "invalid_value", "top_logprobs")


def test_choices_of_one_call_are_bounded(scripted: Server) -> None:
    assert len(scripted.complete(["Hi"] * 8, n=128, max_tokens=1).texts) == 1024
    check_error(scripted.post(COMPLETIONS, prompt=["Hi"] * 9, n=128, max_tokens=1), 400, "invalid_value", "n")


def test_logit_bias_of_many_keys(real: Server) -> None:
    fields = {"prompt": "Hi", "max_tokens": 1}
    many = {str(key): 0 for key in range(1024)}
    assert real.post(COMPLETIONS, **fields, logit_bias=many).status_code == 200
    check_error(real.post(COMPLETIONS, **fields, logit_bias={**many, "1024": 0}), 400, "invalid_value", "logit_bias")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"191222": -100}),
        ("stop_token_ids", [1, 191222]),
        ("prompt", [1, 191222]),
        ("prompt", [[1], [191222]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_token_id_outside_the_vocabulary_is_named(server: Server, field: str, value: Any, stream: bool) -> None:
    """Bug kind: an index outside the logits killed the engine."""
    response = server.post(COMPLETIONS, **{"prompt": "Hi", "stream": stream, field: value})
    assert "191222" in check_error(response, 400, "invalid_value", field)
    if field != "prompt":
        response = server.post(CHAT, messages=MESSAGES, stream=stream, **{field: value})
        assert "191222" in check_error(response, 400, "invalid_value", field)


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_without_a_stream(scripted: Server, options: dict[str, Any], stream: dict[str, Any]) -> None:
    for path in BOTH:
        response = scripted.post(path, **REQUIRED[path], **stream, stream_options=options)
        check_error(response, 400, "invalid_value", "stream_options")


@pytest.mark.parametrize("options", [5, "usage", [], {"include_usage": 1}, {"include_usage": "true"}])
def test_wrong_stream_options(scripted: Server, options: Any) -> None:
    for path in BOTH:
        response = scripted.post(path, **REQUIRED[path], stream=True, stream_options=options)
        check_error(response, 400, "invalid_value", "stream_options")


# The other rows of the table


@pytest.mark.parametrize("model", ["gpt-4o", "", "SCRIPTED", "scripted ", "../scripted", "m" * 100_000])
def test_unknown_model(scripted: Server, model: str) -> None:
    for path in BOTH:
        check_error(scripted.post(path, **REQUIRED[path], model=model), 404, "model_not_found", "model")
    check_error(scripted.post("/tokenize", prompt="Hi", model=model), 404, "model_not_found", "model")
    check_error(scripted.post("/detokenize", tokens=[1], model=model), 404, "model_not_found", "model")


def test_a_required_field_is_missing(scripted: Server) -> None:
    check_error(scripted.post(CHAT, model="scripted"), 400, "invalid_value", "messages")
    check_error(scripted.post(COMPLETIONS, model="scripted"), 400, "invalid_value", "prompt")
    check_error(scripted.post("/detokenize"), 400, "invalid_value", "tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_the_context_is_full(scripted: Server, stream: bool) -> None:
    """One token less than the context is accepted, the context is not; a limit that was named must fit too."""
    context = 4096
    answer = scripted.complete([65] * (context - 1), max_tokens=1)
    assert (answer.num_tokens, answer.finish_reason) == (1, "length")
    answer = scripted.complete([65] * (context - 1))  # the default of 16 gives way
    assert (answer.num_tokens, answer.finish_reason) == (1, "length")
    for prompt, limit in (([65] * context, 1), ([65] * (context + 1), None), ([65] * 4000, 97), ("x" * 100_000, 1)):
        response = scripted.post(COMPLETIONS, prompt=prompt, max_tokens=limit, stream=stream)
        message = check_error(response, 400, "context_length_exceeded")
        assert str(context) in message and str(len(prompt)) in message
        assert limit in (None, 1) or str(limit) in message
    response = scripted.post(CHAT, messages=[{"role": "user", "content": "x" * 5000}], stream=stream)
    assert str(context) in check_error(response, 400, "context_length_exceeded", "messages")
    response = scripted.post(CHAT, messages=MESSAGES, max_completion_tokens=context, stream=stream)
    assert str(context) in check_error(response, 400, "context_length_exceeded")


def test_the_context_of_the_real_model(real: Server) -> None:
    """A long prompt through the model itself, up to the last position that it has."""
    ids = (real.tokens("one two three four five six seven ") * 200)[:1023]
    answer = real.complete(ids, max_tokens=1, temperature=0)
    assert (answer.num_tokens, answer.finish_reason) == (1, "length")
    check_error(real.post(COMPLETIONS, prompt=[*ids, 5], max_tokens=1), 400, "context_length_exceeded")


def test_chat_without_a_limit_takes_the_rest_of_the_context(scripted: Server) -> None:
    answer = scripted.chat("<<endless>>")
    assert answer.usage["total_tokens"] == 4096 and answer.finish_reason == "length"


def test_completions_without_a_limit_take_16_tokens(scripted: Server) -> None:
    answer = scripted.complete("<<endless>>")
    assert (answer.num_tokens, answer.finish_reason) == (16, "length")


def test_max_completion_tokens_wins(scripted: Server) -> None:
    assert scripted.chat("<<endless>>", max_tokens=9, max_completion_tokens=3).num_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_before_the_first_token_is_an_http_error(scripted: Server, stream: bool) -> None:
    for directive in ("<<raise 0>>", "<<error 0>>"):
        for path, fields in (
            (CHAT, {"messages": [{"role": "user", "content": directive}]}),
            (COMPLETIONS, {"prompt": directive}),
        ):
            headers = {"X-Request-Id": "my-own-id"}
            response = scripted.http.post(path, json={**fields, "stream": stream}, headers=headers)
            message = check_error(response, 500, "internal_error")
            assert "my-own-id" in message and "secret" not in message


def test_a_fault_fails_only_its_own_request(scripted: Server, tmp_path: Path) -> None:
    """The others of the same step go on."""
    go = tmp_path / "go"
    with ThreadPoolExecutor(8) as pool:
        # One request holds the engine in a step, so that the others come into the next one together.
        first = pool.submit(scripted.complete, f"<<until {go}>><<say first>>", max_tokens=9)
        scripted.wait_for(lambda numbers: numbers["running"] == 1)
        good = [pool.submit(scripted.complete, f"<<say number {n}>>", max_tokens=20) for n in range(4)]
        bad = [pool.submit(scripted.post, COMPLETIONS, prompt=f"<<{kind} 0>>") for kind in ("raise", "error")]
        go.touch()
        assert first.result().text == "first"
        assert [call.result().text for call in good] == [f"number {n}" for n in range(4)]
        for call in bad:
            check_error(call.result(), 500, "internal_error")
    scripted.wait_until_idle()


# What must never be in an error

HUGE = "x" * 1_000_000


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": HUGE},
        {"stop": [HUGE]},
        {"stop": [["a"] * 10_000]},
        {"logit_bias": {HUGE: 1}},
        {"logit_bias": {str(n): "x" for n in range(1000)}},
        {"stop_token_ids": ["x"] * 100_000},
        {"stop_token_ids": list(range(100_000))},
        {"messages": [{"role": HUGE, "content": "Hi"}], "prompt": {"text": HUGE}},
        {"messages": [{HUGE: HUGE}] * 3, "prompt": [HUGE, 5]},
        {"response_format": {"type": HUGE}},
        {"tools": [{"type": HUGE}], "suffix": HUGE},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_error_bodies_are_bounded(scripted: Server, fields: dict[str, Any]) -> None:
    for path in BOTH:
        if path == COMPLETIONS and "tools" in fields:
            fields = {"suffix": HUGE}
        response = scripted.post(path, **{**REQUIRED[path], **fields})
        assert HUGE[:2000] not in response.text
        check_error(response, 400, response.json()["error"]["code"])


def test_the_templates_own_words(scripted: Server) -> None:
    """Bug kind: a template that refuses a conversation was a 500."""
    messages = [*MESSAGES, {"role": "system", "content": "Too late"}]
    message = check_error(scripted.post(CHAT, messages=messages), 400, "invalid_value", "messages")
    assert "a system message must come first" in message


def test_an_empty_prompt_harms_nobody(server: Server) -> None:
    """Bug kind: an empty prompt killed the engine, or nobody was answered after it."""
    before = server.complete("Once upon", max_tokens=1, temperature=0)
    empty: tuple[Any, ...] = ("", [""], [[]])
    for prompt in empty:
        check_error(server.post(COMPLETIONS, prompt=prompt), 400, "invalid_value", "prompt")
    assert server.complete("Once upon", max_tokens=1, temperature=0).text == before.text
