"""What the sender of a refused grammar reads: no options of the library, nor the grammar that a schema became."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from miniserve.structured.library import Vocabulary, make_tokenizer, parser_limits
from miniserve.structured.reasons import in_words
from miniserve.structured.rehearsal import rehearse
from miniserve.text.parsers.base import Tool
from miniserve.text.parsers.hermes import HermesFormat


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return make_tokenizer(Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], [256], [256]))


def message_of(tokenizer: LLTokenizer, grammar: str) -> str:
    """llguidance's own."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    assert matcher.is_error()
    return matcher.get_error()


CASES: list[tuple[dict[str, Any], str]] = [
    ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "use anyOf"),
    ({"not": {}, "uniqueItems": True, "type": "array"}, "not', 'uniqueItems' is not supported; leave it out"),
    ({"type": "string", "format": "colour"}, "the format 'colour' is not known; leave it out, or use a pattern"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "no value is valid against it: "),
    ({"$ref": "https://a.example/b.json"}, "it refers to 'https://a.example/b.json', which is not part of it"),
    ({"properties": {"a": {"$ref": "#/properties/a", "type": "object"}}, "$ref": "#/properties/a"}, "a $ref"),
    ({"type": "string", "pattern": "a(?=b)"}, "look-ahead and look-behind are not supported"),
    ({"type": "string", "pattern": r"\bx"}, r"\b and \B, borders of words, are not supported"),
    ({"$ref": "#name"}, "it refers to '#name', but no part of it has this $anchor"),
    ({"type": "number", "minimum": 1e18}, "a minimum or maximum is too large"),
    ({"type": "integer", "minimum": -(2**63)}, "use bounds from -9007199254740992 to 9007199254740992"),
    ({"type": "number", "minimum": 1e-300}, "a number has too many digits"),
    ({"type": "number", "multipleOf": 1e-300}, "its multipleOf cannot be kept exactly; use an integer up to"),
    ({"type": "string", "minLength": 1e30}, "minLength is 1e30, which is too large or no integer"),
    ({"type": "string", "pattern": "("}, "a regular expression is malformed: unclosed group"),
    (
        {"type": "string", "pattern": r"(a)\1"},
        r"backreferences such as \1 are not supported in regular expressions; write",
    ),
    ({"type": "string", "pattern": "a^b"}, "^ and $ are supported at the ends of a regular expression only"),
    ({"type": "string", "pattern": "(?>a)b"}, "groups such as (?>...), (?#...)"),
    ({"type": "string", "pattern": r"a\Z"}, r"an unknown escape, such as \Z"),
    ({"type": "string", "pattern": r"(?-u:\xff)"}, "leave out (?-u)"),
    ({"type": "string", "pattern": "a{9999999999}"}, "a number in a regular expression is too large"),
    (
        {"type": "string", "pattern": "^(a|b)*a(a|b){40}$", "minLength": 3000, "maxLength": 3100},
        "it cannot be found out whether any text fits its pattern, its format and its lengths together; make",
    ),
    (
        {"patternProperties": {"a": {"type": "string"}, "b": {"type": "null"}}},
        "the same name may fit two of its patternProperties, /a/ and /b/; make them exclude each other",
    ),
]
INNER = (
    *("coerce", "Lark", "<tool_call>", "x-guidance", "failed to compile", "at 3(", "3(", "%json", "llguidance"),
    *("Some(", "f64", "u64", "regex", "flag", "literal invalid"),
)


@pytest.mark.parametrize(("schema", "words"), CASES, ids=lambda case: json.dumps(case)[:40])
def test_a_schema_alone_and_as_that_of_a_tool(tokenizer: LLTokenizer, schema: dict[str, Any], words: str) -> None:
    """Bug: of a tool's schema, pages of the grammar that it was put in were shown, and options of the library."""
    alone = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    tool = Tool("f", None, {"properties": {"a": schema}, "required": ["a"]})
    called = LLMatcher.grammar_from_lark(HermesFormat().grammar([tool], required=True))
    for grammar in (alone, called):
        reason = in_words(message_of(tokenizer, grammar))
        assert words in reason and "\n" not in reason and len(reason) < 200, reason
        assert not any(word in reason for word in INNER), reason


def test_a_pattern_that_nothing_fits(tokenizer: LLTokenizer) -> None:
    schema = {"type": "string", "pattern": "a", "maxLength": 0}
    reason = in_words(message_of(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema))))
    assert reason == "no text fits its pattern, its format and its lengths together; change one of them"


def test_places_are_told_where_the_grammar_is_the_users(tokenizer: LLTokenizer) -> None:
    message = message_of(tokenizer, LLMatcher.grammar_from_lark("start: a\na: foo"))
    assert in_words(message, shows_place=True) == 'line 2, column 4: unknown name: "foo"'
    assert in_words(message) == 'unknown name: "foo"'


def test_limits_are_told_as_what_was_too_large(tokenizer: LLTokenizer) -> None:
    """Bug: "Too many items (limit 10000)" says neither of what, nor what to do."""
    alternatives = " | ".join("a" for _ in range(12_000))
    many = rehearse(tokenizer, LLMatcher.grammar_from_lark(f'start: {alternatives}\na: b "x"\nb: "y" | a'))
    row = "Parser Error: Current row has 2333 items; max is 2000; consider making your grammar left-recursive"
    for message in (many, row, "Too many items (limit 10000); try avoiding single-byte/short lexemes"):
        assert "limit" in message or "max" in message
        reason = in_words(message)
        assert "offer fewer alternatives" in reason and "limit" not in reason and "max" not in reason


def test_what_is_not_known_is_passed_on_cut() -> None:
    assert in_words("something new\nand its details") == "something new"
    assert in_words("x" * 1000) == "x" * 300 + "..."
