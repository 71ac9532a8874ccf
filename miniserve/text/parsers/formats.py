"""Which syntax of tool calls a model writes: the table of formats, each found by marks in the chat template.

A new format is a parser file and a row here. Templates that know no tools, and those whose syntax no row knows, get
the generic format.
"""

from __future__ import annotations

import re

from miniserve.text.parsers.generic import GenericFormat
from miniserve.text.parsers.hermes import HermesFormat
from miniserve.text.parsers.llama3 import Llama3Format
from miniserve.text.parsers.mistral import MistralArgsFormat, MistralFormat
from miniserve.text.parsers.qwen_coder import QwenCoderFormat
from miniserve.text.parsers.tool_format import ToolFormat

# Patterns that all have to be in the template's source. The first row that fits is taken: the special ones come first.
FORMATS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (QwenCoderFormat(), (r"<tool_call>", r"<function=", r"<parameter=")),
    (HermesFormat(), (r"<tool_call>", r"\"arguments\\?\"")),
    (MistralArgsFormat(), (r"\[TOOL_CALLS\]", r"\[ARGS\]")),
    (MistralFormat(), (r"\[TOOL_CALLS\]",)),
    (Llama3Format(), (r"\"name\\?\": ", r"\"parameters\\?\": ", r"<\|eot_id\|>|<\|python_tag\|>")),
)
_TOOLS = re.compile(r"\btools\b")


def find_format(template: str | None) -> ToolFormat:
    """The format of a model by the source of its chat template; None is a model without one."""
    if template is not None and _TOOLS.search(template):
        for tool_format, marks in FORMATS:
            if all(re.search(mark, template) for mark in marks):
                return tool_format
    return GenericFormat()
