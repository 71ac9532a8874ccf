"""Numbers in schemas: what is let through is kept exactly, and what would become another number is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.numbers import MAX_EXACT, inexact_number, lossy_multiple
from tests.structured.grammars import Model, matches

MAX_INT64 = 2**63 - 1
CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": 10**40, "maximum": 10**41}, f"minimum has {10**40}"),
    ({"type": "integer", "minimum": MAX_EXACT + 1, "maximum": 2**60}, f"minimum has {MAX_EXACT + 1}"),
    ({"type": "integer", "maximum": -MAX_EXACT - 1, "minimum": -(2**60)}, f"maximum has {-MAX_EXACT - 1}"),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2**64}, f"exclusiveMaximum has {2**64}"),
    ({"type": "integer", "exclusiveMinimum": -1e30, "maximum": 0}, "exclusiveMinimum has -1e+30"),
    ({"type": "integer", "maximum": 2**64 - 1}, f"maximum has {2**64 - 1}"),
    ({"type": "number", "minimum": 1e20, "maximum": 1e21}, "minimum has 1e+20"),
    ({"minimum": MAX_EXACT + 1}, f"minimum has {MAX_EXACT + 1}"),
    ({"const": MAX_EXACT + 1}, f"const has {MAX_EXACT + 1}"),
    ({"const": 2**64 - 1}, f"const has {2**64 - 1}"),
    ({"type": "integer", "enum": [1, 10**25]}, f"enum has {10**25}"),
    ({"enum": [{"a": [MAX_EXACT + 1]}, "b"]}, f"enum has {MAX_EXACT + 1}"),
    ({"const": 2**2000}, "const has an integer of 2001 bits"),
    ({"properties": {"default": {"items": [{"const": 10**40}]}}}, f"const has {10**40}"),
    ({"anyOf": [{"type": "string"}, {"minimum": -(10**40)}]}, f"minimum has {-(10**40)}"),
]
KEPT: list[tuple[dict[str, Any], list[int]]] = [
    ({"type": "integer", "minimum": -MAX_EXACT, "maximum": MAX_EXACT}, [-MAX_EXACT, MAX_EXACT]),
    ({"type": "integer", "exclusiveMinimum": -MAX_EXACT, "exclusiveMaximum": MAX_EXACT}, [-MAX_EXACT, MAX_EXACT]),
    ({"type": "integer", "minimum": 10**17, "maximum": 10**18}, [10**17, 10**18]),
    ({"type": "integer", "minimum": 0, "maximum": MAX_INT64}, [0, MAX_INT64]),
    ({"const": MAX_EXACT}, [MAX_EXACT]),
    ({"type": "integer", "enum": [-(2**62), 5]}, [-(2**62), 5]),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [3]),
    ({"type": "integer", "maximum": 3, "exclusiveMaximum": False}, [3]),
    ({"type": "number", "maximum": 3, "exclusiveMaximum": True, "minimum": 0}, [0, 3]),
]


def reason(schema: Any) -> str:
    return inexact_number(StructuredOutput.json(schema))


@pytest.mark.parametrize(("schema", "named"), CHANGED, ids=lambda value: json.dumps(value)[:60])
def test_what_would_become_another_number_is_named(schema: Any, named: str) -> None:
    """Bug: an integer of at least 10**40 was answered by 2**63 - 1, the largest that a bound was cut to."""
    assert reason(schema).startswith(f"{named}, and numbers are kept exactly from {-MAX_EXACT} to {MAX_EXACT} only")


@pytest.mark.parametrize(("schema", "borders"), KEPT, ids=lambda value: json.dumps(value)[:60])
def test_what_is_let_through_is_kept(model: Model, schema: Any, borders: list[int]) -> None:
    """As it is in the draft that the schema is of: in the fourth, an exclusive bound is a boolean."""
    grammar = model.compiler.compile(StructuredOutput.json(schema))
    is_draft4 = any(isinstance(value, bool) for value in schema.values())
    validator: Any = (jsonschema.Draft4Validator if is_draft4 else jsonschema.Draft202012Validator)(schema)
    for border in borders:
        for number in (border - 1, border, border + 1):
            assert matches(model, grammar, str(number)) is validator.is_valid(number), number


@pytest.mark.parametrize(
    "schema",
    [
        {"default": 10**40, "examples": [{"minimum": 10**40}]},
        {"properties": {"minimum": {"type": "integer"}, "const": {"type": "string"}}},
        {"exclusiveMinimum": True, "minimum": 0.1},
        {"enum": [True, None, "9" * 40, -0.5]},
        True,
    ],
    ids=str,
)
def test_what_is_no_bound_is_let_through(schema: Any) -> None:
    assert reason(schema) == ""


def test_json_within_a_grammar() -> None:
    def of(kind: Any, source: str) -> str:
        return inexact_number(StructuredOutput(kind, source))

    assert of("grammar", f'start: "a" %json {{"const": {10**40}}}').startswith(f"const has {10**40}, ")
    assert of("grammar", 'start: %json {"const": 1}') == of("regex", '%json {"const": 1e40}') == ""
    with pytest.raises(RecursionError):
        of("grammar", "start: %json " + '{"items":' * 10_000)


def multiples(*values: float, kind: str = "number") -> dict[str, Any]:
    return {"type": kind, "allOf": [{"multipleOf": value} for value in values]}


@pytest.mark.parametrize(
    "schema",
    [
        multiples(65536, 65537),
        {"multipleOf": 4294967295, "type": "integer"},
        {"multipleOf": 43000000.5, "type": "number"},
        multiples(4294967295, 4294967291),
        multiples(4294967295, 4294967291, 4294967279),
        multiples(0.01, 4294967291),
        multiples(1e-5, 123457),
        {"type": "integer", "multipleOf": 65536, "anyOf": [{"multipleOf": 65537}, {"const": 0}]},
        {"type": "integer", "multipleOf": 65536, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 65537}}},
        {"allOf": [{"properties": {"a": {"multipleOf": 65536}}}, {"properties": {"a": {"multipleOf": 65537}}}]},
    ],
    ids=str,
)
def test_multiples_that_cannot_be_joined(model: Model, schema: Any) -> None:
    """Bug: their common multiple was cut to 32 bits: 65536 was let through where it had to be one of 65537 too."""
    asked = StructuredOutput.json(schema)
    with pytest.raises(InvalidParameterError, match=r"multipleOf (values, .*, may be joined|has)"):
        model.compiler.compile(asked)
    assert lossy_multiple(StructuredOutput("grammar", f"start: %json {asked.source}"))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (multiples(4, 6), [0, 12, 24], [4, 6, 18]),
        (multiples(0.3, 0.7), [2.1, 4.2, 0], [0.3, 0.7]),
        (multiples(1.5, 10), [30, 0], [15, 10]),
        (multiples(3, 3.0, 7), [21], [3]),
        (
            {"type": "object", "properties": {"a": {"multipleOf": 20731}, "b": {"multipleOf": 20749}}},
            [{"a": 20731}],
            [],
        ),
        ({"multipleOf": 20749, "type": "integer"}, [0, 20749, 41498], [1, 20748]),
    ],
    ids=str,
)
def test_multiples_that_are_joined(model: Model, schema: Any, good: list[Any], bad: list[Any]) -> None:
    grammar = model.compiler.compile(StructuredOutput.json(schema))
    assert all(matches(model, grammar, json.dumps(value)) for value in good)
    assert not any(matches(model, grammar, json.dumps(value)) for value in bad)
