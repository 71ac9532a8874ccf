"""What a grammar lets a model write, the same format's parser reads as calls, valid against the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.compiler import GrammarCompiler
from miniserve.text.parsers import lark
from miniserve.text.parsers.base import MAX_TOOLS, CallsOrAnswer, Tool, read_tools
from miniserve.text.parsers.generic import GenericFormat
from miniserve.text.parsers.hermes import HermesFormat
from miniserve.text.parsers.lark import MAX_CALLS
from miniserve.text.parsers.llama3 import Llama3Format
from miniserve.text.parsers.mistral import MistralArgsFormat, MistralFormat
from miniserve.text.parsers.qwen_coder import QwenCoderFormat
from miniserve.text.parsers.tool_format import ToolFormat
from miniserve.text.tokenizer import Tokenizer
from tests.support import embedded_gguf
from tests.text.parsers.reading import Answer, read
from tests.text.parsers.walks import Vocabulary
from tests.text.qwen3 import qwen3_folder

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F °"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SEARCH = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}, "maxItems": 3},
        "first": {"$ref": "#/$defs/Tag"},
        "where": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["tags"],
    "additionalProperties": False,
    "$defs": {"Tag": {"type": "string", "minLength": 1, "maxLength": 5}},
}
TOOLS = (Tool("get_weather", "Weather.", WEATHER), Tool("search.web", None, SEARCH), Tool("now-1"))
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
# What stands before the arguments of one call, and what behind them.
FRAMES: dict[ToolFormat, tuple[str, str]] = {
    HermesFormat(): ('<tool_call>\n{"name": "now-1", "arguments": ', "}\n</tool_call>"),
    GenericFormat(): ('<tool_call>\n{"name": "now-1", "arguments": ', "}\n</tool_call>"),
    QwenCoderFormat(): ("<tool_call>\n<function=now-1>\n</function>\n</tool_call>", ""),
    Llama3Format(): ('{"name": "now-1", "parameters": ', "}"),
    MistralFormat(): ('[TOOL_CALLS][{"name": "now-1", "arguments": ', "}]"),
    MistralArgsFormat(): ("[TOOL_CALLS]now-1[ARGS]", ""),
}
FORMATS = tuple(FRAMES)
QWEN_CODER = FORMATS[2]
OPENINGS = {"llama3": '{"name"', "mistral": "[TOOL_CALLS]", "mistral_args": "[TOOL_CALLS]"}


@pytest.fixture(scope="module")
def embedded() -> Vocabulary:
    return Vocabulary.of(Tokenizer.from_gguf(embedded_gguf()))


@pytest.fixture(scope="module")
def qwen3() -> Vocabulary:
    return Vocabulary.of(Tokenizer.from_folder(qwen3_folder()))


@pytest.fixture(params=FORMATS, ids=lambda tool_format: tool_format.name)
def tool_format(request: pytest.FixtureRequest) -> ToolFormat:
    assert isinstance(request.param, ToolFormat)
    return request.param


def call_text(tool_format: ToolFormat) -> str:
    """A call of the last tool, which takes no arguments."""
    before, after = FRAMES[tool_format]
    return before if tool_format is QWEN_CODER else before + "{}" + after


def check(answer: Answer) -> int:
    """All calls name a tool, with valid arguments; returns how many there are."""
    for name, arguments in answer.calls:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        jsonschema.validate(value, dict(SCHEMAS[name]))
    return len(answer.calls)


def test_beside_a_strict_tool_others_are_free(tool_format: ToolFormat, embedded: Vocabulary) -> None:
    """Bug: one strict tool held all others to their schemas."""
    before, after = FRAMES[tool_format]
    any_arguments = '<parameter=any thing>\n{"b": [1]}\n</parameter>\n' * 2
    if tool_format is QWEN_CODER:
        free = before.replace("</function>", any_arguments + "</function>")
    else:
        free = before + '{"any thing": {"b": [1]}}' + after
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
    strict = Tool("strict", None, city, strict=True)
    now = Tool("now-1", None, {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]})
    grammar = tool_format.grammar((strict, now))
    assert embedded.accepts(grammar, free) and embedded.accepts(grammar, call_text(tool_format))
    [(name, arguments)] = read(tool_format, [free], (strict, now)).calls
    assert name == "now-1" and "any thing" in json.loads(arguments)
    assert not embedded.accepts(tool_format.grammar((strict, replace(now, strict=True))), free)
    assert not embedded.accepts(tool_format.grammar((strict, now), required=True), free)
    if tool_format is not QWEN_CODER:
        assert not embedded.accepts(grammar, free.replace("now-1", "strict"))


def test_required_calls_read_back(tool_format: ToolFormat, embedded: Vocabulary) -> None:
    grammar = tool_format.grammar(TOOLS, required=True)
    num_whole, names = 0, set[str]()
    for seed in range(12):
        text = embedded.walk(grammar, seed)
        if text is not None:
            answer = read(tool_format, [text], TOOLS)
            assert answer.text == "" and 1 <= check(answer) <= MAX_CALLS
            num_whole, names = num_whole + 1, names | {name for name, _ in answer.calls}
    assert num_whole >= 5 and names == set(SCHEMAS)


@pytest.mark.parametrize("tool_format", [FORMATS[0], QWEN_CODER], ids=lambda tool_format: tool_format.name)
def test_added_tokens_are_text(tool_format: ToolFormat, qwen3: Vocabulary) -> None:
    """Qwen3's <tool_call> is a token of its own, but no special one."""
    assert qwen3.ours.encode("<tool_call>", add_special_tokens=False) == [151657]
    grammar = tool_format.grammar(TOOLS, required=True)
    assert qwen3.accepts(grammar, "\n\n" + call_text(tool_format))
    texts = [text for seed in range(6) if (text := qwen3.walk(grammar, seed)) is not None]
    assert len(texts) >= 2
    for text in texts:
        answer = read(tool_format, [text], TOOLS)
        assert answer.text == "" and check(answer)


def test_the_number_of_calls_is_kept(tool_format: ToolFormat, embedded: Vocabulary) -> None:
    one = tool_format.grammar(TOOLS, required=True, max_calls=1)
    answers = [read(tool_format, [text], TOOLS) for seed in range(6) if (text := embedded.walk(one, seed)) is not None]
    assert answers and all(check(answer) == 1 for answer in answers)
    many = tool_format.grammar(TOOLS, required=True)
    assert embedded.accepts(one, call_text(tool_format)) and embedded.accepts(many, call_text(tool_format))
    assert not embedded.accepts(many, "")


def test_a_named_function_is_the_only_one(tool_format: ToolFormat, embedded: Vocabulary) -> None:
    grammar = tool_format.grammar(TOOLS[:1], required=True)
    assert not embedded.accepts(grammar, call_text(tool_format))
    texts = [text for seed in range(6) if (text := embedded.walk(grammar, seed)) is not None]
    assert texts and all(
        {name for name, _ in read(tool_format, [text], TOOLS).calls} == {"get_weather"} for text in texts
    )


ANSWERS = [
    (StructuredOutput.json({"type": "object", "properties": {"name": {"type": "integer"}}}), '{"name": 3}', "{3}"),
    (StructuredOutput("regex", r"a/b\/[cd]+"), "a/b/cc", "a/b/"),
    (StructuredOutput.choice(['say "é"\n', "no"]), 'say "é"\n', "say"),
    (StructuredOutput("grammar", 'start: word "}"\nword: "x" | "y"'), "x}", "x"),
]


@pytest.mark.parametrize(("answer", "good", "bad"), ANSWERS, ids=[answer.kind for answer, _, _ in ANSWERS])
def test_calls_or_the_answer(
    tool_format: ToolFormat, answer: StructuredOutput, good: str, bad: str, embedded: Vocabulary
) -> None:
    grammar = tool_format.grammar(TOOLS, answer=answer)
    assert embedded.accepts(grammar, good)
    assert embedded.accepts(grammar, call_text(tool_format))
    assert not embedded.accepts(grammar, bad)
    assert not embedded.accepts(tool_format.grammar(TOOLS, answer=answer, required=True), good)


def test_calls_beside_an_answer_read_back(tool_format: ToolFormat, embedded: Vocabulary) -> None:
    """They begin as it says in `opening`."""
    grammar = tool_format.grammar(TOOLS, answer=StructuredOutput.choice(["no"]))
    num_calls = 0
    for seed in range(6):
        text = embedded.walk(grammar, seed, beginning=OPENINGS.get(tool_format.name, "<tool_call>"))
        if text is not None:
            parser, answer = CallsOrAnswer(tool_format.parser(TOOLS), tool_format.opening), Answer()
            for delta in [delta for char in text for delta in parser.push(char)] + parser.flush():
                answer.add(delta)
            assert answer.text == "" and answer.calls and not parser.broke_off
            num_calls += len(answer.calls)
    assert num_calls >= 3


def test_free_text_may_call(tool_format: ToolFormat, embedded: Vocabulary) -> None:
    """Any text; but once a call has begun, it is one of the tools, and valid where that is strict."""
    weather = {**WEATHER, "properties": {**WEATHER["properties"], "note": {"type": "string"}}}  # type: ignore[dict-item]
    grammar = tool_format.grammar(
        [replace(tool, strict=True) for tool in (Tool("get_weather", None, weather), *TOOLS[1:])]
    )
    opening = OPENINGS.get(tool_format.name, "<tool_call>")
    for text in ("", "Hello, <b>world</b>!\n", call_text(tool_format)):
        assert embedded.accepts(grammar, text)
    before = "" if tool_format.name == "llama3" else "Let me see.\n"
    assert not embedded.accepts(grammar, f"{before}{opening} nothing")
    if tool_format.name == "llama3":
        assert not embedded.accepts(grammar, "So: <|python_tag|>nothing")
    num_calls = 0
    for seed in range(8):
        written = embedded.walk(grammar, seed, beginning=before + opening)
        if written is not None:
            answer = read(tool_format, [written], TOOLS)
            assert answer.text.startswith(before.strip())
            num_calls += check(answer)
    assert num_calls >= 3


@pytest.mark.parametrize(
    "answer",
    [
        StructuredOutput("json", "{"),
        StructuredOutput("json", "[" * 20_000),
        StructuredOutput("json", "[" * 200 + "]" * 200),
        StructuredOutput("choice", '["a", 1]'),
    ],
    ids=["cut", "endless", "deep", "mixed"],
)
def test_a_malformed_answer_is_named(answer: StructuredOutput) -> None:
    with pytest.raises(InvalidParameterError, match=rf"structured_outputs\.{answer.kind}") as caught:
        HermesFormat().grammar(TOOLS, answer=answer)
    assert caught.value.param == "structured_outputs" and len(str(caught.value)) < 300


def test_special_tokens_are_written_as_such(embedded: Vocabulary) -> None:
    """Under stand-ins of the embedded model: its vocabulary has no tokens of these names."""
    ids: Mapping[str, int] = {
        tag: token_id
        for tag, name in (("[TOOL_CALLS]", "<|im_start|>"), ("[ARGS]", "<repo_name>"), ("<|python_tag|>", "<reponame>"))
        if (token_id := embedded.ours.special_id(name)) is not None
    }
    assert len(ids) == 3
    for tool_format in FORMATS[3:]:
        text = call_text(tool_format)
        for tag, token_id in ids.items():
            text = text.replace(tag, embedded.ours.decode([token_id], skip_special_tokens=False))
        grammar = tool_format.grammar(TOOLS, required=True, special_ids=ids)
        assert embedded.accepts(grammar, text)
        free = tool_format.grammar(TOOLS, special_ids=ids)
        assert embedded.accepts(free, text) and embedded.accepts(free, "Hello.")
        if tool_format.name != "llama3":
            assert not embedded.accepts(grammar, call_text(tool_format))
            # Spelled as text it would be read as a call: text must not have it.
            assert not embedded.accepts(free, "[TOOL_CALLS] nothing")


def test_white_space_in_arguments_is_bounded(embedded: Vocabulary) -> None:
    grammar = HermesFormat().grammar([Tool("now-1", None, {})], required=True)
    before, after = FRAMES[FORMATS[0]]
    for space in ("", " ", "\n    "):
        assert embedded.accepts(grammar, f'{before}{{{space}"a":{space}1}}{after}')
    assert not embedded.accepts(grammar, f'{before}{{"a":{" " * 60}1}}{after}')
    # A tool's own options do not widen it.
    wide = Tool("now-1", parameters={"x-guidance": {"whitespace_flexible": True, "lenient": True}})
    grammar = HermesFormat().grammar([wide], required=True)
    assert not embedded.accepts(grammar, f'{before}{{"a":{" " * 60}1}}{after}')


def test_escapes_in_arguments_are_json(embedded: Vocabulary) -> None:
    grammar = HermesFormat().grammar([Tool("now-1", None, {})], required=True)
    before, after = FRAMES[FORMATS[0]]
    assert embedded.accepts(grammar, before + r'{"a\u00e9": "\u00e9 \ud83d\ude00"}' + after)
    assert not embedded.accepts(grammar, before + r'{"a": "\ud83d"}' + after)


def test_descriptions_are_left_out_and_no_more(embedded: Vocabulary) -> None:
    """A property may be named so, and a value may look so."""
    properties = {"title": {"type": "string", "title": "T"}, "description": {"enum": [{"title": "T"}, 1]}}
    schema = {"description": "Long. " * 1000, "properties": properties, "additionalProperties": False}
    grammar = HermesFormat().grammar([Tool("now-1", "Words.", schema)], required=True)
    assert len(grammar) < 500
    before, after = FRAMES[FORMATS[0]]
    assert embedded.accepts(grammar, f'{before}{{"title": "a", "description": {{"title":"T"}}}}{after}')
    assert not embedded.accepts(grammar, f'{before}{{"title": 1}}{after}')


def test_the_compiler_takes_them(embedded: Vocabulary) -> None:
    """Within its limits, for as many tools as a request may have."""
    tokenizer = embedded.ours
    compiler = GrammarCompiler(tokenizer, num_token_ids=tokenizer.num_token_ids, eos_token_ids=frozenset({2}))
    properties = {f"key_{index}": {"type": "string", "description": "Words. " * 20} for index in range(6)}
    tools = [Tool(f"tool_{index}", None, {"type": "object", "properties": properties}) for index in range(MAX_TOOLS)]
    try:
        for tool_format in FORMATS:
            source = tool_format.grammar(tools, required=True)
            assert not compiler.compile(StructuredOutput("grammar", source)).start().complete
    finally:
        compiler.close()


def qwen_coder_values(schema: dict[str, Any], *, strict: bool = False) -> str:
    parameters = {"type": "object", "properties": {"key": schema}, "required": ["key"], "additionalProperties": False}
    return QWEN_CODER.grammar([Tool("f", None, parameters, strict)], required=True)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, 'any "text"\n\n', "with </parameter> in it"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "abc", "abcd"),
        ({"const": "x y"}, "x y", "x"),
        ({"allOf": [{"enum": ["red", "blue"]}], "description": "Colour."}, "red", "green"),
        ({"type": "number", "maximum": 5}, "4.5", "6"),
        ({"type": ["boolean", "null"]}, "null", "None"),
        ({}, '{"a": [1]}', "</parameter>"),
        ({"type": "array"}, '["</parameter>"]', '["</parameter>'),
    ],
)
def test_xml_values_keep_to_their_schema(schema: dict[str, Any], good: str, bad: str, embedded: Vocabulary) -> None:
    grammar = qwen_coder_values(schema)
    frame = "<tool_call>\n<function=f>\n<parameter=key>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert embedded.accepts(grammar, frame.replace("{}", good))
    assert not embedded.accepts(grammar, frame.replace("{}", bad))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [({"type": "string", "pattern": "a+"}, "pattern"), ({"anyOf": [{"type": "string"}, {"const": 3}]}, "anyOf")],
)
def test_a_strict_tool_is_refused_where_the_syntax_cannot_keep_it(schema: dict[str, Any], keyword: str) -> None:
    qwen_coder_values(schema)
    with pytest.raises(InvalidParameterError, match=f"parameters of 'f' cannot be used: .*'key'.*{keyword}"):
        qwen_coder_values(schema, strict=True)


@pytest.mark.parametrize("parameters", [{"properties": {"a>b": {}}}, {"properties": {"k": {"const": "</parameter>"}}}])
def test_what_xml_cannot_carry_is_refused(parameters: dict[str, Any]) -> None:
    """Bug: the error said neither which of the tools it is, nor where, as all others do."""
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("e", "f")]
    place = "tools[1].function.parameters"
    with pytest.raises(InvalidParameterError, match=re.escape(f"{place} of 'f' cannot be used: ")) as caught:
        QWEN_CODER.grammar(read_tools(tools)[1:], required=True)
    assert caught.value.param == place


def test_a_function_without_parameters_is_called_without_arguments(
    tool_format: ToolFormat, embedded: Vocabulary
) -> None:
    """Bug: where a call was demanded, its arguments were invented."""
    grammar = tool_format.grammar([Tool("now-1")], required=True)
    assert embedded.accepts(grammar, call_text(tool_format))
    before, after = FRAMES[tool_format]
    invented = "<parameter=a>\n1\n</parameter>\n</function>"
    text = before.replace("</function>", invented) if tool_format is QWEN_CODER else before + '{"a": 1}' + after
    assert not embedded.accepts(grammar, text)
    other = tool_format.grammar([Tool("now-1", None, {"properties": {"a": {}}})], required=True)
    assert embedded.accepts(other, text)


@pytest.mark.parametrize("own", [{}, {"$id": "https://a.example/b"}])
def test_references_by_name_and_by_place(own: dict[str, Any], embedded: Vocabulary) -> None:
    """Bug: within a whole call, "#name" became a reference to nowhere, and so did all of a schema with an "$id"."""
    properties = {"a": {"$ref": "#name"}, "b": {"$ref": "#/$defs/x"}}
    schema = {"properties": properties, "$defs": {"x": {"$anchor": "name", "type": "boolean"}}, **own}
    for value in (lark.call_object, lark.arguments):
        grammar = f"start: {value(Tool('f', None, schema))}"
        whole = '{"name": "f", "parameters": %s}' if value is lark.call_object else "%s"
        assert embedded.accepts(grammar, whole % '{"a": true, "b": false}')
        assert not embedded.accepts(grammar, whole % '{"a": 1}')
        assert not embedded.accepts(grammar, whole % '{"b": 1}')
