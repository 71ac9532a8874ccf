"""Deltas put together again, as a client does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from miniserve.text.parsers.base import ArgumentsDelta, CallStart, Delta, TextDelta, Tool
from miniserve.text.parsers.tool_format import ToolFormat


@dataclass
class Answer:
    """Text, and (name, arguments) of each call; whether one of these broke off."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    broke_off: bool = field(default=False, compare=False)

    def add(self, delta: Delta) -> None:
        match delta:
            case TextDelta(text):
                assert text
                self.text += text
            case CallStart(index, name):
                assert index == len(self.calls)
                self.calls.append((name, ""))
            case ArgumentsDelta(index, text):
                assert text and index == len(self.calls) - 1
                name, arguments = self.calls[index]
                self.calls[index] = (name, arguments + text)


def read(tool_format: ToolFormat, pushes: Iterable[str], tools: Sequence[Tool], max_calls: int | None = None) -> Answer:
    parser = tool_format.parser(tools, max_calls=max_calls)
    answer = Answer()
    for text in pushes:
        for delta in parser.push(text):
            answer.add(delta)
    for delta in parser.flush():
        answer.add(delta)
    answer.broke_off = parser.broke_off
    return answer
