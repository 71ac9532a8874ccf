"""One API call on its way through the engine: its choices, their text, logprobs and usage, plain or as a stream.

What chat and completions share; how a chunk is spelled is the `Spelling`'s. A stream's chunks are written from strings,
the constant ones made once: a model or a dictionary per chunk would cost more than everything else on the way out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from miniserve.api.choice import Choice
from miniserve.api.errors import describe_error, request_id_of
from miniserve.api.logprobs import TokenBytes, format_prompt_logprobs
from miniserve.api.schemas.common import SamplingFields
from miniserve.api.sse import EventStream, Write, event, until_disconnect
from miniserve.core.request import Request
from miniserve.engine.answer import Answer, AnswerDelta, join_deltas
from miniserve.engine.async_engine import AsyncEngine
from miniserve.engine.output_stream import OutputStream
from miniserve.outputs import EngineOutput
from miniserve.text.parsers.base import TextDelta

# A long prefill shows a live stream after this long; a fault until then is still an ordinary HTTP error.
FIRST_OUTPUT_SECONDS = 1.0


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
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in self.choices)
            },
        }


class Spelling(Protocol):
    """How an endpoint spells its answer.

    Attributes:
        prompt_in_choice: whether ids and logprobs of the prompt stand in each choice, or once beside them.
    """

    object: str
    chunk_object: str
    prompt_in_choice: bool

    def opening(self) -> str | None:
        """The JSON members of a choice's first chunk, before any text; None where there is no such chunk."""

    def delta(self, delta: AnswerDelta, call_ids: Sequence[str]) -> str:
        """The JSON members of a chunk that adds to the answer, in ASCII. `call_ids`: of the tool calls so far."""

    def ending(self) -> str:
        """The JSON members of a choice's last chunk."""

    def whole(self, answer: Answer, call_ids: Sequence[str]) -> dict[str, Any]:
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
        shown_prompt = PromptFields(
            asked.return_token_ids or False, asked.prompt_logprobs, engine.parts.input_processor.tokenizer
        )
        whole = await until_disconnect(request.receive, answer(engine, call, spelling, shown_prompt))
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


@dataclass(frozen=True, slots=True)
class PromptFields:
    """What a plain answer shows of the prompt. `num_top`: candidates of its logprobs; None for no logprobs."""

    shows_ids: bool
    num_top: int | None
    tokenizer: TokenBytes

    def of(self, choice: Choice) -> dict[str, Any]:
        """The members for the prompt of a choice."""
        members: dict[str, Any] = {}
        if self.shows_ids:
            members["prompt_token_ids"] = choice.prompt_token_ids
        if self.num_top is not None:
            members["prompt_logprobs"] = format_prompt_logprobs(choice.prompt_entries, self.num_top, self.tokenizer)
        return members


async def answer(engine: AsyncEngine, call: Call, spelling: Spelling, prompt: PromptFields) -> dict[str, Any]:
    """The whole answer. Cancelling it aborts the call.

    Raises:
        InternalError, EngineUnavailableError, RequestError: the engine cannot finish it.
    """
    deltas: list[list[AnswerDelta]] = [[] for _ in call.choices]
    async with engine.submit(call.prompts) as outputs:
        async for output in outputs:
            choice = call.choice(output.request_id)
            deltas[choice.index] += choice.take(output)
    return {
        "id": call.id,
        "object": spelling.object,
        "created": call.created,
        "model": call.model,
        "choices": [
            {
                "index": choice.index,
                **spelling.whole(join_deltas(deltas[choice.index]), choice.call_ids),
                "logprobs": choice.take_logprobs(),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **({"token_ids": choice.take_token_ids()} if choice.returns_token_ids else {}),
                **(prompt.of(choice) if spelling.prompt_in_choice else {}),
            }
            for choice in call.choices
        ],
        "usage": call.usage(),
        **({} if spelling.prompt_in_choice else prompt.of(call.choices[0])),
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
        self._without_prompt = {choice.index for choice in call.choices if choice.returns_token_ids}

    def opening(self) -> str:
        """The events before any text: the role of each choice."""
        members = self._spelling.opening()
        if members is None:
            return ""
        first, *others = self._call.choices
        events = self._chunk(first, members, beside=self._prompt_ids(first))
        return events + "".join(self._chunk(choice, members) for choice in others)

    def output(self, output: EngineOutput) -> str:
        """The events of what came; often one, sometimes none."""
        choice = self._call.choice(output.request_id)
        deltas = choice.take(output)
        ended = output.finish_reason is not None
        if not deltas and ended and (choice.entries or choice.token_ids):
            deltas.append(TextDelta(""))  # for what no chunk has carried yet
        events = ""
        for delta in deltas:
            members = self._spelling.delta(delta, choice.call_ids)
            logprobs = compact_json(choice.take_logprobs()) if choice.entries else "null"
            token_ids = f',"token_ids":{compact_json(choice.take_token_ids())}' if choice.token_ids else ""
            events += self._chunk(choice, members, logprobs=logprobs, more=token_ids)
        if ended:
            stop_reason = f',"stop_reason":{json.dumps(choice.stop_reason)}'
            reason = f'"{choice.finish_reason}"'
            events += self._chunk(choice, self._spelling.ending(), finish_reason=reason, more=stop_reason)
        return events

    def closing(self) -> str:
        """The events after all choices: the usage, if it was asked for."""
        return event(f'{self._head}],"usage":{compact_json(self._call.usage())}}}') if self._include_usage else ""

    def _chunk(
        self,
        choice: Choice,
        members: str,
        *,
        logprobs: str = "null",
        finish_reason: str = "null",
        more: str = "",
        beside: str = "",
    ) -> str:
        """One event. `more` members of the choice, and such that stand `beside` it."""
        if self._spelling.prompt_in_choice and self._without_prompt:
            more += self._prompt_ids(choice)
        return (
            f'data: {self._head}{{"index":{choice.index},{members},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason}{more}}}]{beside}{self._usage()}}}\n\n'
        )

    def _prompt_ids(self, choice: Choice) -> str:
        """The prompt of a choice, once, where it is wanted."""
        if choice.index not in self._without_prompt:
            return ""
        self._without_prompt.remove(choice.index)
        return f',"prompt_token_ids":{compact_json(choice.prompt_token_ids)}'

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
