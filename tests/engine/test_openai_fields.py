"""Nested fields of OpenAI's API; what the HTTP API makes of wrong ones, its own tests say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from miniserve.engine.openai_fields import (
    parse_response_format,
    parse_structured_outputs,
    parse_tool_choice,
    parse_tools,
)
from miniserve.errors import InvalidParameterError, UnsupportedParameterError
from miniserve.sampling_params import StructuredOutput

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}
ANY_OBJECT = StructuredOutput.json({"type": "object"})


def test_tool_choice() -> None:
    assert parse_tool_choice(None) == ("auto", None)
    for word in ("none", "auto", "required"):
        assert parse_tool_choice(word) == (word, None)
    assert parse_tool_choice({"type": "function", "function": {"name": "f"}}) == ("required", "f")
    with pytest.raises(UnsupportedParameterError, match="allowed_tools"):
        parse_tool_choice({"type": "allowed_tools"})


@pytest.mark.parametrize("value", ["any", 1, [], {"type": "function"}, {"type": "function", "function": {"name": ""}}])
def test_a_wrong_tool_choice(value: Any) -> None:
    with pytest.raises(InvalidParameterError) as error:
        parse_tool_choice(value)
    assert error.value.param == "tool_choice"


def test_tools() -> None:
    assert parse_tools(None) == parse_tools([]) == ()
    [tool] = parse_tools([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])
    assert (tool.name, tool.parameters) == ("f", SCHEMA)
    for value in ("f", 1, {"type": "function"}):
        with pytest.raises(InvalidParameterError, match="tools"):
            parse_tools(value)


def test_response_format() -> None:
    assert parse_response_format(None) is parse_response_format({"type": "text"}) is None
    assert parse_response_format({"type": "json_object"}) == ANY_OBJECT
    asked = StructuredOutput.json(SCHEMA)
    assert parse_response_format({"type": "json_object", "schema": SCHEMA}) == asked
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}}
    assert parse_response_format(wrapped) == asked


def test_structured_outputs() -> None:
    assert parse_structured_outputs(None) is None
    text = json.dumps(SCHEMA)
    assert parse_structured_outputs({"json": SCHEMA, "regex": None}) == StructuredOutput.json(SCHEMA)
    assert parse_structured_outputs({"json": text}) == StructuredOutput.json(SCHEMA)
    assert parse_structured_outputs({"json_object": True}) == ANY_OBJECT
    assert parse_structured_outputs({"regex": "a+", "json_object": False}) == StructuredOutput("regex", "a+")
    assert parse_structured_outputs({"choice": ["a", "é"]}) == StructuredOutput.choice(["a", "é"])
    assert parse_structured_outputs({"grammar": 'start: "a"'}) == StructuredOutput("grammar", 'start: "a"')


@pytest.mark.parametrize("depth", [101, 900, 5000, 40_000])
def test_a_schema_that_is_nested_deeply_is_an_error(depth: int) -> None:
    """Bug kind: a RecursionError is no answer."""
    text = '{"not":' * depth + "{}" + "}" * depth
    with pytest.raises(InvalidParameterError) as error:
        parse_structured_outputs({"json": text})
    assert error.value.param == "structured_outputs"


def test_messages_name_the_field_that_was_sent() -> None:
    """Bug: a fault of a schema was one of response_format.json, a field that nobody has."""
    for value, name in (
        ({"type": "json_object"}, "response_format"),
        ({"type": "json_object", "schema": SCHEMA}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "response_format.json_schema.schema"),
    ):
        asked = parse_response_format(value)
        assert asked is not None and (asked.name, asked.param) == (name, "response_format")
    asked = parse_structured_outputs({"json": SCHEMA})
    assert asked is not None and (asked.name, asked.param) == ("structured_outputs.json", "structured_outputs")


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_tool_choice, {}, "must be none, auto, required, or {.*}, got an object without a type"),
        (parse_tool_choice, {"type": "function", "name": "f"}, "as tool_choice.function.name, got nothing"),
        (parse_structured_outputs, {"choice": ["a", 5]}, r"choice\[1\] must be a non-empty string, got 5"),
        (parse_structured_outputs, {"choice": ["a", ""]}, r'choice\[1\] must be a non-empty string, got ""'),
        (parse_structured_outputs, {"choice": [None]}, r"choice\[0\] must be a non-empty string, got null"),
        (
            parse_structured_outputs,
            {"json": {"type": []}},
            r"structured_outputs\.json is not.*: type must be one",
        ),
        (parse_structured_outputs, {"json": '{"const": ' + "9" * 5000 + "}"}, "an integer of thousands of digits"),
        (parse_structured_outputs, {"json": '{"minimum": NaN}'}, "structured_outputs.json is not.*: NaN is no number"),
        (parse_structured_outputs, {"json": '{"minimum": -1e400}'}, "-1e400 is too large for a number"),
        (parse_structured_outputs, {"json": '{"const": "\\ud800"}'}, "outputs.json.const has half a surrogate pair"),
        (parse_structured_outputs, {"choice": ["\ud800"]}, r"outputs.choice\[0\] has half a surrogate pair"),
        (parse_structured_outputs, {"json": {"multipleOf": 0}}, "multipleOf must be a number greater than 0, got 0"),
        (parse_response_format, {"type": "json_schema"}, "must have an object as json_schema, got nothing"),
        (
            parse_response_format,
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": 5}}},
            r"response_format\.json_schema\.schema is not a valid JSON schema: items must be an object",
        ),
        (
            parse_response_format,
            {"type": "json_object", "schema": {"required": "a"}},
            r"format\.schema is not",
        ),
    ],
)
def test_what_is_wrong_is_said(parse: Callable[[Any], Any], value: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        parse(value)


@pytest.mark.parametrize("name", [None, "", "a b", "x" * 65, "é", "a\n", 5])
def test_a_schema_has_a_name(name: Any) -> None:
    """Bug: a name that is missing or malformed was let through, which OpenAI refuses."""
    with pytest.raises(InvalidParameterError, match=r"as json_schema\.name, got"):
        parse_response_format({"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMA}})


@pytest.mark.parametrize(
    "value",
    [
        {"type": "text", "json_schema": {"name": "x", "schema": SCHEMA}},
        {"type": "text", "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"name": "x", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}, "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": "yes"}},
    ],
    ids=str,
)
def test_a_schema_where_none_is_read_is_refused(value: Any) -> None:
    """Bug: who sent the schema beside the wrong type got an answer that does not keep to it."""
    with pytest.raises(InvalidParameterError, match=r"response_format .*(schema|strict)"):
        parse_response_format(value)
