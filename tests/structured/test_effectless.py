"""Keywords that say nothing where they stand: a schema with them is one without them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miniserve.sampling_params import StructuredOutput
from miniserve.structured.effectless import without_effectless
from tests.structured.grammars import Model, matches

STRING = {"type": "string"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "array", "minContains": 2, "maxContains": 3}, {"type": "array"}),
    ({"then": STRING, "else": False, "type": "null"}, {"type": "null"}),
    ({"if": STRING, "type": "null"}, {"type": "null"}),
    ({"uniqueItems": False, "not": False, "propertyNames": {}, "unevaluatedProperties": True}, {}),
    ({"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}, "unevaluatedItems": {}}, {}),
    ({"properties": {"a": {"anyOf": [{"minContains": 1}]}}}, {"properties": {"a": {"anyOf": [{}]}}}),
    ({"$defs": {"then": {"then": {}}}, "$ref": "#/$defs/then"}, {"$defs": {"then": {}}, "$ref": "#/$defs/then"}),
]  # fmt: skip
KEPT: list[dict[str, Any]] = [
    {"contains": STRING, "minContains": 0},
    {"if": STRING, "then": {"minLength": 1}},
    {"uniqueItems": True},
    {"not": {}},
    {"properties": {"minContains": STRING, "then": STRING}, "required": ["then"]},
    {"enum": [{"minContains": 1}], "const": {"then": 1}, "default": {"uniqueItems": False}},
    {"type": "array", "items": [STRING], "additionalItems": False},
]


@pytest.mark.parametrize(("schema", "plain"), CASES, ids=str)
def test_they_are_dropped(schema: dict[str, Any], plain: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert without_effectless(schema) == plain
    assert json.dumps(schema) == before, "the user's own is left as it is"


@pytest.mark.parametrize("schema", KEPT, ids=str)
def test_what_has_an_effect_or_is_no_keyword_stays(schema: dict[str, Any]) -> None:
    assert without_effectless(schema) is schema


def test_a_schema_with_them_is_kept_to(model: Model) -> None:
    """Bug: minContains without contains was refused as one that cannot be kept."""
    schema = {"type": "array", "items": {"const": 1, "then": STRING}, "minContains": 2, "uniqueItems": False}
    text = json.dumps(schema)
    lark = StructuredOutput("grammar", f'start: "a" %json {text} | "b" %json {text} "c"')
    for asked, good, bad in ((StructuredOutput.json(schema), "[1]", "[2]"), (lark, "b[1, 1]c", "b[2]c")):
        grammar = model.compiler.compile(asked)
        assert matches(model, grammar, good) and not matches(model, grammar, bad)
