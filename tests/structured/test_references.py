"""Where references lead: each document within a schema has places and names of its own."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.references import References, misread_reference
from tests.structured.grammars import Model, matches

FLAG, TEXT = {"type": "boolean"}, {"type": "string"}
INNER = {"$id": "http://a.example/in", "type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": FLAG}}
NAMED = {
    "$id": "http://a.example/in",
    "type": "array",
    "items": {"$ref": "#n"},
    "$defs": {"a": {"$anchor": "n", **FLAG}},
}
DIRECT = {"$id": "http://a.example/in", "$ref": "#/$defs/a", "$defs": {"a": FLAG}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": INNER, "$defs": {"a": TEXT}},
        {"type": "array", "items": INNER},
        {"type": "array", "items": NAMED, "$defs": {"a": {"$anchor": "n", **TEXT}}},
        {"type": "array", "items": {"$ref": "#/$defs/i"}, "$defs": {"a": TEXT, "i": INNER}},
        {"type": "array", "items": {"$ref": "http://a.example/in"}, "$defs": {"a": TEXT, "i": INNER}},
        {"$id": "http://a.example/b", "type": "array", "items": {"$ref": "in"}, "$defs": {"a": TEXT, "i": INNER}},
        {"$id": "http://a.example/b", "type": "array", "items": {"type": "array", "items": {"$ref": "in#/$defs/a"}},
         "$defs": {"i": INNER}},
        {"type": "array", "items": {"type": "array", "items": {"allOf": [DIRECT]}}, "$defs": {"a": TEXT}},
    ],
)  # fmt: skip
def test_a_document_within_has_its_own_places(model: Model, schema: Any) -> None:
    grammar = model.compiler.compile(StructuredOutput.json(schema))
    assert matches(model, grammar, "[[true]]") and not matches(model, grammar, '[["x"]]')


MISREAD: list[dict[str, Any]] = [
    {"$ref": "#/$defs/i/items", "$defs": {"a": TEXT, "i": INNER}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/i/$defs/a"}}, "$defs": {"i": INNER}},
]


@pytest.mark.parametrize("schema", MISREAD)
def test_a_place_in_the_middle_of_another_document_is_refused(model: Model, schema: Any) -> None:
    """Bug: references from there on were read as if they stood in the outer document."""
    asked = StructuredOutput.json(schema)
    with pytest.raises(InvalidParameterError, match=r"\$ref '#/.*' leads by place into a part with an \$id of its own"):
        model.compiler.compile(asked)
    assert misread_reference(StructuredOutput("grammar", f"start: %json {asked.source}"))


def test_targets() -> None:
    inner: dict[str, Any] = {"$id": "b", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": FLAG}}
    outer: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/a%20~1"}, {"$ref": "#n"}, {"$ref": "#"}, {"$ref": "x"}]}
    outer["$defs"] = {"a /": TEXT, "i": inner, "n": {"$anchor": "n"}}
    references = References(outer)
    assert [references.target(part) for part in outer["anyOf"]] == [TEXT, {"$anchor": "n"}, outer, None]
    assert references.target(inner["items"]) is FLAG and references.target(outer) is None
    nowhere: dict[str, Any] = {"items": {"$ref": f"#/anyOf/{'9' * 5000}"}, "anyOf": [{}]}
    assert References(nowhere).target(nowhere["items"]) is None
