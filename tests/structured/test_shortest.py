"""How short an answer can be, and that what can never be whole is told from what only looks endless."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miniserve.sampling_params import StructuredOutput
from miniserve.structured.shortest import unfinishable

CONTEXT = 1000
TREE = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
NAMED = {"$anchor": "tree", "type": "object", "properties": {"x": {"$ref": "#tree"}}, "required": ["x"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/link"}}, "required": ["next"]}


def object_of(schema: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": list(required)}


def reason(schema: Any) -> str:
    return unfinishable(StructuredOutput.json(schema), longest_token=10, max_tokens=CONTEXT)


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        (TREE, "#"),
        ({"$ref": "#"}, "#"),
        ({"$ref": "#tree", "$defs": {"a": NAMED}}, "#tree"),
        ({"$ref": "#tree", "$defs": {"a": NAMED, "b": {"$id": "https://a.example/b", "$anchor": "tree"}}}, "#tree"),
        ({"$ref": "#/$defs/node", "$defs": {"node": NODE, "link": {"$ref": "#/$defs/node"}}}, "#/$defs/"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{"const": 1}, {"$ref": "#"}], "minItems": 2}, "#"),
        ({"allOf": [object_of({"$ref": "#"}, "a"), {"type": "object"}]}, "#"),
        ({"type": "array", "minItems": 1, "items": {"$id": "b", **TREE}}, "#"),
        ({"type": "object", "allOf": [{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}]}, "#"),
        ({"anyOf": [TREE, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}, "#"),
        ({"type": "object", "required": ["b"], "additionalProperties": {"$ref": "#"}}, "#"),
        (object_of({"$ref": "#/properties/~1~0"}, "a") | {"properties": {"/~": TREE, "a": {"$ref": "#"}}}, "#"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_requires_itself_has_no_end(schema: Any, reference: str) -> None:
    assert f"no answer can be finished: what $ref '{reference}" in reason(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        object_of({"$ref": "#"}),
        object_of({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "a"),
        object_of({"type": ["null", "array"], "items": {"$ref": "#"}, "minItems": 1}, "a"),
        {"type": "array", "items": {"$ref": "#"}},
        {"required": ["a"], "properties": {"a": {"$ref": "#"}}},  # the number 1 is valid against it
        {"type": "object", "required": ["b"], "patternProperties": {"b": {}}, "additionalProperties": {"$ref": "#"}},
        {"type": "integer", "$defs": {"unused": {"$ref": "#/$defs/unused"}}},
        {"$defs": {"a": NODE, "link": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": None}]}}, "$ref": "#/$defs/a"},
        {"$ref": "#/$defs/elsewhere"},
        {"$ref": "#name", "$id": "https://a.example/b", "$defs": {"a": {"$anchor": "name", "type": "boolean"}}},
        {"$ref": "#tree", "$defs": {"a": NAMED, "b": {"$anchor": "tree"}}},  # nobody knows which one
        {"const": {"$ref": "#"}},
        {**NODE, "$defs": {"link": {"$id": "b", "$ref": "#/$defs/link", "$defs": {"link": {"type": "boolean"}}}}},
        {"type": "array", "minItems": CONTEXT - 1},
        {"type": "string", "minLength": 10 * CONTEXT},
        {"enum": ["x" * 20 * CONTEXT, "y"]},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_has_an_end_is_let_through(schema: Any) -> None:
    assert reason(schema) == ""


@pytest.mark.parametrize(
    ("schema", "num_tokens"),
    [
        ({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}, 10**9 + 1),
        ({"type": "array", "items": object_of({}, "a", "b"), "minItems": 400}, 1201),
        ({"type": "array", "prefixItems": [{"type": "string", "minLength": 9000}], "minItems": 200}, 1100),
        ({"type": "string", "minLength": 10_010}, 1001),
        ({"const": "x" * 20_000}, 2000),
        ({"type": "object", "minProperties": 1000}, 1001),
        ({"type": "array", "minItems": 10**400}, 2**53),
        (
            {f"r{i}": {"type": "array", "items": {"$ref": f"#/r{i + 1}"}, "minItems": 2} for i in range(60)}
            | {"$ref": "#/r0"},
            2**53,
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_longer_than_the_context_is_counted(schema: Any, num_tokens: int) -> None:
    assert f"it takes {num_tokens} tokens at least, and the context holds {CONTEXT}" in reason(schema)


def test_a_long_chain_of_references_settles() -> None:
    links = {str(i): object_of({"$ref": f"#/{i + 1}"}, "a") for i in range(500)}
    assert reason({"$ref": "#/0"} | links | {"500": {}}) == ""
    assert "finished" in reason({"$ref": "#/0"} | links | {"500": {"$ref": "#/0"}})


def test_what_is_nested_deeply_is_no_crash() -> None:
    text = '{"type":"array","minItems":1,"items":' * 900 + "{}" + "}" * 900
    asked = StructuredOutput("json", text)
    assert unfinishable(asked, longest_token=10, max_tokens=CONTEXT) == "it is nested too deeply"


def test_json_within_a_grammar() -> None:
    def of(source: str) -> str:
        return unfinishable(StructuredOutput("grammar", source), longest_token=10, max_tokens=CONTEXT)

    assert "'#'" in of(f'start: "a" | call\ncall: "x" %json {json.dumps(TREE)} "y"')
    assert of('start: %json {"type": "object"} "%json {" /%json {"a/') == ""
    assert unfinishable(StructuredOutput("regex", "a{5000}"), longest_token=1, max_tokens=10) == ""
