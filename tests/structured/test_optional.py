"""Properties that may be left out: as many as are followed wherever they are, and not one more."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.optional import MAX_OPTIONAL, too_many_optional
from tests.structured.grammars import Model, allowed


def wide(number: int, kind: str = "integer", prefix: str = "p", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"{prefix}{i}": {"type": kind} for i in range(number)}, **more}


HALF = MAX_OPTIONAL // 2 + 1
TOO_MANY: dict[str, dict[str, Any]] = {
    "at the top": wide(3000),
    "one too many": wide(MAX_OPTIONAL + 1),
    "within": {"type": "object", "properties": {"a": wide(1000)}},
    "of items": {"type": "array", "items": {"type": "array", "items": wide(1000)}},
    "one of some": {"anyOf": [{"type": "string"}, wide(1000)]},
    "one required": wide(1000, required=["p5"]),
    "referred to": {"type": "object", "properties": {"a": {"$ref": "#/$defs/w"}}, "$defs": {"w": wide(1000)}},
    "joined by allOf": {"allOf": [wide(HALF), wide(HALF, prefix="q")]},
    "joined by a reference": {**wide(HALF), "$ref": "#/$defs/w", "$defs": {"w": wide(HALF, prefix="q")}},
}
FEW: dict[str, dict[str, Any]] = {
    "as many as may be": wide(MAX_OPTIONAL, additionalProperties=False),
    "of strings": wide(MAX_OPTIONAL, "string"),
    "of lists": wide(MAX_OPTIONAL, "array", "a_name_that_is_longer_"),
    "within each other": {"type": "object", "properties": wide(MAX_OPTIONAL - 1)["properties"] | {"a": wide(200)}},
    "all required": wide(1000, required=[f"p{i}" for i in range(1000)], additionalProperties=False),
    "several objects": {"type": "array", "prefixItems": [wide(200), wide(200)], "items": False},
    "itself": {"$ref": "#/$defs/w", "$defs": {"w": wide(200, allOf=[{"properties": {"w": {"$ref": "#/$defs/w"}}}])}},
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_are_refused_at_the_start(model: Model, name: str) -> None:
    """Bug: the answer began, and ended in an error when it came to the object."""
    asked = StructuredOutput.json(TOO_MANY[name])
    with pytest.raises(InvalidParameterError, match=rf"properties that may be left out, and at most {MAX_OPTIONAL}"):
        model.compiler.compile(asked)
    assert too_many_optional(StructuredOutput("grammar", f'start: "a" %json {asked.source}'))


@pytest.mark.parametrize("name", FEW)
def test_a_few_are_followed_to_the_end(model: Model, name: str) -> None:
    schema = FEW[name]
    asked = StructuredOutput.json(schema)
    assert too_many_optional(asked) == ""
    grammar = model.compiler.compile(asked)
    matcher = grammar.start()
    properties = schema.get("properties", {})
    kinds = {"integer": "1", "string": '"x"', "array": "[[]]", "object": '{"p0": 1}'}
    text = "{" + ", ".join(f'"{key}": {kinds[part["type"]]}' for key, part in [*properties.items()][-9:]) + "}"
    if not properties:
        text = '[{"p0": 1}, {"p199": 2}]' if "prefixItems" in schema else '{"p3": 1, "w": {"w": {"p7": 1}}}'
    if "required" in schema:
        text = '{"p0": 1, "p1": 2, "p2": 3'
    for token_id in model.encode(text):
        assert token_id in allowed(matcher)
        matcher.accept([token_id])
