"""What `generate` prints: the answers to stdout, in the order of the prompts; reasoning and numbers to stderr.

Does not know flags, nor where the requests come from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from miniserve.core.request import Request
from miniserve.engine.answer import AnswerDelta, ReasoningDelta, deltas_of, join_deltas
from miniserve.outputs import EngineOutput
from miniserve.text.parsers.base import TextDelta, ToolParser

if TYPE_CHECKING:
    from miniserve.engine.llm import LLM
    from miniserve.engine.options import ChatOptions


def print_json(llm: LLM, requests: Sequence[Request], chat: ChatOptions | None) -> None:
    """One JSON object a request, when all have ended."""
    for output in llm.run(requests, chat):
        print(json.dumps(asdict(output), ensure_ascii=False))


def print_texts(llm: LLM, requests: Sequence[Request], chat: ChatOptions | None, *, stream: bool) -> list[EngineOutput]:
    """Print the answers in the order of the prompts; returns the last output of each request.

    All run as one batch. The first unfinished answer streams; the others are held until it is their turn.
    """
    parsers = {request.request_id: None if chat is None else llm.tool_parser(chat, request) for request in requests}
    writer = _OrderedWriter(parsers, stream=stream)
    last = []
    for output in llm.stream(requests):
        writer.add(output)
        if output.finish_reason is not None:
            last.append(output)
    return last


class _OrderedWriter:
    """Writes interleaved answers one after the other."""

    def __init__(self, parsers: Mapping[str, ToolParser | None], *, stream: bool) -> None:
        self._parsers = parsers
        self._waiting = list(parsers)
        self._deltas: dict[str, list[AnswerDelta]] = {request_id: [] for request_id in parsers}
        self._calls: dict[str, list[AnswerDelta]] = {request_id: [] for request_id in parsers}
        self._finished: set[str] = set()
        self._stream = stream
        self._numbered = len(parsers) > 1
        self._started = 0
        self._last: TextIO = sys.stdout  # where the current answer was written to
        self._wrote_text = False  # of the current answer

    def add(self, output: EngineOutput) -> None:
        """Take an output, and write what is next."""
        request_id = output.request_id
        for delta in deltas_of(output, self._parsers[request_id]):
            is_text = isinstance(delta, (TextDelta, ReasoningDelta))
            (self._deltas if is_text else self._calls)[request_id].append(delta)
        if output.finish_reason is not None:
            self._finished.add(request_id)
        while self._waiting:
            current = self._waiting[0]
            done = current in self._finished
            if done or self._stream:
                self._write(current)
            if not done:
                break
            self._end(current)
            self._waiting.pop(0)

    def _write(self, request_id: str) -> None:
        number = len(self._parsers) - len(self._waiting) + 1
        if self._numbered and self._started < number:
            self._started = number
            print(f"--- {number}")
        answer = join_deltas(self._deltas[request_id])
        self._deltas[request_id] = []
        self._write_to(sys.stderr, answer.reasoning)
        self._write_to(sys.stdout, answer.text)

    def _write_to(self, file: TextIO, text: str) -> None:
        if not text:
            return
        if file is not self._last and self._last is sys.stderr:
            print(file=self._last)  # the reasoning is over
        self._last = file
        self._wrote_text |= file is sys.stdout
        print(text, end="", file=file, flush=True)

    def _end(self, request_id: str) -> None:
        """Calls come when they are complete, each on a line, as a program would write it."""
        if self._last is sys.stderr:
            print(file=sys.stderr)
        calls = [f"{call.name}({call.arguments})" for call in join_deltas(self._calls[request_id]).tool_calls]
        has_line = self._wrote_text or not calls
        print("\n".join(["", *calls] if has_line else calls), flush=True)
        self._last, self._wrote_text = sys.stdout, False


def print_statistics(outputs: Sequence[EngineOutput]) -> None:
    """Time to first token, speed and cache use of the batch, to stderr."""
    timings = [output.timing for output in outputs if output.timing is not None]
    firsts = [timing.first_token for timing in timings if timing.first_token is not None]
    if not firsts:
        return
    generated = sum(output.usage.completion_tokens for output in outputs)
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs)
    total = max(timing.total for timing in timings)
    print(
        f"[miniserve] {prompt} prompt tokens ({cached} cached), {generated} generated in {total:.2f} s: "
        f"{generated / total:.1f} tokens/s, first token after {min(firsts):.3f} s",
        file=sys.stderr,
    )
