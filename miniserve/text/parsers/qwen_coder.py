"""Qwen3-Coder's syntax: tags for the function and for each parameter, values as plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values become JSON by the type that the parameter has in the tool's schema: a string is escaped as it comes; all else
waits for its end, and is a string if it is no JSON of such a type. What may be the beginning of the tag behind a value
is no part of it, also where the answer is cut off there. The model leaves the outer tags away at times: a function that
is known is called all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from miniserve.text.parsers import lark, xml_values
from miniserve.text.parsers.base import Tool, ToolParser
from miniserve.text.parsers.call_parser import CallParser, Outcome, drop
from miniserve.text.parsers.hermes import END, START, tagged_calls
from miniserve.text.parsers.reader import Malformed, Wait
from miniserve.text.parsers.tool_format import ToolFormat

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_FREE = 64  # parameters of a call where the schema names none
_TAG_NAME = re.compile(r"[^<>\n]*")
_KEY = re.compile(r"[^>\n]*")


class QwenCoderFormat(ToolFormat):
    """Tags for function and parameters."""

    name = "qwen_coder"
    opening = lark.opening(START)

    def parser(self, tools: Sequence[Tool], *, max_calls: int | None = None) -> ToolParser:
        """As `ToolFormat.parser`."""
        return _QwenCoderParser(tools, max_calls)

    def call_rules(self, tools: Sequence[Tool], max_calls: int | None, special_ids: Mapping[str, int]) -> lark.Rules:
        """As `ToolFormat.call_rules`."""
        rules: list[str] = []
        calls = [_call(tool, index, rules) for index, tool in enumerate(tools)]
        rules.append(lark.either("call", calls))
        return tagged_calls(rules, max_calls)


def _call(tool: Tool, index: int, rules: list[str]) -> str:
    parts = [lark.literal(f"\n{FUNCTION}{tool.name}>\n")]
    for number, parameter in enumerate(xml_values.parameters(tool)):
        rule = f"value_{index}_{number}"
        rules += xml_values.value_rules(rule, parameter, PARAMETER_END)
        text = f"({lark.literal(f'{PARAMETER}{parameter.key}>{chr(10)}')} {rule})"
        parts.append(text if parameter.required else f"{text}?")
    if xml_values.takes_any(tool):
        rule = f"value_{index}"
        rules += xml_values.value_rules(rule, xml_values.any_parameter(tool), PARAMETER_END)
        parts.append(f"({lark.literal(PARAMETER)} /[^<>\\n]+/ {lark.literal('>' + chr(10))} {rule}){{0,{MAX_FREE}}}")
    parts.append(lark.literal(f"{FUNCTION_END}\n{END}"))
    return " ".join(parts)


class _QwenCoderParser(CallParser):
    def _read(self) -> Wait[None]:
        reader = self._reader
        tag = yield from reader.take_until((START, FUNCTION), self._show)
        while tag:
            outcome = yield from self._call(tag, self._function(tag))
            if outcome is Outcome.BROKEN:
                tag = yield from reader.take_until((END, START), drop)
                if tag == START:
                    continue
            elif outcome is Outcome.WHOLE:
                yield from reader.take_space()
                yield from reader.take_end(END)
            tag = yield from reader.take_until((START, FUNCTION), self._show)

    def _function(self, tag: str) -> Wait[None]:
        reader = self._reader
        if tag == START:
            yield from reader.take_space()
            yield from reader.expect(FUNCTION)
        name = yield from reader.take_run(_TAG_NAME)
        yield from reader.expect(">")
        if tag == FUNCTION and name not in self._tools:
            raise Malformed
        self._name(name)
        tool, opening = self._tools.get(name, Tool(name)), "{"
        while True:
            yield from reader.take_space()
            if (yield from reader.expect(PARAMETER, FUNCTION_END)) == FUNCTION_END:
                self._argue("{}" if opening == "{" else "}")
                self._argued = True
                return
            key = yield from reader.take_run(_KEY)
            yield from reader.expect(">")
            yield from self._value(f"{opening}{_quoted(key)}: ", xml_values.types_of(tool, key))
            opening = ", "

    def _value(self, beginning: str, types: frozenset[str] | None) -> Wait[None]:
        """One parameter, without the line breaks that the model puts around its value."""
        yield from self._reader.take_if("\n")
        ends = ("\n" + PARAMETER_END, PARAMETER_END)
        if types == xml_values.STRING:
            self._argue(beginning + '"')
            end = yield from self._reader.take_before(ends, lambda text: self._argue(_quoted(text)[1:-1]))
            value = '"'
        else:
            parts: list[str] = []
            if types is not None and "string" not in types and (yield from self._reader.peek()) in ("{", "["):
                yield from self._json(parts)
            end = yield from self._reader.take_until(ends, parts.append)
            value = beginning + xml_values.as_json("".join(parts), types)
        if not end:
            raise Malformed
        self._argue(value)

    def _json(self, parts: list[str]) -> Wait[None]:
        """A value whose strings may have the end tag in them. What turns out to be no JSON goes on as text."""
        try:
            yield from self._reader.take_json(parts.append, strict=True)
        except Malformed:
            if PARAMETER_END in "".join(parts):  # as text it would have ended there
                raise


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
