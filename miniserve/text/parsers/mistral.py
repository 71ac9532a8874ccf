"""Mistral's syntaxes, after [TOOL_CALLS]: a JSON list of calls, and in newer models a name and its arguments.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}

One parser reads both; which of them a grammar writes, the model's template says.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence

from miniserve.text.parsers import lark
from miniserve.text.parsers.base import Tool, ToolParser
from miniserve.text.parsers.call_parser import CallParser, Outcome, drop
from miniserve.text.parsers.reader import Malformed, Wait
from miniserve.text.parsers.tool_format import ToolFormat

TAG, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # what the templates insist on


class MistralFormat(ToolFormat):
    """A JSON list of calls."""

    name = "mistral"
    opening = lark.opening(TAG)
    shown_tokens = (TAG, ARGS, CALL_ID)

    def parser(self, tools: Sequence[Tool], *, max_calls: int | None = None) -> ToolParser:
        """As `ToolFormat.parser`."""
        return _MistralParser(tools, max_calls)

    def call_rules(self, tools: Sequence[Tool], max_calls: int | None, special_ids: Mapping[str, int]) -> lark.Rules:
        """As `ToolFormat.call_rules`."""
        tag = lark.special(TAG, special_ids)
        content = lark.repeated("call", lark.literal(", "), max_calls)
        rules = [f'content: "[" {content} "]"', lark.either("call", [_call(tool) for tool in tools])]
        free = lark.text_around(TAG, "content", 1, special_ids)
        return lark.Rules(f"{tag} content", free, rules)

    def new_call_id(self) -> str:
        """Nine letters or digits."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))


class MistralArgsFormat(MistralFormat):
    """A name and its arguments, with a tag before each."""

    name = "mistral_args"

    def call_rules(self, tools: Sequence[Tool], max_calls: int | None, special_ids: Mapping[str, int]) -> lark.Rules:
        """As `ToolFormat.call_rules`."""
        tag, args = lark.special(TAG, special_ids), lark.special(ARGS, special_ids)
        calls = [f"{lark.literal(tool.name)} {args} {lark.arguments(tool)}" for tool in tools]
        free = lark.text_around(TAG, "call", max_calls, special_ids)
        repeated = lark.repeated(f"{tag} call", "", max_calls)
        return lark.Rules(repeated, free, [lark.either("call", calls)])


def _call(tool: Tool) -> str:
    before = f'{{"name": "{tool.name}", "arguments": '
    return f"{lark.literal(before)} {lark.arguments(tool)} {lark.literal('}')}"


class _MistralParser(CallParser):
    _listed = False  # the calls that are being read are in a list

    def _read(self) -> Wait[None]:
        reader = self._reader
        tag = yield from reader.take_until((TAG,), self._show)
        while tag:
            self._listed = False
            outcome = yield from self._call(tag, self._first())
            while outcome is Outcome.WHOLE and self._listed:
                yield from reader.take_space()
                if (yield from reader.take_if(",", "]")) != ",":
                    break
                outcome = yield from self._call(",", self._object())
            sink = drop if outcome is Outcome.BROKEN else self._show
            tag = yield from reader.take_until((TAG,), sink)

    def _first(self) -> Wait[None]:
        """What follows the tag: a list and the first call in it, or a call with its name in front."""
        reader = self._reader
        yield from reader.take_space()
        if (yield from reader.take_if("[")):
            self._listed = True
            yield from self._object()
            return
        name = yield from reader.take_run(_NAME)
        yield from reader.take_space()
        mark = yield from reader.take_if(ARGS, CALL_ID)
        if mark == CALL_ID:
            yield from reader.take_run(_NAME)
            yield from reader.expect(ARGS)
        yield from reader.take_space()
        if (yield from reader.peek()) != "{":
            raise Malformed
        self._name(name)
        yield from self._arguments()
