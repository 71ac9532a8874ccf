"""One syntax of tool calls: how it is read, how a model is made to write it, how the model is told of its tools.

What is the same for every syntax stands here: how calls, text and another answer may be mixed. Does not know tokens.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from miniserve.sampling_params import StructuredOutput
from miniserve.text.parsers import lark
from miniserve.text.parsers.base import Message, Tool, ToolParser

NO_IDS: Mapping[str, int] = MappingProxyType({})


class ToolFormat(ABC):
    """One syntax of tool calls. Stateless.

    Attributes:
        name: what the start-up lines call it.
        opening: what an answer of calls begins with, as the grammar writes it, up to where a call is certain.
        shown_tokens: special tokens whose text the parser has to see.
        told_by_template: the chat template tells the model of the tools; otherwise `with_tools` does.
    """

    name: ClassVar[str]
    opening: ClassVar[re.Pattern[str]]
    shown_tokens: ClassVar[tuple[str, ...]] = ()
    told_by_template: ClassVar[bool] = True

    @abstractmethod
    def parser(self, tools: Sequence[Tool], *, max_calls: int | None = None) -> ToolParser:
        """A parser for one answer of a model that was told of `tools`; calls beyond `max_calls` are dropped."""

    @abstractmethod
    def call_rules(self, tools: Sequence[Tool], max_calls: int | None, special_ids: Mapping[str, int]) -> lark.Rules:
        """How calls of `tools` are written. Arguments and errors as of `grammar`."""

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        max_calls: int | None = None,
        answer: StructuredOutput | None = None,
        required: bool = False,
        special_ids: Mapping[str, int] = NO_IDS,
    ) -> str:
        """What the model has to write, in llguidance's Lark: calls of `tools` that the parser reads back as valid.

        Where calls are not required, arguments of a tool that is not strict may be any object.

        Args:
            max_calls: None is as many as `lark.MAX_CALLS`.
            answer: what an answer without calls looks like; None for free text, which may have calls in it.
            required: nothing but calls, at least one.
            special_ids: ids of those `shown_tokens` that are special tokens; the others are text like any.

        Raises:
            InvalidParameterError: this syntax cannot carry a tool's parameters.
        """
        if not required:
            tools = [tool if tool.strict else replace(tool, parameters={}) for tool in tools]
        return lark.grammar(self.call_rules(tools, max_calls, special_ids), answer=answer, required=required)

    def with_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages that the chat template gets. Those given, where it knows tools itself."""
        return list(messages)

    def new_call_id(self) -> str:
        """A fresh id for a call, as the model's template takes it back."""
        return f"call_{secrets.token_hex(12)}"
