"""The shape of a schema: what is refused, what is let be, and how the fault is named."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from miniserve.errors import InvalidParameterError
from miniserve.text.json_schema import check_schema

MALFORMED: list[tuple[Any, str]] = [
    (5, "it must be an object or a boolean, got 5"),
    ({"type": "banana"}, "type must be one of string, number, integer, boolean, object, array, null, or .*banana"),
    ({"type": []}, r"type must be one of .*, or a non-empty array of them, got \[\]"),
    ({"type": None}, "got null"),
    ({"type": ["string", 5]}, "type must be one of"),
    ({"properties": []}, r"properties must be an object of schemas, got \[\]"),
    ({"properties": {"a": 5}}, "properties.a must be an object or a boolean, got 5"),
    ({"properties": {"a": {"items": {"required": True}}}}, "properties.a.items.required must be an array of strings"),
    ({"required": "a"}, 'required must be an array of strings, got "a"'),
    ({"required": [1]}, "required must be an array of strings"),
    ({"enum": 5}, "enum must be a non-empty array"),
    ({"anyOf": {}}, "anyOf must be a non-empty array of schemas"),
    ({"anyOf": []}, "anyOf must be a non-empty array"),
    ({"allOf": [{}, {"oneOf": ["x"]}]}, r'allOf\[1\].oneOf\[0\] must be an object or a boolean, got "x"'),
    ({"prefixItems": {}}, "prefixItems must be an array"),
    ({"items": "string"}, "items must be an object"),
    ({"additionalProperties": "no"}, "additionalProperties must be"),
    ({"not": None}, "not must be"),
    ({"minimum": "1"}, 'minimum must be a number, got "1"'),
    ({"maximum": True}, "maximum must be a number"),
    ({"multipleOf": 0}, "multipleOf must be a number greater than 0, got 0"),
    ({"multipleOf": -2}, "multipleOf must be a number greater than 0"),
    ({"minLength": -1}, "minLength must be an integer of at least 0, got -1"),
    ({"maxItems": 1.5}, "maxItems must be an integer"),
    ({"pattern": 5}, "pattern must be a string"),
    ({"format": 5}, "format must be a string"),
    ({"$ref": 5}, "must be a string"),
    ({"$defs": {"a": 5}}, r"\$defs.a must be an object"),
]
DANGLING: list[Any] = [
    {"$ref": "#/$defs/x"},
    {"properties": {"a": {"$ref": "#/definitions/b"}}, "definitions": {"c": {}}},
    {"$ref": "#/anyOf/1", "anyOf": [{}]},
    {"$ref": "#/anyOf/x", "anyOf": [{}]},
    {"$defs": {"a": {}, "b": {"$id": "https://a.example/b", "items": {"$ref": "#/$defs/a"}}}},
]
FINE: list[Any] = [
    True,
    {},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"properties": {"type": {"type": "string"}, "required": False, "$ref": {"enum": [1]}}},
    {"const": {"properties": 5}, "default": {"type": 5}, "examples": [{"required": 1}], "title": "x"},
    {"format": "x", "x-order": [1], "nullable": True, "discriminator": {"propertyName": "a"}},
    {"items": [{"type": "string"}], "additionalItems": False},
    {"minLength": 0, "maxLength": 3.0, "minimum": -1.5},
    {"$ref": "#"},
    {"$ref": "#/$defs/a~1b%20c~0d/items/0", "$defs": {"a/b c~d": {"items": [{}]}}},
    {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/properties/a"}}},
    {"$ref": "https://a.example/b.json"},
    {"items": {"$id": "https://a.example/b", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {}}}},
    {"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}},
    {"$ref": "#name", "$defs": {"a": {"$dynamicAnchor": "name"}}},
    {"$ref": "#name", "definitions": {"a": {"$id": "#name"}, "b": {"properties": {"$id": {}, "$anchor": {}}}}},
]


@pytest.mark.parametrize(("schema", "message"), MALFORMED, ids=str)
def test_what_is_malformed_is_named(schema: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^here is not a valid JSON schema: .*{message}") as caught:
        check_schema(schema, "here", "the field")
    assert caught.value.param == "the field"
    if schema not in ({"enum": 5}, 5):
        with pytest.raises(jsonschema.SchemaError):
            jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("schema", DANGLING, ids=str)
def test_a_reference_to_nothing_is_named(schema: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r'\$ref is "#/.*", but there is nothing at this place'):
        check_schema(schema, "here", "the field")


def test_an_anchor_that_nobody_has_is_named() -> None:
    """Bug: such a reference was taken for one to the whole schema."""
    with pytest.raises(InvalidParameterError, match=r'properties.a.\$ref is "#b", but no part of .* this "\$anchor"'):
        check_schema({"properties": {"a": {"$ref": "#b"}}, "$defs": {"b": {"$anchor": "a"}}}, "here", "the field")


@pytest.mark.parametrize("schema", FINE, ids=str)
def test_what_nobody_knows_is_let_be(schema: Any) -> None:
    check_schema(schema, "here", "the field")


@pytest.mark.parametrize(
    "schema",
    [{"enum": "x" * 10**6}, {"properties": {"x" * 10**6: 5}}, {"type": ["y" * 10**6]}],
    ids=["value", "name", "element"],
)
def test_messages_are_bounded(schema: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        check_schema(schema, "here", "the field")
    assert len(str(caught.value)) < 500


def test_depth_is_bounded() -> None:
    schema: Any = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidParameterError, match="here nests more than 100 deep"):
        check_schema(schema, "here", "the field")
