"""Nested fields of OpenAI's API; what the HTTP API makes of wrong ones, its own tests say."""

from __future__ import annotations

import json
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
    assert parse_structured_outputs({"json": text}) == StructuredOutput("json", text)
    assert parse_structured_outputs({"json_object": True}) == ANY_OBJECT
    assert parse_structured_outputs({"regex": "a+", "json_object": False}) == StructuredOutput("regex", "a+")
    assert parse_structured_outputs({"choice": ["a", "é"]}) == StructuredOutput.choice(["a", "é"])
    assert parse_structured_outputs({"grammar": 'start: "a"'}) == StructuredOutput("grammar", 'start: "a"')


@pytest.mark.parametrize("depth", [900, 5000, 40_000])
def test_a_schema_that_is_nested_deeply_is_an_error_or_text(depth: int) -> None:
    """Bug kind: a RecursionError is no answer."""
    text = '{"a":' * depth + "{}" + "}" * depth
    try:
        assert parse_structured_outputs({"json": text}) == StructuredOutput("json", text)
    except InvalidParameterError as error:
        assert error.param == "structured_outputs"
