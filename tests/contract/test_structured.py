"""Structured output: through the official client's helpers, in every kind, from a real model, and if it is hostile."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

from tests.contract.calls import CHAT, COMPLETIONS, Server, check_error, fold, plain, streamed


class Event(BaseModel):
    """What an answer shall be."""

    name: str
    kind: Literal["party", "meeting"]
    people: list[str]


SAID = {"name": "Fair", "kind": "party", "people": ["Ann", "Bob é"]}
TEXT = json.dumps(SAID, ensure_ascii=False)
LIMIT_SECONDS = 10.0  # a compilation has 5


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_parse(scripted: Server) -> None:
    parsed = scripted.openai.chat.completions.parse(
        model="scripted", messages=user(f"<<say {TEXT}>>"), response_format=Event
    )
    assert parsed.choices[0].message.parsed == Event.model_validate(SAID)
    assert parsed.choices[0].finish_reason == "stop"


def test_the_stream_helper(scripted: Server) -> None:
    with scripted.openai.chat.completions.stream(
        model="scripted", messages=user(f"<<say {TEXT}>>"), response_format=Event
    ) as stream:
        events = list(stream)
    [done] = [event for event in events if event.type == "content.done"]
    assert done.parsed == Event.model_validate(SAID)
    assert sum(event.type == "content.delta" for event in events) > 1


def test_a_model_that_would_say_something_else(scripted: Server) -> None:
    answer = scripted.openai.chat.completions.parse(
        model="scripted", messages=user("<<say never>>"), response_format=Event, max_tokens=300, n=2
    )
    assert all(choice.message.parsed is not None for choice in answer.choices)


KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', r"\{.*\}"),
    "json": ({"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}}, "[1, 22]", r"\[.*\]"),
    "json text": ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true", "true|false"),
    "json_object of the extension": ({"structured_outputs": {"json_object": True}}, "{}", r"\{.*\}"),
    "regex": ({"structured_outputs": {"regex": r"[a-c]{2,4}-\d"}}, "abc-7", r"[a-c]{2,4}-\d"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no", 'a "b" é']}}, 'a "b" é', 'yes|no|a "b" é'),
    "grammar": ({"structured_outputs": {"grammar": 'start: "x" "y"* "z"'}}, "xyyz", "xy*z"),
}


@pytest.mark.parametrize(("fields", "said", "pattern"), list(KINDS.values()), ids=list(KINDS))
def test_each_kind(scripted: Server, fields: dict[str, Any], said: str, pattern: str) -> None:
    """What fits is said as it is, in a stream and in both endpoints; what does not fit is not said."""
    for path, needed in ((CHAT, {"messages": user(f"<<say {said}>>")}), (COMPLETIONS, {"prompt": f"<<say {said}>>"})):
        asked = {**needed, **fields, "n": 2, "max_tokens": 200}
        whole, joined = plain(scripted.post(path, **asked)), fold(scripted.post(path, **streamed(asked)))
        assert joined.content() == whole.content()
        assert whole.texts == [said, said] and whole.finish_reasons == ["stop", "stop"]
    other = scripted.chat("<<say !never!>>", max_tokens=50, **fields)
    assert other.finish_reason == "length" or re.fullmatch(pattern, other.text)
    assert "never" not in other.text


def test_cut_off_is_length(scripted: Server) -> None:
    answer = scripted.chat(f"<<say {TEXT}>>", response_format={"type": "json_object"}, max_tokens=9)
    assert answer.finish_reason == "length" and TEXT.startswith(answer.text)


def test_a_real_model(real: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "european": {"type": "boolean"}},
        "required": ["capital", "european"],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "country", "schema": schema}},
        "temperature": 0,
        "max_tokens": 60,
    }
    whole = real.chat("What is the capital of France? Answer in JSON.", **fields)
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.text), schema)
    joined = real.chat_stream("What is the capital of France? Answer in JSON.", **fields)
    assert joined.content() == whole.content()
    choice = real.complete("The sky is", structured_outputs={"choice": [" blue", " green"]}, temperature=0)
    assert choice.text in (" blue", " green") and choice.finish_reason == "stop"


LARGE = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 10**40}}, "required": ["a"]}


def test_a_bound_that_would_be_cut_is_refused_wherever_it_stands(scripted: Server) -> None:
    """Bug: an answer was valid but for its bounds, which had been cut to 64 bits."""
    function = {"name": "f", "parameters": LARGE}
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": LARGE}}
    parameters = "tools[0].function.parameters"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"json": LARGE}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": f"start: %json {json.dumps(LARGE)}"}}, "structured_outputs"),
        ({"response_format": json_schema}, "response_format"),
        ({"tools": [{"type": "function", "function": function}], "tool_choice": "required"}, parameters),
        ({"tools": [{"type": "function", "function": function | {"strict": True}}]}, parameters),
    ]
    for fields, param in cases:
        message = check_error(scripted.post(CHAT, messages=user("Hi"), **fields), 400, "invalid_value", param)
        assert f"minimum has {10**40}, and numbers are kept exactly from" in message
    free = scripted.post(CHAT, messages=user("<<say ok>>"), tools=[{"type": "function", "function": function}])
    assert free.status_code == 200


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a $ref to elsewhere": (
        {"structured_outputs": {"json": {"$ref": "https://a.example/b.json"}}},
        "structured_outputs",
    ),
    "a type that is none": ({"structured_outputs": {"json": {"type": "banana"}}}, "structured_outputs"),
    "an open regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    "a grammar without rules": ({"structured_outputs": {"grammar": "this is no grammar ("}}, "structured_outputs"),
    "a schema of OpenAI's field": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}},
        "response_format",
    ),
    "deep nesting": (
        {"structured_outputs": {"json": '{"items":' * 3000 + "{}" + "}" * 3000}},
        "structured_outputs",
    ),
}


@pytest.mark.parametrize(("fields", "param"), list(HOSTILE.values()), ids=list(HOSTILE))
def test_what_cannot_be_compiled_is_refused_soon(scripted: Server, fields: dict[str, Any], param: str) -> None:
    """And others are served meanwhile; the message names the field that was sent."""
    answers: list[str] = []
    stop = threading.Event()

    def others() -> None:
        while not stop.is_set():
            answers.append(scripted.chat("<<say ok>>").text)

    neighbour = threading.Thread(target=others)
    neighbour.start()
    try:
        start = time.monotonic()
        for path, needed in ((CHAT, {"messages": user("Hi")}), (COMPLETIONS, {"prompt": "Hi"})):
            message = check_error(scripted.post(path, **needed, **fields), 400, "invalid_value", param)
            assert param in message
        assert time.monotonic() - start < 2 * LIMIT_SECONDS
    finally:
        stop.set()
        neighbour.join()
    assert answers and set(answers) == {"ok"}


def test_both_fields_at_once(scripted: Server) -> None:
    fields = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    check_error(scripted.post(CHAT, messages=user("Hi"), **fields), 400, "invalid_value", "structured_outputs")
