"""Grammars and matchers over the embedded vocabulary: what they let through, when they end, what is refused."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import jsonschema
import pytest

from miniserve.errors import InvalidParameterError, QueueFullError
from miniserve.sampling_params import StructuredOutput
from miniserve.structured import compiler as compiler_module
from miniserve.structured.compiler import Grammar, GrammarCompiler, GrammarError, Matcher
from tests.structured.grammars import END_ID, END_IDS, Model, allowed, matches, random_answer

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}},
    {"enum": ["red", 'gr"een', "bl\\ue", 7, None, {"a": [1]}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "integer", "minimum": -5, "maximum": 250},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"anyOf": [{"type": "string", "pattern": "^[a-f]{3}$"}, {"type": "null"}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
        "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}, "value": {"const": 1}},
        "required": ["left", "value"], "additionalProperties": False}}},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"],
     "additionalProperties": False},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}], "type": "object",
     "properties": {"a": {"minimum": 7}, "b": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 5}, {"const": "ü"}], "items": False,
     "minItems": 2},
]  # fmt: skip


def compile_(model: Model, kind: Any, source: str) -> Grammar:
    return model.compiler.compile(StructuredOutput(kind, source))


def refusal(model: Model, kind: Any, source: str) -> str:
    with pytest.raises(InvalidParameterError) as caught:
        compile_(model, kind, source)
    message = str(caught.value)
    assert caught.value.param == "structured_outputs" and message.startswith(f"structured_outputs.{kind} ")
    assert len(message) < 400
    return message


# What is let through


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_whatever_is_written_is_valid(model: Model, schema: dict[str, Any]) -> None:
    grammar = model.compiler.compile(StructuredOutput.json(schema))
    texts = (random_answer(model, grammar, seed=seed, num_tokens=150) for seed in range(12))
    complete = list(islice((text for text, is_complete in texts if is_complete), 3))
    assert len(complete) == 3  # guard: the others were cut
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for text in complete:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("schema", [{}, True, {"type": "object"}], ids=str)
def test_any_json(model: Model, schema: Any) -> None:
    grammar = model.compiler.compile(StructuredOutput.json(schema))
    for value in ({}, {"a": [1, -2.5e3, "é", None, {"b": True}]}):
        assert matches(model, grammar, json.dumps(value, ensure_ascii=False))
        assert matches(model, grammar, json.dumps(value, ensure_ascii=False, indent=4))
    assert not matches(model, grammar, '{"a"}')


@pytest.mark.parametrize(
    ("text", "is_let_through"),
    [
        ('{"a":[1,2]}', True),
        ('{"a": [1, 2]}', True),
        ('{\n    "a": [\n        1,\n        2\n    ]\n}', True),
        ('{  "a":[1,2]}', False),
        ('{\n\n"a":[1,2]}', False),
        ('{\t"a":[1,2]}', False),
        ('{"a":[1,2]}\n', False),
        (' {"a":[1,2]}', False),
    ],
)
def test_white_space_in_json(model: Model, text: str, is_let_through: bool) -> None:
    """A small model wrote blanks until it had no tokens left. The schema cannot change that."""
    wide = {"whitespace_flexible": True, "whitespace_pattern": "[ \n]*", "lenient": True, "item_separator": ";"}
    for schema in ({"type": "object"}, {"type": "object", "x-guidance": wide}):
        assert matches(model, model.compiler.compile(StructuredOutput.json(schema)), text) is is_let_through


@pytest.mark.parametrize(
    ("text", "is_let_through"),
    [
        (r'"\u00e9"', True),
        (r'"\ud83d\ude00"', True),
        (r'"\u000A\n\t\""', True),
        (r'"\ud83d"', False),
        (r'"\u00e"', False),
        (r'"\u00e9\u00e9\u00e9"', False),
    ],
)
def test_escapes_are_json_too(model: Model, text: str, is_let_through: bool) -> None:
    """Bug: a model that had learnt to escape what is not ASCII was kept from it. An escape is one character."""
    schema = {"type": "string", "maxLength": 2 if "n" not in text else 9}
    assert matches(model, model.compiler.compile(StructuredOutput.json(schema)), text) is is_let_through


def test_escapes_in_keys_and_any_json(model: Model) -> None:
    grammar = model.compiler.compile(StructuredOutput.json({}))
    assert matches(model, grammar, r'{"\u00e9": ["\u00e9"]}')


CHOICES = ["yes", "yesterday", 'a "b"', "back\\slash", "new\nline", "\x7f\t", "é😀", "a/b", "<|im_end|>", "i", "{%}"]


def test_choices(model: Model) -> None:
    grammar = model.compiler.compile(StructuredOutput.choice(CHOICES))
    assert all(matches(model, grammar, choice) for choice in CHOICES)
    assert not any(matches(model, grammar, text) for text in ("", "ye", "yess", "new", "YES", "back\\\\slash"))


def test_thousands_of_choices(model: Model) -> None:
    grammar = model.compiler.compile(StructuredOutput.choice([f"answer {number}" for number in range(5000)]))
    assert matches(model, grammar, "answer 4999") and not matches(model, grammar, "answer 5000")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[a-z]+@[a-z]+\.com", "me@here.com", "me@here.org"),
        ("^abc$", "abc", "abcd"),
        ("a|bc", "bc", "abc"),
        ("a/b\nc?", "a/b\n", "a/b"),
        (r"\d{3}-\d{2}", "123-45", "123-456"),
        ("(?i)é+", "Éé", "e"),
    ],
)
def test_a_regular_expression_is_the_whole_answer(model: Model, pattern: str, good: str, bad: str) -> None:
    grammar = compile_(model, "regex", pattern)
    assert matches(model, grammar, good) and not matches(model, grammar, bad)


def test_a_lark_grammar(model: Model) -> None:
    grammar = compile_(model, "grammar", 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/')
    assert matches(model, grammar, "12+7+300") and not matches(model, grammar, "12+")


def test_a_grammar_may_name_special_tokens(model: Model) -> None:
    special_id = model.tokenizer.special_id("<|im_start|>")
    assert special_id is not None
    matcher = compile_(model, "grammar", f'start: <[{special_id}]> "a"').start()
    assert allowed(matcher) == {special_id}
    matcher.accept([special_id])
    assert not matcher.complete
    matcher.accept(model.encode("a"))
    assert matcher.complete


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('start: "a" <[49152]>', "<[49152]> has the token id 49152; the vocabulary goes from 0 to 49151"),
        ("start: <[3-999999]>", "<[3-999999]> has the token id 999999;"),
        (f"start: <[{9**30}]>", "has the token id 4239115827521620"),
        ('start: "a" <|im_end|> "b"', "<|im_end|> ends the answer wherever it comes; leave it out"),
        ('start: "a" <[1,2]> "b"', "<[1,2]> has the token 2, <|im_end|>, which ends the answer"),
        ("start: <[^1]>", "<[^1]> has the token 0, <|endoftext|>, which ends"),
        ("start: <[*]>", "send <[^0,2]> for all other tokens"),
        ("start: <nobody>", "the model has no special token '<nobody>'; text stands between quotes"),
    ],
)
def test_a_token_that_no_grammar_may_name(model: Model, source: str, reason: str) -> None:
    """Bugs: an unknown id "takes too much to compile"; a grammar went on behind the end of the answer."""
    assert reason in refusal(model, "grammar", source)


def test_what_only_looks_like_a_token_is_text(model: Model) -> None:
    source = 'start: a // <[999999]> "\n# <|im_end|>\na: "\\"<[999999]>" /<\\[[0-9]+\\]>\\/<[99999]>/ "<|im_end|>"'
    assert matches(model, compile_(model, "grammar", source), '"<[999999]><[7]>/<9><|im_end|>')
    others = allowed(compile_(model, "grammar", "start: <[^0,2]>").start())
    assert others == set(range(model.tokenizer.num_token_ids)) - END_IDS


# Masks


def brute_force(model: Model, matcher: Matcher) -> set[int]:
    """Every token tried, one by one, beginning with its first bytes."""
    inner = matcher._matcher
    return {token_id for token_id in range(model.tokenizer.num_token_ids) if inner.validate_tokens([token_id]) == 1}


@pytest.mark.parametrize(
    ("kind", "source", "prefix"),
    [
        ("json", '{"type":"object"}', '{"a'),
        ("json", '{"type":"array","items":{"type":"integer"}}', "[1"),
        ("regex", "[a-z ]+", ""),
        ("regex", "(ab|a)c*", "a"),
        ("choice", '["ends", "ends here"]', "ends"),
    ],
)
def test_a_mask_is_what_trying_every_token_gives(model: Model, kind: str, source: str, prefix: str) -> None:
    matcher = compile_(model, kind, source).start()
    matcher.accept(model.encode(prefix))
    following = allowed(matcher)
    assert following == brute_force(model, matcher) and following


def test_special_tokens_are_no_text_and_the_end_tokens_come_at_the_end(model: Model) -> None:
    matcher = compile_(model, "regex", "(?s:.*)").start()
    special_ids = set(filter(model.tokenizer.is_special, range(model.tokenizer.num_token_ids)))
    assert len(special_ids) > len(END_IDS) and allowed(matcher) & special_ids == END_IDS
    assert not allowed(compile_(model, "regex", "(?s:.+)").start()) & special_ids


def test_forced_text_is_written_as_the_tokenizer_would(model: Model) -> None:
    """Also text that spells a special token, and more of it than is looked at."""
    text = "The answer is <|im_end|> and " + "so on, " * 400
    matcher = model.compiler.compile(StructuredOutput.choice([text])).start()
    written = []
    for _ in range(60):
        [token_id] = allowed(matcher)
        written.append(token_id)
        matcher.accept([token_id])
    assert written == model.encode(text)[:60]


# Matchers


def test_complete_is_when_nothing_can_follow(model: Model) -> None:
    matcher = compile_(model, "regex", "ab?").start()
    assert not matcher.complete
    matcher.accept(model.encode("a"))
    assert not matcher.complete and END_ID in allowed(matcher)
    matcher.accept(model.encode("b"))
    assert matcher.complete


def test_an_end_token_completes(model: Model) -> None:
    matcher = compile_(model, "regex", "ab?").start()
    matcher.accept([*model.encode("a"), END_ID])
    assert matcher.complete


@pytest.mark.parametrize("source", ["()", "a{0}"])
def test_an_empty_answer_can_only_end(model: Model, source: str) -> None:
    assert allowed(compile_(model, "regex", source).start()) == END_IDS


def test_text_goes_on_whatever_its_tokens(model: Model) -> None:
    matcher = model.compiler.compile(StructuredOutput.choice(["héllo world <|im_end|>"])).start()
    matcher.accept_text("hél")
    matcher.accept_text("lo world <|im_end|")
    assert not matcher.complete
    matcher.accept_text(">")
    assert matcher.complete


def test_what_follows_a_beginning(model: Model) -> None:
    """Whatever the tokens of the beginning were; the grammar itself stays at its start."""
    grammar = model.compiler.compile(StructuredOutput.json({"type": "array", "items": {"const": "é"}}))
    rest = grammar.after('["é", "').after("")
    assert matches(model, rest, 'é"]') and not matches(model, rest, '["é"]')
    assert matches(model, grammar, '["é"]')
    assert allowed(grammar.after('["é"]').start()) == END_IDS
    with pytest.raises(GrammarError):
        grammar.after('["e')


def test_the_token_of_a_text(model: Model) -> None:
    matcher = compile_(model, "regex", "a").start()
    assert [matcher.token_of("\n")] == model.encode("\n")
    assert matcher.token_of("\n" * 500) is None and matcher.token_of("") is None


@pytest.mark.parametrize("text", ["x", "abc", "<|im_end|>"])
def test_what_is_not_allowed_is_an_error(model: Model, text: str) -> None:
    matcher = compile_(model, "regex", "ab+").start()
    with pytest.raises(GrammarError) as caught:
        matcher.accept_text(text)
    assert len(str(caught.value)) < 310 and "ab+" not in str(caught.value) and "non-verbose" not in str(caught.value)
    assert not matcher.complete
    with pytest.raises(GrammarError):
        allowed(matcher)
    with pytest.raises(GrammarError):
        matcher.accept(model.encode("a"))


def test_an_end_token_too_early_is_an_error(model: Model) -> None:
    matcher = compile_(model, "regex", "ab+").start()
    with pytest.raises(GrammarError):
        matcher.accept([END_ID])


def test_answers_do_not_know_each_other(model: Model) -> None:
    grammar = compile_(model, "regex", "a+b|c")
    first, second = grammar.start(), grammar.start()
    before = allowed(second)
    first.accept(model.encode("c"))
    assert first.complete and not second.complete and allowed(second) == before
    assert allowed(grammar.start()) == before


# Vocabularies


class Letters:
    """A tokenizer of letters a to z; id 26 is special."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == 26 else bytes([97 + token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == 26

    def encode_literal(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text if letter.isalpha()]


def test_a_tokenizer_without_an_end_token() -> None:
    compiler = GrammarCompiler(Letters(), num_token_ids=26, eos_token_ids=frozenset({26, -1}))
    matcher = compiler.compile(StructuredOutput("regex", "ab?")).start()
    assert allowed(matcher) == {0}
    matcher.accept([0])
    assert allowed(matcher) - {26} == {1}  # the model has no token 26
    matcher.accept([1])
    assert matcher.complete
    compiler.close()


def test_a_model_with_fewer_tokens_than_the_tokenizer() -> None:
    compiler = GrammarCompiler(Letters(), num_token_ids=20, eos_token_ids=frozenset({3}))
    matcher = compiler.compile(StructuredOutput("regex", "a[a-z]")).start()
    matcher.accept([0])
    assert allowed(matcher) == set(range(20)) - {3}
    with pytest.raises(InvalidParameterError, match="no tokens for"):
        compiler.compile(StructuredOutput("regex", "zoo"))
    compiler.close()


# What is refused


def test_an_answer_without_end(model: Model) -> None:
    """Bug: the model wrote until it had no tokens left."""
    endless = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    assert "no answer can be finished" in refusal(model, "json", json.dumps(endless))
    assert "no answer can be finished" in refusal(model, "grammar", f"start: %json {json.dumps(endless)}")


def test_a_bound_that_would_be_cut(model: Model) -> None:
    """Bug: the answer was the largest integer of 64 bits, and nothing said why."""
    large = {"type": "integer", "minimum": 10**40, "maximum": 10**41}
    for kind, source in (("json", json.dumps(large)), ("grammar", f"start: %json {json.dumps(large)}")):
        assert f"minimum has {10**40}, and numbers are kept exactly" in refusal(model, kind, source)


def test_a_reference_by_name(model: Model) -> None:
    """Bug: it was taken for one to the whole schema, and refused as one without end."""
    schema = {"$id": "http://a.example/b", "$defs": {"a": {"$anchor": "name", "type": "boolean"}}, "$ref": "#name"}
    grammar = model.compiler.compile(StructuredOutput.json(schema))
    assert matches(model, grammar, "true") and not matches(model, grammar, "1")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"properties": {"a": {"contains": {}}}}, "contains"),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "oneOf"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "strng"}, "strng"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "http://127.0.0.1:9/schema.json"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "#none"}, "'#none', but no part of it has this $anchor"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        ({"$defs": {"a": {"x-guidance": {"lenient": True}, "not": {}}}, "$ref": "#/$defs/a"}, "not"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_named(model: Model, schema: dict[str, Any], named: str) -> None:
    assert named in refusal(model, "json", json.dumps(schema))


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json", '{"type":', "not valid JSON"),
        ("json", "[1]", "a schema is a JSON object, got [1]"),
        ("json", "false", "got false"),
        ("json", '{"minimum": NaN}', "not valid JSON"),
        ("json", '{"enum": []}', "no value is valid against it"),
        ("json", '{"const": "\\ud800"}', "not valid JSON"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "(a", "unclosed group"),
        ("regex", "\ud800", "half a surrogate pair at character 0"),
        ("choice", '"a"', "must be an array of strings"),
        ("choice", "[]", "with one at least"),
        ("choice", '["a", 1]', "must be an array of strings"),
        ("grammar", "start: a", "a"),
        ("grammar", 'root ::= "a" | "b"', '":" in place of "::="'),
        ("grammar", 'start: "a" )', "line 1, column 12: "),
        ("grammar", "start: b\nb: b", "no answer is possible"),
    ],
)
def test_what_makes_no_sense_is_explained(model: Model, kind: str, source: str, reason: str) -> None:
    assert reason in refusal(model, kind, source)


# The cache, and many at once


def test_the_same_grammar_is_compiled_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_(model, "regex", "cached")
    assert compile_(model, "regex", "cached") is first
    assert compile_(model, "choice", '["cached"]') is not first
    compile_(model, "regex", "other")
    assert compile_(model, "regex", "cached") is first
    monkeypatch.setattr(compiler_module, "_MAX_CACHED_GRAMMARS", 2)
    assert compile_(model, "regex", "cached") is first
    compile_(model, "regex", "third")  # "other" was used longest ago
    assert compile_(model, "regex", "cached") is first
    assert len(model.compiler._cache._grammars) == 2
    compile_(model, "regex", "fourth")
    compile_(model, "regex", "fifth")
    assert compile_(model, "regex", "cached") is not first


def test_the_cache_is_bounded_in_characters(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_CACHED_CHARACTERS", 300)
    cache = model.compiler._cache
    for number in range(10):
        compile_(model, "regex", f"{number}" * 100)
        assert sum(len(asked.source) for asked in cache._grammars) == cache._num_characters <= 300
    assert len(cache._grammars) == 3


def test_many_threads_compile_at_once(model: Model) -> None:
    def work(number: int) -> bool:
        grammar = compile_(model, "regex", f"same|{number % 3}")
        return matches(model, grammar, "same") and matches(model, grammar, str(number % 3))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(24)))


def test_who_would_wait_too_long_is_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_WAIT_SECONDS", 0.01)
    with model.compiler._turn(), model.compiler._turn(), pytest.raises(QueueFullError, match="try again later"):
        compile_(model, "regex", "waits")
    assert matches(model, compile_(model, "regex", "waits"), "waits")


def test_a_compiler_that_is_dropped_leaves_no_process() -> None:
    compiler = GrammarCompiler(Letters(), num_token_ids=26, eos_token_ids=frozenset())
    compiler.compile(StructuredOutput("regex", "abc"))
    [process] = [rehearsal._process for rehearsal in compiler._rehearsals if rehearsal._process is not None]
    gone = weakref.ref(compiler)
    del compiler
    gc.collect()
    assert gone() is None and process.poll() is not None
    assert threading.active_count() < 100
