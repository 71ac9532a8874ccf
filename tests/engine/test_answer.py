"""What outputs add to an answer, and what the deltas make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miniserve.engine.answer import Answer, AnswerDelta, ReasoningDelta, deltas_of, join_deltas
from miniserve.outputs import EngineOutput, FinishReason, ToolCall, Usage
from miniserve.text.parsers.base import ArgumentsDelta, CallsOrAnswer, CallStart, TextDelta
from miniserve.text.parsers.hermes import HermesFormat

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def output(text: str, reasoning: str = "", finish_reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput("r", (), text, Usage(1, 1, 0), finish_reason, reasoning=reasoning)


def test_without_a_parser_text_is_text() -> None:
    assert deltas_of(output(CALL), None) == [TextDelta(CALL)]
    assert deltas_of(output("", finish_reason=FinishReason.STOP), None) == []
    assert deltas_of(output("b", "a"), None) == [ReasoningDelta("a"), TextDelta("b")]


def test_what_the_parser_holds_back_comes_with_the_end() -> None:
    parser = HermesFormat().parser([])
    assert deltas_of(output("a <tool"), parser) == [TextDelta("a")]
    last = deltas_of(output("", finish_reason=FinishReason.LENGTH), parser)
    assert join_deltas(last).text == " <tool"


@pytest.mark.parametrize(
    ("reason", "stop_reason", "text"),
    [
        (FinishReason.STOP, None, "<"),
        (FinishReason.STOP, "t", ""),
        (FinishReason.STOP, 7, ""),
        (FinishReason.LENGTH, None, ""),
        (FinishReason.ABORT, None, ""),
        (FinishReason.ERROR, None, ""),
    ],
)
def test_the_parser_is_told_of_a_cut(reason: FinishReason, stop_reason: int | str | None, text: str) -> None:
    parser = CallsOrAnswer(HermesFormat().parser([]), HermesFormat.opening)
    last = replace(output("<", finish_reason=reason), stop_reason=stop_reason)
    assert join_deltas(deltas_of(last, parser)).text == text


@pytest.mark.parametrize(("end", "broke_off"), [(-16, True), (-len("}\n</tool_call>"), False), (len(CALL), False)])
def test_a_stop_string_within_arguments_breaks_the_call_off(end: int, broke_off: bool) -> None:
    """Bug: such an answer ended as one whose calls are whole."""
    parser = HermesFormat().parser([])
    last = replace(output(CALL[:end], finish_reason=FinishReason.STOP), stop_reason="stop")
    [call] = join_deltas(deltas_of(last, parser)).tool_calls
    assert call.name == "f" and parser.broke_off is broke_off


def test_joining() -> None:
    parser = HermesFormat().parser([])
    outputs = [output("", "why"), output("so: " + CALL[:20]), output(CALL[20:], finish_reason=FinishReason.STOP)]
    deltas = [delta for part in outputs for delta in deltas_of(part, parser)]
    assert join_deltas(deltas) == Answer("why", "so:", (ToolCall("f", '{"a": 1}'),))


def test_arguments_belong_to_their_call() -> None:
    deltas: list[AnswerDelta] = [
        CallStart(0, "f"),
        ArgumentsDelta(0, "{"),
        CallStart(1, "g"),
        ArgumentsDelta(1, "{}"),
        ArgumentsDelta(0, "}"),
    ]
    assert join_deltas(deltas).tool_calls == (ToolCall("f", "{}"), ToolCall("g", "{}"))
    assert join_deltas([]) == Answer("", "", ())
