"""How the tests talk to a server, and what they hold to be an answer.

`fold` checks every rule that a stream's objects must obey while it joins them, so no test can forget one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from openai import AsyncOpenAI, OpenAI

from tests.contract.process import ROOT, ServerProcess

WAIT_SECONDS = 60.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Server:
    """A running server and clients for it.

    Attributes:
        http: a plain client.
        openai: the official client.
    """

    def __init__(self, process: ServerProcess, model: str, api_key: str = "not-checked") -> None:
        self.process = process
        self.url = process.url
        self.model = model
        self.api_key = api_key
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_SECONDS)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self.openai.close()

    def async_openai(self) -> AsyncOpenAI:
        """A client for one event loop."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, timeout=WAIT_SECONDS)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """A call with a JSON body of `fields`."""
        return self.http.post(path, json=fields)

    def post_raw(self, path: str, body: bytes | str, content_type: str = "application/json") -> httpx.Response:
        """A call with a body as it stands."""
        return self.http.post(path, content=body, headers={"Content-Type": content_type})

    def chat(self, content: str, **fields: Any) -> Answer:
        """A plain chat completion of one user message."""
        return plain(self.post(CHAT, messages=[{"role": "user", "content": content}], **fields))

    def chat_stream(self, content: str, **fields: Any) -> Answer:
        """The same, streamed."""
        messages = [{"role": "user", "content": content}]
        return fold(self.post(CHAT, messages=messages, **streamed(fields)).raise_for_status())

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        """A plain completion."""
        return plain(self.post(COMPLETIONS, prompt=prompt, **fields))

    def complete_stream(self, prompt: Any, **fields: Any) -> Answer:
        """The same, streamed."""
        return fold(self.post(COMPLETIONS, prompt=prompt, **streamed(fields)).raise_for_status())

    def tokens(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        answer = self.post("/tokenize", prompt=text, add_special_tokens=False)
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids

    def stats(self) -> dict[str, Any]:
        """/stats."""
        numbers: dict[str, Any] = self.http.get("/stats").raise_for_status().json()
        return numbers

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll /stats until `condition` holds."""
        give_up = time.monotonic() + WAIT_SECONDS
        while not condition(numbers := self.stats()):
            assert time.monotonic() < give_up, f"waited {WAIT_SECONDS} s; the last numbers are {numbers}"
            time.sleep(0.02)
        return numbers

    def wait_until_idle(self) -> None:
        """Until no request is left and none of the KV cache is held."""
        self.wait_for(lambda numbers: not any(numbers[name] for name in ("running", "waiting", "kv_blocks_used")))


def streamed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of the same call as a stream with its usage."""
    return {**fields, "stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Answer:
    """What a call gave, in the order of its choices, however it came.

    Attributes:
        logprobs: per choice the entries of all chunks: chat's `content`, or the four lists of a completion as rows.
        chunks: of a stream, its events as JSON; of a plain answer, nothing.
        pieces: of a stream, the text of each chunk, per choice.
        reasonings, tool_calls: of a chat, per choice; calls as (name, arguments).
    """

    id: str
    model: str
    texts: list[str]
    finish_reasons: list[str | None]
    stop_reasons: list[Any]
    logprobs: list[list[Any] | None]
    usage: dict[str, Any]
    chunks: list[dict[str, Any]] = field(default_factory=list)
    pieces: list[list[str]] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    tool_calls: list[list[tuple[str, str]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the only choice."""
        [text] = self.texts
        return text

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the only choice."""
        [reason] = self.finish_reasons
        return reason

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated, all choices together."""
        number: int = self.usage["completion_tokens"]
        return number

    @property
    def tokens(self) -> list[str]:
        """The tokens of the only choice; the call must have asked for logprobs."""
        [entries] = self.logprobs
        assert entries is not None
        return [entry["token"] for entry in entries]

    def content(self) -> dict[str, Any]:
        """What must not depend on how the answer came. Cached tokens may: the second call finds the first one's."""
        return {
            "texts": self.texts,
            "reasonings": self.reasonings,
            "tool_calls": self.tool_calls,
            "finish_reasons": self.finish_reasons,
            "logprobs": self.logprobs,
            "usage": {name: value for name, value in self.usage.items() if name != "prompt_tokens_details"},
        }


def plain(response: httpx.Response) -> Answer:
    """A plain answer, checked."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    choices = body["choices"]
    is_chat = body["object"] == "chat.completion"
    assert is_chat or body["object"] == "text_completion"
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    assert isinstance(body["created"], int) and body["id"]
    check_usage(body["usage"])
    messages = [choice["message"] for choice in choices] if is_chat else []
    for message in messages:
        assert message["role"] == "assistant"
        assert message.get("reasoning") == message.get("reasoning_content") != ""
        assert message["content"] is not None or message["tool_calls"]
    return Answer(
        id=body["id"],
        model=body["model"],
        texts=[(choice["message"]["content"] or "") if is_chat else choice["text"] for choice in choices],
        reasonings=[message.get("reasoning", "") for message in messages],
        tool_calls=[_calls(message.get("tool_calls", [])) for message in messages],
        finish_reasons=[choice["finish_reason"] for choice in choices],
        stop_reasons=[choice["stop_reason"] for choice in choices],
        logprobs=[None if choice["logprobs"] is None else entries_of(choice["logprobs"]) for choice in choices],
        usage=body["usage"],
    )


def _calls(tool_calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The calls of a message as (name, arguments), once their form is checked."""
    ids = [call["id"] for call in tool_calls]
    assert all(ids) and len(set(ids)) == len(ids)
    for call in tool_calls:
        assert set(call) == {"id", "type", "function"} and call["type"] == "function"
        assert set(call["function"]) == {"name", "arguments"}
    return [(call["function"]["name"], call["function"]["arguments"]) for call in tool_calls]


def check_usage(usage: dict[str, Any]) -> None:
    """The counts must agree with each other."""
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert 0 <= usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]


def entries_of(logprobs: dict[str, Any]) -> list[Any]:
    """One dictionary a token."""
    if "content" in logprobs:
        return list(logprobs["content"])
    names = {
        "tokens": "token",
        "token_logprobs": "logprob",
        "top_logprobs": "top_logprobs",
        "text_offset": "text_offset",
    }
    assert set(logprobs) == set(names)
    rows = zip(*(logprobs[name] for name in names), strict=True)
    return [dict(zip(names.values(), row, strict=True)) for row in rows]


def events(text: str) -> list[str]:
    """The data of each event. Nothing else may be in a stream: no comments, no ids, no event names."""
    assert text.endswith("\n\n")
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text[:2000]
    return [block.removeprefix("data: ") for block in blocks]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event but the last, which must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *datas, last = events(response.text)
    assert last == "[DONE]" and "[DONE]" not in datas
    return [json.loads(data) for data in datas]


def fold(response: httpx.Response, *, include_usage: bool = True) -> Answer:
    """Join a stream, and check each of its objects."""
    chunks = chunks_of(response)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    is_chat = chunks[0]["object"] == "chat.completion.chunk"
    assert is_chat or chunks[0]["object"] == "text_completion"
    usage: dict[str, Any] = {}
    if include_usage:
        assert chunks[-1]["choices"] == []
        usage = chunks[-1]["usage"]
        check_usage(usage)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert not any(chunk.get("usage") for chunk in chunks)
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all(len(chunk["choices"]) == 1 for chunk in (chunks[:-1] if include_usage else chunks))
    indices = sorted({part["index"] for part in parts})
    assert indices == list(range(len(indices)))
    own = [[part for part in parts if part["index"] == index] for index in indices]
    for choice_parts in own:
        _check_choice(choice_parts, is_chat=is_chat)
    pieces = [[_text(part, is_chat=is_chat) for part in choice_parts] for choice_parts in own]
    return Answer(
        id=chunks[0]["id"],
        model=chunks[0]["model"],
        texts=["".join(choice_pieces) for choice_pieces in pieces],
        finish_reasons=[choice_parts[-1]["finish_reason"] for choice_parts in own],
        stop_reasons=[choice_parts[-1].get("stop_reason") for choice_parts in own],
        logprobs=[_joined_logprobs(choice_parts) for choice_parts in own],
        usage=usage,
        chunks=chunks,
        pieces=pieces,
        reasonings=[_joined_reasoning(choice_parts) for choice_parts in own] if is_chat else [],
        tool_calls=[_joined_calls(choice_parts) for choice_parts in own] if is_chat else [],
    )


def _check_choice(parts: Sequence[dict[str, Any]], *, is_chat: bool) -> None:
    """The finish reason once, at the end, on a chunk with nothing else; the role once, at the start."""
    assert all("finish_reason" in part for part in parts)
    assert all(part["finish_reason"] is None for part in parts[:-1])
    assert parts[-1]["finish_reason"] is not None
    if is_chat:
        assert parts[0]["delta"]["role"] == "assistant"
        assert not any("role" in part["delta"] for part in parts[1:])
        assert parts[-1]["delta"] == {}
        assert len(parts) >= 2
    else:
        assert parts[-1]["text"] == ""


def _text(part: dict[str, Any], *, is_chat: bool) -> str:
    text: str = (part["delta"].get("content") or "") if is_chat else part["text"]
    return text


def _joined_reasoning(parts: Sequence[dict[str, Any]]) -> str:
    """Under both names, and before the answer."""
    deltas = [part["delta"] for part in parts]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    places = [place for place, delta in enumerate(deltas) if "reasoning" in delta]
    answers = [place for place, delta in enumerate(deltas) if delta.get("content") or "tool_calls" in delta]
    assert not places or not answers or places[-1] < answers[0]
    return "".join(deltas[place]["reasoning"] for place in places)


def _joined_calls(parts: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """First the id, the type and the name, then the arguments, of one call after the other."""
    calls: list[dict[str, Any]] = []
    for delta in (part["delta"] for part in parts):
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls) and call["function"]["arguments"] == ""
                calls.append({**call, "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"} and call["index"] == len(calls) - 1
                assert set(call["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return _calls([{name: value for name, value in call.items() if name != "index"} for call in calls])


def _joined_logprobs(parts: Sequence[dict[str, Any]]) -> list[Any] | None:
    given = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    return [entry for logprobs in given for entry in entries_of(logprobs)] if given else None


def check_error(response: httpx.Response, status: int, code: str | None, param: str | None = None) -> str:
    """An error in OpenAI's form, of bounded size, with nothing of the inside in it; returns its message.

    `param` None: not looked at.
    """
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 4096
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    check_error_object(error, status)
    assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    message: str = error["message"]
    return message


TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
INNARDS = ("Traceback", 'File "', str(ROOT), "site-packages", "0x", "pydantic", "asyncio", "<class", "miniserve.")


def check_error_object(error: dict[str, Any], status: int) -> None:
    """The inner object, as it also stands in a stream."""
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == TYPES.get(status, "invalid_request_error")
    assert error["message"] and isinstance(error["message"], str)
    assert not any(word in error["message"] for word in INNARDS), error["message"]
