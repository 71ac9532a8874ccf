"""Text between tags as JSON: the type that a schema gives a parameter decides."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.text.parsers.base import Tool
from miniserve.text.parsers.xml_values import as_json, parameters, types_of

CIRCLE = {"anyOf": [{"$ref": "#/$defs/A"}] * 50}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"enum": ["a", True, None, [], {}]}, {"string", "boolean", "null", "array", "object"}),
        ({"oneOf": [{"type": "string"}, {"anyOf": [{"type": "null"}]}]}, {"string", "null"}),
        ({"$ref": "#/$defs/B"}, {"string"}),
        ({"allOf": [{"$ref": "#/$defs/B"}], "title": "B"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        # What is no schema, refers to nothing, or to itself, has any type; circles end.
        ({"type": 5}, None),
        ({"type": ["string", 5, {}]}, {"string"}),
        ({"$ref": "#/nowhere"}, None),
        ({"$ref": "https://example.com/schema"}, None),
        ({"$ref": "#/$defs/A"}, set()),
        ({"$ref": "#/$defs/C"}, None),
        (True, None),
        (None, None),
    ],
)
def test_types(schema: Any, types: set[str] | None) -> None:
    definitions = {"A": CIRCLE, "B": {"type": "string"}, "C": {"$ref": "#/$defs/C"}}
    tool = Tool("f", parameters={"properties": {"key": schema}, "$defs": definitions})
    assert types_of(tool, "key") == types
    assert types_of(tool, "other") is None
    assert [parameter.types for parameter in parameters(tool)] == [types]


def test_parameters_are_those_of_the_schema_and_those_required() -> None:
    tool = Tool("f", parameters={"properties": {"a": {}, "b": {}}, "required": ["b", "c", 3]})
    assert [(parameter.key, parameter.required) for parameter in parameters(tool)] == [
        ("a", False),
        ("b", True),
        ("c", True),
    ]
    assert parameters(Tool("f", parameters={"properties": 3, "required": 3})) == []


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        (" 1.0 ", {"number"}, "1.0"),
        ("1", {"string", "number"}, "1"),
        ("1", {"string", "null"}, '"1"'),
        ("None", {"string", "null"}, "null"),
        ("False", {"boolean"}, "false"),
        ("[1, NaN]", {"array"}, '"[1, NaN]"'),
        ("[" * 20_000, {"array"}, f'"{"[" * 20_000}"'),
        ("9" * 5_000, {"integer"}, f'"{"9" * 5_000}"'),
        (' a "b"\n', None, r'" a \"b\"\n"'),
        ("", {"integer"}, '""'),
    ],
)
def test_text_becomes_json_of_its_type(text: str, types: set[str] | None, value: str) -> None:
    assert as_json(text, None if types is None else frozenset(types)) == value
