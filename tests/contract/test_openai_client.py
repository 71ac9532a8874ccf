"""The official client, in each of its ways."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai import APIError, BadRequestError, InternalServerError, NotFoundError

from tests.contract.calls import Server, check_error_object, events


def test_chat(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=3, temperature=0
    )
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert answer.model == server.model and answer.id and answer.created > 1_700_000_000


def test_streams(server: Server) -> None:
    whole = server.openai.completions.create(model=server.model, prompt="Once upon", max_tokens=3, temperature=0)
    parts = list(
        server.openai.completions.create(
            model=server.model,
            prompt="Once upon",
            max_tokens=3,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert parts[-1].choices == [] and parts[-1].usage is not None and whole.usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    with server.openai.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=3, temperature=0, stream=True
    ) as chat:
        chunks = list(chat)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_stream_helper(scripted: Server) -> None:
    with scripted.openai.chat.completions.stream(
        model="scripted",
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        n=2,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds
    plain = scripted.openai.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        n=2,
        logprobs=True,
        top_logprobs=1,
    )
    for one, other in zip(final.choices, plain.choices, strict=True):
        assert one.message.content == other.message.content and one.finish_reason == other.finish_reason
        assert one.logprobs is not None and one.logprobs.content is not None
        assert other.logprobs is not None and other.logprobs.content is not None
        assert [entry.bytes for entry in one.logprobs.content] == [entry.bytes for entry in other.logprobs.content]
    assert final.usage is not None and plain.usage is not None
    assert final.usage.completion_tokens == plain.usage.completion_tokens


def test_the_async_stream_helper(scripted: Server) -> None:
    async def run() -> None:
        async with (
            scripted.async_openai() as client,
            client.chat.completions.stream(
                model="scripted", messages=[{"role": "user", "content": "Hi"}], temperature=0
            ) as stream,
        ):
            text = "".join([event.delta async for event in stream if event.type == "content.delta"])
            assert text == "user: Hi\n"
            assert (await stream.get_final_completion()).choices[0].message.content == text

    asyncio.run(run())


def test_raw_responses(scripted: Server) -> None:
    raw = scripted.openai.chat.completions.with_raw_response.create(
        model="scripted",
        messages=[{"role": "user", "content": "Hi"}],
        extra_headers={"X-Request-Id": "mine"},
    )
    assert raw.status_code == 200 and raw.headers["x-request-id"] == raw.request_id == "mine"
    assert raw.parse().choices[0].message.content == "user: Hi\n"
    with scripted.openai.chat.completions.with_streaming_response.create(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], stream=True
    ) as streaming:
        assert streaming.headers["content-type"].startswith("text/event-stream")
        lines = list(streaming.iter_lines())
    assert "data: [DONE]" in lines


def test_async(server: Server) -> None:
    async def run() -> None:
        async with server.async_openai() as client:
            plain = await client.chat.completions.create(
                model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=3, temperature=0
            )
            text = ""
            async for chunk in await client.chat.completions.create(
                model=server.model,
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=3,
                temperature=0,
                stream=True,
            ):
                text += chunk.choices[0].delta.content or ""
            assert text == plain.choices[0].message.content
            assert [model.id async for model in client.models.list()] == [server.model]

    asyncio.run(run())


def test_models(server: Server) -> None:
    assert [model.id for model in server.openai.models.list()] == [server.model]
    assert server.openai.models.retrieve(server.model).id == server.model
    with pytest.raises(NotFoundError):
        server.openai.models.retrieve("other/model")


def test_errors(scripted: Server) -> None:
    with pytest.raises(NotFoundError) as unknown:
        scripted.openai.completions.create(model="gpt-4o", prompt="Hi")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(BadRequestError) as wrong:
        scripted.openai.completions.create(model="scripted", prompt="Hi", temperature=3)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    assert wrong.value.request_id
    with pytest.raises(InternalServerError) as ours:
        scripted.openai.completions.create(model="scripted", prompt="<<raise 0>>", stream=True)
    assert ours.value.code == "internal_error"


@pytest.mark.parametrize("directive", ["<<raise 3>>", "<<error 3>>"])
def test_an_error_within_a_stream(scripted: Server, directive: str) -> None:
    """What came before it has been delivered; the client raises."""
    text = ""
    stream = scripted.openai.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": f"<<say abcdef>>{directive}"}], stream=True
    )
    with pytest.raises(APIError) as caught:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "abc" and caught.value.code == "internal_error"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_events_of_an_error_within_a_stream(scripted: Server, path: str) -> None:
    content = "<<say abcdef>><<raise 3>>"
    prompt = {"messages": [{"role": "user", "content": content}]} if "chat" in path else {"prompt": content}
    response = scripted.post(path, **prompt, stream=True, n=2, temperature=0)
    *chunks, error, done = events(response.text)
    assert done == "[DONE]" and len(chunks) >= 3
    assert set(json.loads(error)) == {"error"}
    check_error_object(json.loads(error)["error"], 500)
    assert response.headers["x-request-id"] in json.loads(error)["error"]["message"]
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
