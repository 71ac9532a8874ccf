"""Tools for models whose chat template knows none, or whose syntax nobody here knows.

The functions and Hermes' syntax of calls are described in the system message; calls and results of earlier turns
become text. How well a model follows that is up to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from miniserve.text.parsers.base import Message, Tool
from miniserve.text.parsers.hermes import END, START, HermesFormat

_SYSTEM = ("system", "developer")


class GenericFormat(HermesFormat):
    """Hermes' syntax, explained to the model."""

    name = "generic"
    told_by_template = False

    def with_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages, with `tools` described in the system message and without fields that templates may not know."""
        result: list[Message] = []
        for is_result, run in groupby(messages, lambda message: message.get("role") == "tool"):
            turn = list(run)
            # Templates want the roles to alternate: the results of one turn are one message.
            result += [_results(turn)] if is_result else map(_as_text, turn)
        return _described(result, tools) if tools else result


def _described(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    description = _description(tools)
    if messages and messages[0].get("role") in _SYSTEM:
        content = messages[0].get("content")
        return [{**messages[0], "content": _joined(content, description)}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def _description(tools: Sequence[Tool]) -> str:
    functions = "\n".join(json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions (one JSON object each, with a JSON schema of its parameters):\n{functions}\n\n"
        "To call a function, answer with its name and its arguments as JSON, in this form:\n"
        f'{START}\n{{"name": "function_name", "arguments": {{"parameter": "value"}}}}\n{END}\n'
        "Write one such block for each call. The results come in the next message. "
        "If no function helps, answer in plain text."
    )


def _as_text(message: Message) -> Message:
    """A message of the history, its calls as text behind its content."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls or not all(_is_call(call) for call in calls):
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), "\n".join(_call_text(call) for call in calls), "\n")}


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{START}\n{{"name": {name}, "arguments": {arguments.strip() or "{}"}}}\n{END}'


def _results(messages: list[Message]) -> Message:
    parts: list[Any] = []
    for message in messages:
        start = "\n<tool_response>\n" if parts else "<tool_response>\n"
        parts += [start, *_parts(message.get("content")), "\n</tool_response>"]
    return {"role": "user", "content": _content(parts)}


# Content is a string or a list of parts, which the chat template checks: neither is looked into here


def _joined(content: Any, text: str, separator: str = "\n\n") -> Any:
    """`text` behind `content`."""
    return _content([*_parts(content), separator, text]) if content else text


def _parts(content: Any) -> list[Any]:
    if content is None or content == "":
        return []
    return list(content) if isinstance(content, Sequence) and not isinstance(content, str) else [content]


def _content(parts: Sequence[Any]) -> Any:
    """A string where all parts are: most templates know nothing else."""
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
