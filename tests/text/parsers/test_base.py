"""The tools field: what is taken, and what each error names."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.errors import InvalidParameterError
from miniserve.text.parsers.base import MAX_TOOLS, Tool, read_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def entry(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get_weather", **function}}


def test_all_fields_are_read() -> None:
    (tool,) = read_tools([entry(description="Weather.", parameters=SCHEMA, strict=True)])
    assert tool == Tool("get_weather", "Weather.", SCHEMA, strict=True)


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
def test_parameters_may_be_left_out(parameters: Any) -> None:
    (tool,) = read_tools([entry(parameters=parameters, description=None, strict=None)])
    assert tool == Tool("get_weather", None, parameters)
    assert ("parameters" in tool.to_openai()["function"]) is bool(parameters)


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({}, {"type": "object"}),
        ({"required": ["a"]}, {"type": "object", "required": ["a"]}),
    ],
)
def test_arguments_are_an_object(parameters: Any, schema: dict[str, Any]) -> None:
    """Bug: a function without parameters had to be called with any object, and so was called with invented ones."""
    (tool,) = read_tools([entry(parameters=parameters)])
    assert tool.schema == schema


def test_templates_get_what_was_sent() -> None:
    sent = entry(description="Weather.", parameters=SCHEMA)
    assert Tool.from_openai(sent, "tools[0]").to_openai() == sent
    assert Tool.from_openai(entry(strict=True), "tools[0]").to_openai() == entry()


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("get_weather", "tools[1] must be an object"),
        ({"type": "retrieval"}, "tools[1].type must be 'function', got \"retrieval\""),
        ({"type": "function"}, "tools[1].function must be an object"),
        (entry(name=""), "tools[1].function.name must be 1 to 64"),
        (entry(name="a b"), 'got "a b"'),
        (entry(name="a" * 65), "tools[1].function.name"),
        (entry(name="f\n"), "tools[1].function.name"),
        (entry(name=None), "got null"),
        (entry(description=1), "tools[1].function.description must be a string"),
        (entry(strict="yes"), "tools[1].function.strict must be true or false"),
        (entry(name="first"), "tools[1].function.name is 'first' again"),
    ],
)
def test_a_malformed_tool_is_named(tool: Any, words: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        read_tools([entry(name="first"), tool])
    assert words in str(caught.value)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ([], "must be a JSON schema, got []"),
        ({"type": "array"}, 'must have the type "object", for arguments are always one; got "array"'),
        ({"type": ["object", "null"]}, 'got ["object", "null"]'),
        ({"type": []}, "type must be one of string, number"),
        ({"properties": []}, "properties must be an object of schemas, got []"),
        ({"properties": {"a": 5}}, "properties.a must be an object or a boolean, got 5"),
        ({"required": "a"}, 'required must be an array of strings, got "a"'),
    ],
)
def test_a_malformed_schema_is_named_with_its_tool(parameters: Any, words: str) -> None:
    """Bug: with tool_choice auto these were accepted, and failed only when a call was demanded."""
    with pytest.raises(InvalidParameterError) as caught:
        read_tools([entry(), {"type": "function", "function": {"name": "wrong", "parameters": parameters}}])
    assert str(caught.value).startswith("tools[1].function.parameters of 'wrong' ") and words in str(caught.value)
    assert caught.value.param == "tools[1].function.parameters"


def test_too_many_tools_are_refused() -> None:
    tools = [entry(name=f"f{index}") for index in range(MAX_TOOLS + 1)]
    assert len(read_tools(tools[:-1])) == MAX_TOOLS
    with pytest.raises(InvalidParameterError, match=f"has {MAX_TOOLS + 1} functions"):
        read_tools(tools)


@pytest.mark.parametrize(("depth", "refused"), [(90, False), (100, True), (100_000, True)])
def test_a_schema_of_no_end_is_refused(depth: int, refused: bool) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    if refused:
        with pytest.raises(
            InvalidParameterError, match=r"function.parameters of 'get_weather' nests more than 100 deep"
        ):
            read_tools([entry(parameters=schema)])
    else:
        assert read_tools([entry(parameters=schema)])[0].parameters == schema


def test_a_huge_wrong_value_is_cut() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        read_tools([entry(name="x" * 10_000)])
    assert len(str(caught.value)) < 300
