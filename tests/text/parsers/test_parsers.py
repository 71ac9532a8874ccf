"""What each parser makes of an answer; and, for all of them, that it does not depend on how the text is cut."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.text.parsers.base import CallsOnly, CallsOrAnswer, Tool
from miniserve.text.parsers.generic import GenericFormat
from miniserve.text.parsers.hermes import HermesFormat
from miniserve.text.parsers.llama3 import Llama3Format
from miniserve.text.parsers.mistral import MistralArgsFormat, MistralFormat
from miniserve.text.parsers.qwen_coder import QwenCoderFormat
from miniserve.text.parsers.tool_format import ToolFormat
from tests.text.parsers.reading import Answer, read

TOOLS = (
    Tool(
        "f",
        parameters={
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "flag": {"type": "boolean"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "colour": {"$ref": "#/$defs/Colour"},
                "list": {"type": "array"},
            },
            "$defs": {"Colour": {"enum": ["red", "1"]}},
        },
    ),
    Tool("g"),
)
HERMES, QWEN, LLAMA, MISTRAL = HermesFormat(), QwenCoderFormat(), Llama3Format(), MistralFormat()
FORMATS: tuple[ToolFormat, ...] = (HERMES, QWEN, LLAMA, MISTRAL)
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ("f", '{"a": 1}')

CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    # Text without a call is what the model wrote, to the last blank.
    (HERMES, " \nplain <tool> text \n ", " \nplain <tool> text \n ", []),
    (HERMES, "cut in a tag <tool_ca", "cut in a tag <tool_ca", []),
    # The end of the answer cuts the end tag of a call: it leaked into the text. Any other beginning of a tag is text.
    (HERMES, ONE[:-1], "", [F]),
    (HERMES, ONE[: -len("/tool_call>")], "", [F]),
    (HERMES, f"{ONE}\n<tool_c", "<tool_c", [F]),
    (QWEN, "<tool_call>\n<function=g>\n</function>\n</tool_c", "", [("g", "{}")]),
    # White space around calls is not shown.
    (HERMES, ONE, "", [F]),
    (HERMES, f"\n\n{ONE}\n", "", [F]),
    (HERMES, f"before \n{ONE} \n{ONE}\n after\n", "before \nafter\n", [F, F]),
    # Bug: texts around calls were glued together.
    (HERMES, f"Let me look. {ONE}Done?", "Let me look.\nDone?", [F]),
    (HERMES, f"Look.\n\n{ONE} \n\n\n{ONE}\nThen \n {ONE} done. ", "Look.\n\nThen \n done. ", [F, F, F]),
    (HERMES, f"Look.{ONE} \n<too", "Look.\n<too", [F]),
    (HERMES, f"{ONE} between {ONE}", "between", [F, F]),
    # Arguments as the model wrote them: tags, quotes, braces in strings, nesting, other scripts.
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":{"a":"</tool_call>}\\"{\\\\","b":{"c":[[],{}]} , "d":"é😀\\u00e9"}}'
        "</tool_call>",
        "",
        [("f", '{"a":"</tool_call>}\\"{\\\\","b":{"c":[[],{}]} , "d":"é😀\\u00e9"}')],
    ),
    # The name may come last, and under an escape; other keys that models add are skipped.
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "\\u0066"}</tool_call>', "", [F]),
    (HERMES, '<tool_call>{"id": 7, "type": "function", "name": "f", "parameters": {"a": 1}}</tool_call>', "", [F]),
    # No arguments, and arguments in a string.
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"arguments": " null ", "name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, r'<tool_call>{"name": "f", "arguments": " {\"a\": 1} \n"}</tool_call>', "", [F]),
    (
        HERMES,
        r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\\"\ud83d\ude00\\u00e9\"}"}</tool_call>x',
        "x",
        [("f", r'{"a": "\"😀\u00e9"}')],
    ),
    # Cut off: what came.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    # Bug: where only its name had come, it was a call with nothing as arguments.
    (HERMES, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": ', '<tool_call>{"name": "f", "arguments": ', []),
    (HERMES, 'a <tool_call>{"name": "f', 'a <tool_call>{"name": "f', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [F]),
    # Malformed before the arguments begin: text, and read on.
    (HERMES, f"a <tool_call>nothing</tool_call> {ONE}", "a <tool_call>nothing</tool_call>", [F]),
    (HERMES, f'<tool_call>{{"x": 1}}</tool_call>{ONE}', '<tool_call>{"x": 1}</tool_call>', [F]),
    (HERMES, f"<tool_call>{ONE}", "<tool_call>", [F]),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    (HERMES, '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    (HERMES, '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    (HERMES, r'<tool_call>{"name": "\ud83d"}', r'<tool_call>{"name": "\ud83d"}', []),
    (
        HERMES,
        f'<tool_call>{{"name": "f", "arguments": [1]}}</tool_call>{ONE}',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [F],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "name": "g"}</tool_call>',
        '<tool_call>{"name": "f", "name": "g"}</tool_call>',
        [],
    ),
    # Bug: what a call has no use for, behind its name, took the arguments away.
    (HERMES, '<tool_call>{"name": "f", "x": {"arguments": 1}, "arguments": {"a": 1}}</tool_call>ok', "ok", [F]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "x": "y", "name": "f", "z": [null]}</tool_call>ok', "ok", [F]),
    (
        HERMES,
        '<tool_call>{"name": "f", "x": oops, "arguments": {}}',
        '<tool_call>{"name": "f", "x": oops, "arguments": {}}',
        [],
    ),
    # Malformed later: the arguments end there, the rest of the call is dropped.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "g"}</tool_call>ok', "ok", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>ok', "ok", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>ok', "ok", [("f", '{"a": ')]),
    (HERMES, f'<tool_call>{{"name": "g", "arguments": {{"a": "\n{ONE}', "", [("g", r'{"a": "\n<tool_call>\n{"')]),
    # Bug: control characters that the model had not escaped ended the arguments.
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty", "b\r": ["\x00"]}}</tool_call>ok',
        "ok",
        [("f", r'{"a": "x\n\ty", "b\r": ["\u0000"]}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\":\n\\"x\ny\\\\nz\\n\\"}"}</tool_call>',
        "",
        [("f", '{"a":\n"x\\ny\\nz\\n"}')],
    ),
    (HERMES, '<tool_call>{"name": "f\n", "arguments": {}}', '<tool_call>{"name": "f\n", "arguments": {}}', []),
    (MISTRAL, '[TOOL_CALLS]f{"a": "x\ny"}', "", [("f", r'{"a": "x\ny"}')]),
    (LLAMA, '{"name": "f", "parameters": {"a": "x\ny"}}', "", [("f", r'{"a": "x\ny"}')]),
    (
        QWEN,
        '<function=f><parameter=list>["x\ny"]</parameter><parameter=other>{"a": "\t"}</parameter></function>',
        "",
        [("f", r'{"list": ["x\ny"], "other": {"a": "\t"}}')],
    ),
    (
        QWEN,
        '<function=f><parameter=list>["x\ny"] and more</parameter></function>',
        "",
        [("f", r'{"list": "[\"x\ny\"] and more"}')],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>ok', "ok", [("f", "{}")]),
    (HERMES, r'<tool_call>{"name":"f","arguments":"{\"a\": \"\ud83d and so on and so on\"}"}', "", [("f", '{"a": "')]),
    # A missing end tag is not missed.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}} and text', "and text", [F]),
    # A function that nobody offered is for the client to refuse.
    (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call>', "", [("h", "{}")]),
    (
        QWEN,
        'so\n<tool_call>\n<function=f>\n<parameter=text>\nit\'s "1"\n\n</parameter>\n'
        "<parameter=count>\n12\n</parameter>\n"
        "<parameter=flag>\nTrue\n</parameter>\n<parameter=list>\n[1, {}]\n</parameter>\n</function>\n</tool_call>\n",
        "so",
        [("f", r'{"text": "it' + "'" + r's \"1\"\n", "count": 12, "flag": true, "list": [1, {}]}')],
    ),
    # By the schema's type: numbers stay strings where a string is meant; what is no JSON is a string.
    (
        QWEN,
        "<tool_call><function=f><parameter=colour>1</parameter><parameter=maybe>null</parameter>"
        "<parameter=count>many\n</parameter><parameter=other>1</parameter></function></tool_call>",
        "",
        [("f", '{"colour": "1", "maybe": null, "count": "many", "other": 1}')],
    ),
    (QWEN, "<function=g>\n</function> text", "text", [("g", "{}")]),
    (QWEN, "<function=unknown>\n</function>", "<function=unknown>\n</function>", []),
    (QWEN, "<tool_call>\n<function=f>\n<parameter=text>\nab", "", [("f", '{"text": "ab')]),
    # Bug: half of the tag behind a value became part of the value, where the answer was cut off in it.
    (QWEN, "<tool_call>\n<function=f>\n<parameter=text>\nab\n</para", "", [("f", '{"text": "ab')]),
    (QWEN, "<tool_call>\n<function=f>\n<parameter=text>\nab\n", "", [("f", '{"text": "ab')]),
    (QWEN, "<tool_call>\n<function=f>\n<parameter=text>\na\nb <", "", [("f", r'{"text": "a\nb ')]),
    (
        QWEN,
        "<tool_call>\n<function=f>\n<parameter=count>\n12",
        "<tool_call>\n<function=f>\n<parameter=count>\n12",
        [],
    ),
    # Bug: a tag that is only spoken of was a call, and took all that followed with it.
    (
        QWEN,
        "the <function=f> tag is used to call it, then more",
        "the <function=f> tag is used to call it, then more",
        [],
    ),
    (
        QWEN,
        "Write <function=f>\nor <function=g>: <tool_call><function=g></function></tool_call>",
        "Write <function=f>\nor <function=g>:",
        [("g", "{}")],
    ),
    # JSON with an end tag in a string: it cut the value there.
    (
        QWEN,
        '<tool_call>\n<function=f>\n<parameter=list>\n["</parameter>", "a\\n</function>"]\n</parameter>\n'
        "<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>ok",
        "ok",
        [("f", '{"list": ["</parameter>", "a\\n</function>"], "text": "x"}')],
    ),
    (
        QWEN,
        '<function=f><parameter=list>[1] and ["</parameter><parameter=count>{"a": }</parameter></function>ok',
        "ok",
        [("f", '{"list": "[1] and [\\"", "count": "{\\"a\\": }"}')],
    ),
    (QWEN, '<function=f><parameter=list>["</parameter>', '<function=f><parameter=list>["</parameter>', []),
    (
        QWEN,
        '<function=f><parameter=text>a</parameter><parameter=list>["</parameter>\n</function></tool_call>ok',
        "ok",
        [("f", '{"text": "a"')],
    ),
    (QWEN, "<tool_call>\n<func", "<tool_call>\n<func", []),
    (
        QWEN,
        "<tool_call><function=g>\nwhat?</function></tool_call>ok",
        "<tool_call><function=g>\nwhat?</function></tool_call>ok",
        [],
    ),
    (QWEN, "<tool_call><function=g><parameter=x>1</parameter>\nwhat?</tool_call>ok", "ok", [("g", '{"x": 1')]),
    (QWEN, "<tool_call><function=g><parameter=x>NaN</parameter></function></tool_call>", "", [("g", '{"x": "NaN"}')]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (LLAMA, '\n<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}} ; {"name": "g", "parameters": {}};\n', ";\n", [F, ("g", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": "{}"}', "", [F, ("g", "{}")]),
    (LLAMA, 'Well <|python_tag|>{"name": "f", "parameters": {"a": 1}} done', "Well\ndone", [F]),
    (LLAMA, '{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', []),
    (LLAMA, ' {"answer": {"name": "f"}}', ' {"answer": {"name": "f"}}', []),
    # Bug: an answer in JSON that has a name, too, was a call.
    (LLAMA, '{"name": "f", "score": 3}', '{"name": "f", "score": 3}', []),
    (LLAMA, '{"name": "f"}', "", [("f", "{}")]),
    (LLAMA, 'text {"name": "f", "parameters": {}}', 'text {"name": "f", "parameters": {}}', []),
    (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (LLAMA, '{"name": "f", "parameters": {"a": ?', "", [("f", '{"a": ')]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"arguments": {}, "name": "g"}]',
        "",
        [F, ("g", "{}")],
    ),
    (MISTRAL, 'so [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]\nbye', "so\nbye", [F]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', "", [F, ("g", "{}")]),
    (MISTRAL, '[TOOL_CALLS] f {"a": 1}', "", [F]),
    (MISTRAL, "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, 3]', ", 3]", [F]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {?}}][TOOL_CALLS]g{}', "", [("f", "{"), ("g", "{}")]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": ', "", [("f", '{"a": ')]),
    (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
]


@pytest.mark.parametrize(("tool_format", "text", "shown", "calls"), CASES)
def test_an_answer_is_read(tool_format: ToolFormat, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert read(tool_format, [text], TOOLS) == Answer(shown, calls)


@pytest.mark.parametrize(("tool_format", "text", "shown", "calls"), CASES)
def test_every_cut_reads_the_same(tool_format: ToolFormat, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    """Character by character, and cut at any two places."""
    expected = Answer(shown, calls)
    assert read(tool_format, list(text), TOOLS) == expected
    step = max(1, len(text) // 8)  # pairs of cuts: all for a short text
    for first in range(len(text)):
        for second in range(first, len(text), step):
            assert read(tool_format, [text[:first], text[first:second], text[second:]], TOOLS) == expected


@pytest.mark.parametrize(
    ("tool_format", "text", "broke_off"),
    [
        (HERMES, ONE, False),
        (HERMES, f"{ONE}<tool_call>", False),
        (HERMES, ONE.replace("}}", "}"), False),
        (HERMES, ONE.replace("1}}", "X}}"), True),
        (HERMES, ONE.replace("1}}", "X}}") + ONE, True),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": X}"}', True),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f", oops', False),
        (QWEN, "<function=f><parameter=text>a</parameter></function>", False),
        (QWEN, "<function=f><parameter=text>a</parameter>", True),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}', False),
        (LLAMA, '{"name": "f", "parameters": {"a": 1', True),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "', True),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}", False),
    ],
)
def test_a_call_that_broke_off_is_told(tool_format: ToolFormat, text: str, broke_off: bool) -> None:
    """Bug: arguments that are no JSON came out as those of a finished call."""
    assert read(tool_format, [text], TOOLS).broke_off is broke_off
    assert read(tool_format, list(text), TOOLS).broke_off is broke_off
    beside, only = CallsOrAnswer(tool_format.parser(TOOLS), re.compile("")), CallsOnly(tool_format.parser(TOOLS))
    for parser in (beside, only):
        assert parser.push(text) and not parser.flush()
        assert parser.broke_off is broke_off


def test_a_call_that_is_dropped_breaks_nothing_off() -> None:
    answer = read(HERMES, [ONE + ONE.replace("1}}", "X}}")], TOOLS, max_calls=1)
    assert (answer.calls, answer.broke_off) == ([F], False)


PARTS = [
    *("<tool_call>", "</tool_call>", "\n", " ", "x", '"', "\\", "{", "}", "[", "]", ",", ":", ";", "1", "null", "é"),
    *('{"name": "f", ', '"arguments": ', '{"a": "b"}', '"{\\"a\\": 1}"', '\\"', "\\ud83d", "\\ude00", "[ARGS]"),
    *("<function=f>", "<parameter=text>", "<parameter=count>", "</parameter>", "</function>", "[TOOL_CALLS]"),
    *('{"name": "g", "parameters": {}}', "<|python_tag|>", "g", "[CALL_ID]", '"name"', ONE),
]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), parts=st.lists(st.sampled_from(PARTS), max_size=14))
@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda tool_format: tool_format.name)
def test_any_cut_of_any_text_reads_the_same(tool_format: ToolFormat, data: st.DataObject, parts: list[str]) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = read(tool_format, [text], TOOLS)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(tool_format, pieces, TOOLS) == whole
    assert read(tool_format, list(text), TOOLS) == whole
    if not whole.calls:
        assert whole.text == text
    if not whole.broke_off:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, ONE + ONE + ' end <tool_call>{"arguments": {}, "name": "g"}</tool_call>'),
        (QWEN, "<function=f><parameter=a>1</parameter></function>" * 2 + " end <function=g></function>"),
        (LLAMA, '<|python_tag|>{"name":"f","parameters":{"a": 1}}' * 2 + ' end <|python_tag|>{"name":"g"}'),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}' * 2 + " end [TOOL_CALLS]g{}"),
    ],
)
def test_calls_beyond_the_limit_are_dropped(tool_format: ToolFormat, text: str) -> None:
    assert [name for name, _ in read(tool_format, [text], TOOLS).calls] == ["f", "f", "g"]
    limited = read(tool_format, [text], TOOLS, max_calls=1)
    assert (limited.text, [name for name, _ in limited.calls]) == ("end", ["f"])
    assert json.loads(limited.calls[0][1]) == {"a": 1}


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, ONE + "\n" + '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'),
        (QWEN, "<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>\n" * 2),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'),
    ],
)
def test_an_answer_of_calls_only_has_no_text_wherever_it_is_cut(tool_format: ToolFormat, text: str) -> None:
    """Bug: a call that was cut before its name was known was shown as text, tag and all."""
    assert len(read(tool_format, [text], TOOLS).calls) == 2
    for end in range(len(text)):
        expected = read(tool_format, [text[:end]], TOOLS).calls
        for pushes in ([text[:end]], list(text[:end])):
            parser, answer = CallsOnly(tool_format.parser(TOOLS)), Answer()
            for delta in [delta for piece in pushes for delta in parser.push(piece)] + parser.flush():
                answer.add(delta)
            assert answer == Answer("", expected)


def read_either(tool_format: ToolFormat, pushes: list[str], *, is_cut: bool) -> Answer:
    parser, answer = CallsOrAnswer(tool_format.parser(TOOLS), tool_format.opening), Answer()
    for delta in [delta for piece in pushes for delta in parser.push(piece)] + parser.flush(is_cut=is_cut):
        answer.add(delta)
    return answer


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, "\n\n" + ONE + "\n" + ONE),
        (QWEN, "<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>\n" * 2),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]'),
    ],
)
def test_calls_where_an_answer_could_have_been_have_no_text_wherever_they_are_cut(
    tool_format: ToolFormat, text: str
) -> None:
    """Bug: beside a response_format, a call that was cut before it had started was shown as text, tag and all."""
    for end in range(len(text) + 1):
        expected = read(tool_format, [text[:end]], TOOLS).calls
        for pushes in ([text[:end]], list(text[:end])):
            answer = read_either(tool_format, pushes, is_cut=True)
            assert (answer.text, answer.calls) == ("", expected)


MISTRAL_ARGS = MistralArgsFormat()
# The format, an answer that is held to a structure, and how much of it may be the beginning of a call with a tag.
ANSWERS: list[tuple[ToolFormat, str, int]] = [
    *(
        (tool_format, '{"a": "<tool_call>\\n [TOOL_CALLS] <|python_tag|>"}', 0)
        for tool_format in (HERMES, QWEN, MISTRAL)
    ),
    (LLAMA, '{"a": "<|python_tag|>{"name": "f", "parameters": {}}"}', 0),
    (HERMES, "<b>", 1),
    (LLAMA, "<b>", 1),
    (MISTRAL, '["x"]', 1),
    (HERMES, "\n <tool_call> is a tag ", 14),
    # Bug: texts in an answer that look like calls were taken out of it.
    (QWEN, '"<tool_call><function=f></function></tool_call>"', 0),
    (QWEN, '"use <function=f></function> to call it"', 0),
    (QWEN, "<function=f></function>", 22),
    (QWEN, "  use <function=f>\n</function> to call it", 2),
    (HERMES, f"I say {ONE}", 0),
    (HERMES, f"<tool_call>I say {ONE}", 11),
    (MISTRAL_ARGS, '{"a": "[TOOL_CALLS]f[ARGS]{}"}', 0),
    (LLAMA, '{"name": "f", "score": 3}', 0),
    (LLAMA, '{"name": "f"}', 0),
    (LLAMA, '{"name": "f", "parameters": null}', 0),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {}}', 0),
    (LLAMA, '{"parameters": {"a": 1}, "name": "f"}', 0),
    (LLAMA, '{"name": "h", "parameters": {}}', 0),
]


@pytest.mark.parametrize(("tool_format", "text", "num_held"), ANSWERS)
def test_an_answer_where_calls_could_have_been_is_shown(tool_format: ToolFormat, text: str, num_held: int) -> None:
    """All of it as it is; but where it was cut off, not what could have been the beginning of a tag."""
    for end in range(len(text) + 1):
        for pushes in ([text[:end]], list(text[:end])):
            assert read_either(tool_format, pushes, is_cut=False) == Answer(text[:end])
            assert read_either(tool_format, pushes, is_cut=True) == Answer("" if end <= num_held else text[:end])


@pytest.mark.parametrize("space", ["", " ", "\n    "])
def test_a_call_without_its_tag_begins_as_the_grammar_writes_it(space: str) -> None:
    text = f'{{{space}"name":{space}"f",{space}"parameters":{space}{{"a": 1}}{space}}}; '
    text += text[:-2]
    for pushes in ([text], list(text)):
        assert read_either(LLAMA, pushes, is_cut=False) == Answer("", [F, F])


def test_what_is_certain_is_shown_at_once() -> None:
    """The name once arguments begin, which come as they grow; text up to white space and to what may become a tag."""
    parser = HERMES.parser(TOOLS)
    pushes = ["so <", "b> ", '<tool_call>{"name": "f"', ', "arguments": {"a": "b', 'c"}', "}</tool_call> ", "x "]
    shown = [[repr(delta) for delta in parser.push(text)] for text in pushes] + [[repr(d) for d in parser.flush()]]
    assert shown == [
        ["TextDelta(text='so')"],
        ["TextDelta(text=' <b>')"],
        [],
        ["CallStart(index=0, name='f')", 'ArgumentsDelta(index=0, text=\'{"a": "b\')'],
        ["ArgumentsDelta(index=0, text='c\"}')"],
        [],
        ["TextDelta(text='\\nx')"],
        ["TextDelta(text=' ')"],
    ]


def test_a_string_parameter_streams_escaped() -> None:
    parser = QWEN.parser(TOOLS)
    parser.push("<tool_call><function=f><parameter=text>\n")
    assert [repr(delta) for delta in parser.push('say "hi"\n')] == [
        "ArgumentsDelta(index=0, text='say \\\\\"hi\\\\\"')"
    ]
    assert [repr(delta) for delta in parser.push("there")] == ["ArgumentsDelta(index=0, text='\\\\nthere')"]


@pytest.mark.parametrize(
    ("tool_format", "beginning", "piece"),
    [
        (HERMES, "", "word <"),
        (HERMES, "", "\n "),
        (HERMES, "", "<tool_call>"),
        (HERMES, "", '<tool_call>{"name": "f", "arguments": {}}'),
        (HERMES, '<tool_call>{"name": "f", "arguments": ', '{"a":'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "', " "),
        (HERMES, '<tool_call>{"arguments": {"a": "', "x"),
        (HERMES, '<tool_call>{"name": "f", "arguments": 7', "<tool_cal"),
        (QWEN, "<tool_call><function=f><parameter=text>", "</parameter"),
        (QWEN, "<tool_call><function=f><parameter=count>", "1"),
        (LLAMA, "", '<|python_tag|>{"name": "x"}'),
        (MISTRAL, "", "[TOOL_CALLS]["),
    ],
)
def test_the_work_is_linear_in_the_text(tool_format: ToolFormat, beginning: str, piece: str) -> None:
    """Counted in calls of functions, not in time."""
    small, large = (_work(tool_format, beginning, piece * count) for count in (100, 200))
    assert large < 2.2 * small


def _work(tool_format: ToolFormat, beginning: str, text: str) -> int:
    parser = tool_format.parser(TOOLS)
    calls: Counter[str] = Counter()

    def count(_: FrameType, event: str, argument: Any) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        for char in beginning + text:
            parser.push(char)
        parser.flush()
    finally:
        sys.setprofile(None)
    return calls.total()


def test_long_answers_in_one_push_and_in_many_are_read_whole() -> None:
    arguments = json.dumps({"text": "x" * 50_000, "deep": [[[]]]})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>' + " word" * 5_000
    assert (
        read(HERMES, [text], TOOLS)
        == read(HERMES, list(text), TOOLS)
        == Answer("word" + " word" * 4_999, [("f", arguments)])
    )


def test_ids_are_fresh_and_of_the_format() -> None:
    assert len({HERMES.new_call_id() for _ in range(100)}) == 100
    assert HERMES.new_call_id().startswith("call_")
    for tool_format in (MISTRAL, MistralArgsFormat()):
        call_id = tool_format.new_call_id()
        assert len(call_id) == 9 and call_id.isalnum()


def test_the_generic_format_reads_hermes() -> None:
    assert read(GenericFormat(), [ONE], TOOLS) == Answer("", [F])
