"""Hermes' syntax, which Qwen 2.5 and 3 and many others write too: a JSON object between two tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Several calls follow each other, each with tags of its own. An end tag that is missing is not missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miniserve.text.parsers import lark
from miniserve.text.parsers.base import Tool, ToolParser
from miniserve.text.parsers.call_parser import CallParser, Outcome, drop
from miniserve.text.parsers.reader import Wait
from miniserve.text.parsers.tool_format import ToolFormat

START, END = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """A JSON object between <tool_call> and </tool_call>."""

    name = "hermes"
    opening = lark.opening(START)

    def parser(self, tools: Sequence[Tool], *, max_calls: int | None = None) -> ToolParser:
        """As `ToolFormat.parser`."""
        return _HermesParser(tools, max_calls)

    def call_rules(self, tools: Sequence[Tool], max_calls: int | None, special_ids: Mapping[str, int]) -> lark.Rules:
        """As `ToolFormat.call_rules`."""
        rules = [lark.either("call", [_call(tool) for tool in tools])]
        return tagged_calls(rules, max_calls)


def tagged_calls(rules: Sequence[str], max_calls: int | None) -> lark.Rules:
    """Calls between the tags; the rule `call` is what follows a start tag."""
    calls = lark.repeated(f"{lark.literal(START)} call", lark.literal("\n"), max_calls)
    return lark.Rules(calls, lark.text_around(START, "call", max_calls), rules)


def _call(tool: Tool) -> str:
    before = f'\n{{"name": "{tool.name}", "arguments": '
    return f"{lark.literal(before)} {lark.arguments(tool)} {lark.literal(f'}}{chr(10)}{END}')}"


class _HermesParser(CallParser):
    def _read(self) -> Wait[None]:
        reader = self._reader
        tag = yield from reader.take_until((START,), self._show)
        while tag:
            outcome = yield from self._call(tag, self._object())
            if outcome is Outcome.BROKEN:
                tag = yield from reader.take_until((END, START), drop)
                if tag == START:
                    continue
            elif outcome is Outcome.WHOLE:
                yield from reader.take_space()
                yield from reader.take_end(END)
            tag = yield from reader.take_until((START,), self._show)
