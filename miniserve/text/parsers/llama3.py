"""Llama 3's syntax: an answer that is a JSON object, or several with semicolons between them.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

The object comes first in the answer, or after <|python_tag|> anywhere in it. An answer may as well be JSON that calls
nothing: an object is a call only if it names a function that the model was told of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miniserve.text.parsers import lark
from miniserve.text.parsers.base import Tool, ToolParser
from miniserve.text.parsers.call_parser import CallParser, Outcome, drop
from miniserve.text.parsers.reader import Wait
from miniserve.text.parsers.tool_format import ToolFormat

TAG = "<|python_tag|>"
# Text that does not begin as a call does, or calls.
_FREE = f"free: calls | TEXT\nTEXT: /([ \\t\\r\\n]*[^{{ \\t\\r\\n](?s:.*))?/ & {lark.without(TAG)}"


class Llama3Format(ToolFormat):
    """Bare JSON objects."""

    name = "llama3"
    opening = lark.opening(TAG, r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"parameters"\s*:\s*\{')
    shown_tokens = (TAG,)

    def parser(self, tools: Sequence[Tool], *, max_calls: int | None = None) -> ToolParser:
        """As `ToolFormat.parser`."""
        return _Llama3Parser(tools, max_calls, known_only=True)

    def call_rules(self, tools: Sequence[Tool], max_calls: int | None, special_ids: Mapping[str, int]) -> lark.Rules:
        """As `ToolFormat.call_rules`."""
        calls = f"{lark.special(TAG, special_ids)}? {lark.repeated('call', lark.literal('; '), max_calls)}"
        rules = [lark.either("call", [lark.call_object(tool) for tool in tools])]
        return lark.Rules(calls, _FREE, rules)


class _Llama3Parser(CallParser):
    def _read(self) -> Wait[None]:
        reader = self._reader
        self._show((yield from reader.take_space()))
        tag = yield from reader.take_if(TAG)
        if tag or (yield from reader.peek()) == "{":
            yield from self._calls(tag)
        while tag := (yield from reader.take_until((TAG,), self._show)):
            yield from self._calls(tag)

    def _calls(self, beginning: str) -> Wait[None]:
        """One call after `beginning`, and those that follow it."""
        reader = self._reader
        while True:
            outcome = yield from self._call(beginning, self._object())
            if outcome is Outcome.BROKEN:
                beginning = yield from reader.take_until((TAG,), drop)
                if beginning:
                    continue
            if outcome is not Outcome.WHOLE:
                return
            beginning = yield from self._separator()
            if beginning != TAG and (yield from reader.peek()) != "{":
                self._show(beginning)
                return

    def _separator(self) -> Wait[str]:
        """What stands between two calls."""
        reader = self._reader
        space = yield from reader.take_space()
        mark = yield from reader.take_if(";", TAG)
        if mark != ";":
            return mark or space
        return mark + (yield from reader.take_space())
