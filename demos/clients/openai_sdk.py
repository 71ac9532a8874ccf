"""The official OpenAI client for Python: plain, streamed, asynchronous, through its helpers, and completions.

What to look at: each way of asking gives the same words, usage and finish reason.

    uv run --isolated --no-project --with openai demos/clients/openai_sdk.py [base-url] [model]
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
QUESTION = "What is the capital of France?"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 32,
}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}

Answer = tuple[str, tuple[int, int, int], str]  # text, token counts, finish reason


def main() -> None:
    """Ask in every way, and compare."""
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused")
    print(f"openai {openai.__version__} (Python), {BASE_URL}, models: {[model.id for model in client.models.list()]}")

    plain = show("chat", client.chat.completions.create(**CHAT))
    answers = [
        plain,
        show_stream("chat, stream", list(client.chat.completions.create(**STREAM))),
        show_helper("chat, .stream() helper", client),
        show("chat, raw response", raw(client)),
        *asyncio.run(asynchronous()),
    ]
    assert all(answer == plain for answer in answers), "the answers differ"

    completion = client.completions.create(**PROMPT)
    chunks = list(client.completions.create(**PROMPT, stream=True))
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    print(f"  completions, and streamed: {completion.choices[0].text!r}, in {len(chunks)} chunks {streamed!r}")
    assert streamed == completion.choices[0].text


async def asynchronous() -> list[Answer]:
    """Plain and streamed, with the asynchronous client."""
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="unused") as client:
        plain = show("chat, async", await client.chat.completions.create(**CHAT))
        stream = await client.chat.completions.create(**STREAM)
        return [plain, show_stream("chat, async stream", [chunk async for chunk in stream])]


def raw(client: openai.OpenAI) -> ChatCompletion:
    """The HTTP response first, then the object in it."""
    response = client.chat.completions.with_raw_response.create(**CHAT)
    print(f"  raw response: {response.status_code}, x-request-id {response.headers['x-request-id']}")
    answer: ChatCompletion = response.parse()
    return answer


def show_helper(way: str, client: openai.OpenAI) -> Answer:
    """The helper that gathers the chunks itself, and tells events."""
    with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        answer = show(way, stream.get_final_completion(), pieces=len(deltas))
    assert "".join(deltas) == answer[0]
    return answer


def show_stream(way: str, chunks: list[ChatCompletionChunk]) -> Answer:
    """Gather the chunks by hand."""
    *with_choices, last = chunks  # the last one carries the usage only
    pieces = [choice.delta.content for chunk in with_choices for choice in chunk.choices if choice.delta.content]
    return report(way, "".join(pieces), last.usage, with_choices[-1].choices[0].finish_reason, len(pieces))


def show(way: str, answer: ChatCompletion, pieces: int = 1) -> Answer:
    """Report a whole answer."""
    choice = answer.choices[0]
    return report(way, choice.message.content, answer.usage, choice.finish_reason, pieces)


def report(way: str, text: str | None, usage: CompletionUsage | None, finish: str | None, pieces: int) -> Answer:
    """Print what came back."""
    assert text and usage is not None and finish is not None, f"{way}: text, usage or finish reason is missing"
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    print(f"  {way}: {text!r}, pieces {pieces}, usage {counts}, finish {finish}")
    return (text, counts, finish)


if __name__ == "__main__":
    main()
