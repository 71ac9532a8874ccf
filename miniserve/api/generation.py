"""One API call on its way through the engine: its choices, their text, logprobs and usage, plain or as a stream.

What chat and completions share; how a chunk is spelled is the `Spelling`'s. A stream's chunks are written from strings,
the constant ones made once: a model or a dictionary per chunk would cost more than everything else on the way out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from miniserve.api.errors import describe_error, request_id_of
from miniserve.api.logprobs import Entry, LogprobsFormat
from miniserve.api.schemas.common import SamplingFields
from miniserve.api.sse import EventStream, Write, event, until_disconnect
from miniserve.core.request import Request
from miniserve.engine.async_engine import AsyncEngine, OutputStream
from miniserve.outputs import EngineOutput, FinishReason

# A long prefill shows a live stream after this long; a fault until then is still an ordinary HTTP error.
FIRST_OUTPUT_SECONDS = 1.0


@dataclass(slots=True)
class Echo:
    """The prompt as part of a choice's answer."""

    text: str
    token_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class Choice:
    """One answer: what has come of it, and what waits to be sent.

    Attributes:
        parent: the choice that computes the prompt for this one; None where this one does.
        entries: logprobs that no chunk has carried yet.
    """

    index: int
    request: Request
    parent: Choice | None
    logprobs: LogprobsFormat | None
    echo: Echo | None
    entries: list[Entry] = field(default_factory=list)
    prompt_entries: list[Entry] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    started: bool = False

    def take(self, output: EngineOutput) -> str:
        """Take in what came; returns the new text."""
        text = output.text
        self._take_prompt(output)
        if not self.started:
            self.started = True
            if self.echo is not None:
                text = self.echo.text + text
                self.entries += (self.parent or self).prompt_entries
        self.entries += [(entry.token_id, entry) for entry in output.logprobs]
        self.num_tokens = output.usage.completion_tokens
        self.num_cached_tokens = output.usage.cached_tokens
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        return text

    def _take_prompt(self, output: EngineOutput) -> None:
        if output.prompt_logprobs is not None and self.echo is not None:
            self.prompt_entries = list(zip(self.echo.token_ids, output.prompt_logprobs, strict=True))

    def take_logprobs(self) -> dict[str, Any] | None:
        """The logprobs that no chunk has carried yet; None where none were asked for."""
        if self.logprobs is None:
            return None
        entries, self.entries = self.entries, []
        return self.logprobs.format(entries)


class Call:
    """All choices of one call, in the order p0n0 p0n1 p1n0 p1n1."""

    def __init__(self, call_id: str, created: int, model: str, choices: Sequence[Choice]) -> None:
        self.id = call_id
        self.created = created
        self.model = model
        self.choices = choices
        self._by_id = {choice.request.request_id: choice for choice in choices}
        self._parents = [choice for choice in choices if choice.parent is None]
        self._prompt_tokens = sum(choice.request.num_prompt_tokens for choice in self._parents)

    @property
    def prompts(self) -> list[list[Request]]:
        """The requests as `AsyncEngine.submit` takes them."""
        prompts: list[list[Request]] = []
        for choice in self.choices:
            if choice.parent is None:
                prompts.append([])
            prompts[-1].append(choice.request)
        return prompts

    def choice(self, request_id: str) -> Choice:
        """The choice that a request computes."""
        return self._by_id[request_id]

    def usage(self) -> dict[str, Any]:
        """The counts so far: each prompt once, the output of all choices."""
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(parent.num_cached_tokens for parent in self._parents)},
        }


class Spelling(Protocol):
    """How an endpoint spells its answer."""

    object: str
    chunk_object: str

    def opening(self) -> str | None:
        """The JSON members of a choice's first chunk, before any text; None where there is no such chunk."""

    def text(self, text: str) -> str:
        """The JSON members of a chunk with more text, from the text as a JSON string."""

    def ending(self) -> str:
        """The JSON members of a choice's last chunk."""

    def whole(self, text: str) -> dict[str, Any]:
        """The members of a choice of a plain answer."""


async def respond(
    request: HttpRequest, engine: AsyncEngine, call: Call, spelling: Spelling, asked: SamplingFields
) -> Response:
    """The HTTP answer to a call that has been checked: a stream, or the whole once it is there.

    Raises:
        ClientDisconnect: the client went away before a plain answer was there.
        MiniserveError: as `answer`.
    """
    if not asked.stream:
        whole = await until_disconnect(request.receive, answer(engine, call, spelling))
        return Response(compact_json(whole), media_type="application/json")
    options = asked.stream_options
    writer = ChunkWriter(
        call,
        spelling,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
    request_id = request_id_of(request)
    return EventStream(
        partial(stream, engine, call, writer), lambda error: compact_json(describe_error(error, request_id).body())
    )


# Plain answers


async def answer(engine: AsyncEngine, call: Call, spelling: Spelling) -> dict[str, Any]:
    """The whole answer. Cancelling it aborts the call.

    Raises:
        InternalError, EngineUnavailableError, RequestError: the engine cannot finish it.
    """
    texts: list[list[str]] = [[] for _ in call.choices]
    async with engine.submit(call.prompts) as outputs:
        async for output in outputs:
            choice = call.choice(output.request_id)
            texts[choice.index].append(choice.take(output))
    return {
        "id": call.id,
        "object": spelling.object,
        "created": call.created,
        "model": call.model,
        "choices": [
            {
                "index": choice.index,
                **spelling.whole("".join(texts[choice.index])),
                "logprobs": choice.take_logprobs(),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in call.choices
        ],
        "usage": call.usage(),
    }


# Streams


class ChunkWriter:
    """Writes the events of one call's stream."""

    def __init__(self, call: Call, spelling: Spelling, *, include_usage: bool, continuous_usage: bool) -> None:
        head = {"id": call.id, "object": spelling.chunk_object, "created": call.created, "model": call.model}
        self._head = compact_json(head)[:-1] + ',"choices":['
        self._call = call
        self._spelling = spelling
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def opening(self) -> str:
        """The events before any text: the role of each choice."""
        members = self._spelling.opening()
        if members is None:
            return ""
        return "".join(self._chunk(choice, members, "null", "null") for choice in self._call.choices)

    def output(self, output: EngineOutput) -> str:
        """The events of what came; often one, sometimes none."""
        choice = self._call.choice(output.request_id)
        text = choice.take(output)
        ended = output.finish_reason is not None
        events = ""
        if text or (ended and choice.entries):
            logprobs = "null" if choice.logprobs is None else compact_json(choice.take_logprobs())
            # Escaped to ASCII: some clients take U+2028 and the like for the end of a line.
            events = self._chunk(choice, self._spelling.text(json.dumps(text)), logprobs, "null")
        if ended:
            reason = f'"{choice.finish_reason}","stop_reason":{json.dumps(choice.stop_reason)}'
            events += self._chunk(choice, self._spelling.ending(), "null", reason)
        return events

    def closing(self) -> str:
        """The events after all choices: the usage, if it was asked for."""
        return event(f'{self._head}],"usage":{compact_json(self._call.usage())}}}') if self._include_usage else ""

    def _chunk(self, choice: Choice, members: str, logprobs: str, finish_reason: str) -> str:
        return (
            f'data: {self._head}{{"index":{choice.index},{members},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason}}}]{self._usage()}}}\n\n'
        )

    def _usage(self) -> str:
        if self._continuous_usage:
            return f',"usage":{compact_json(self._call.usage())}'
        return ',"usage":null' if self._include_usage else ""


def compact_json(value: Any) -> str:
    """JSON in ASCII, without spaces."""
    return json.dumps(value, separators=(",", ":"))


async def stream(engine: AsyncEngine, call: Call, writer: ChunkWriter, write: Write) -> None:
    """Write the call's events. Cancelling it aborts the call. Raises as `answer`."""
    async with engine.submit(call.prompts) as outputs:
        await write(await _first_events(outputs, writer, write))
        async for output in outputs:
            # One write for all that a step brought.
            if events := writer.output(output) + "".join(map(writer.output, outputs.ready())):
                await write(events)
    if events := writer.closing():
        await write(events)


async def _first_events(outputs: OutputStream, writer: ChunkWriter, write: Write) -> str:
    """The opening and the first output in one; the opening alone goes out when that output takes long."""
    first = asyncio.ensure_future(anext(aiter(outputs)))
    try:
        await asyncio.wait([first], timeout=FIRST_OUTPUT_SECONDS)
        opening = writer.opening()
        if not first.done():
            await write(opening)
            opening = ""
        return opening + writer.output(await first)
    finally:
        first.cancel()
