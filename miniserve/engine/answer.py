"""An answer in parts: the deltas of its reasoning, its text and its tool calls, and what they make when joined.

A stream hands on the deltas; a plain answer, over HTTP or offline, is the same deltas joined: the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miniserve.outputs import EngineOutput, FinishReason, ToolCall
from miniserve.text.parsers.base import ArgumentsDelta, CallStart, Delta, TextDelta, ToolParser


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning, all of which comes before the answer proper."""

    text: str


AnswerDelta = ReasoningDelta | Delta


@dataclass(frozen=True, slots=True)
class Answer:
    """All of it."""

    reasoning: str
    text: str
    tool_calls: tuple[ToolCall, ...]


def deltas_of(output: EngineOutput, parser: ToolParser | None) -> list[AnswerDelta]:
    """What an output adds. `parser` finds the tool calls, output after output; None where none are looked for."""
    deltas: list[AnswerDelta] = [ReasoningDelta(output.reasoning)] if output.reasoning else []
    if parser is None:
        if output.text:
            deltas.append(TextDelta(output.text))
        return deltas
    deltas += parser.push(output.text)
    if output.finish_reason is not None:
        deltas += parser.flush(is_cut=_is_cut(output))
    return deltas


def _is_cut(output: EngineOutput) -> bool:
    """Whether it ended by something else than the model's own end: a stop string may be in the middle of a call."""
    return output.finish_reason is not FinishReason.STOP or output.stop_reason is not None


def join_deltas(deltas: Iterable[AnswerDelta]) -> Answer:
    """The whole that the deltas make."""
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[tuple[str, list[str]]] = []  # name, arguments
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                reasoning.append(text)
            case TextDelta(text):
                texts.append(text)
            case CallStart(_, name):
                calls.append((name, []))
            case ArgumentsDelta(index, text):
                calls[index][1].append(text)
    tool_calls = tuple(ToolCall(name, "".join(arguments)) for name, arguments in calls)
    return Answer("".join(reasoning), "".join(texts), tool_calls)
