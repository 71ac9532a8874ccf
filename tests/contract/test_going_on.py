"""Around the prompt: going on with a message, truncating, ids and logprobs, salts of the cache, and priorities."""

from __future__ import annotations

from typing import Any

from tests.contract.calls import CHAT, COMPLETIONS, Server, check_error, chunks_of, plain

HI = {"role": "user", "content": "Hi"}


def prompt_of(server: Server, **fields: Any) -> str:
    """The text that the model would see."""
    tokens = server.post("/tokenize", **fields).raise_for_status().json()["tokens"]
    text: str = server.post("/detokenize", tokens=tokens).json()["prompt"]
    return text


def test_going_on_with_a_message(thinking: Server) -> None:
    messages = [HI, {"role": "assistant", "content": "1 2 <eos> "}]
    fields = {"messages": messages, "continue_final_message": True}
    assert prompt_of(thinking, **fields) == "user: Hi\nassistant: 1 2 <eos> "
    assert prompt_of(thinking, messages=messages) == "user: Hi\nassistant: 1 2 <eos> \nassistant: "
    said = [HI, {"role": "assistant", "content": "<<say 3>>"}]
    assert plain(thinking.post(CHAT, messages=said, continue_final_message=True)).text == "3"
    for wrong, param in (
        ({"messages": [HI], "continue_final_message": True}, "continue_final_message"),
        ({**fields, "add_generation_prompt": True}, "continue_final_message"),
    ):
        check_error(thinking.post(CHAT, **wrong), 400, "invalid_value", param)


def test_going_on_within_the_reasoning(thinking: Server) -> None:
    user = {"role": "user", "content": "<<say then</think>So.>>"}
    messages = [user, {"role": "assistant", "content": "<think>first, "}]
    answer = plain(thinking.post(CHAT, messages=messages, continue_final_message=True))
    assert (answer.reasonings, answer.texts) == (["then"], ["So."])


def test_a_real_model_goes_on(real: Server) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    answer = plain(real.post(CHAT, messages=messages, continue_final_message=True, temperature=0, max_tokens=3))
    assert answer.text.startswith(" Paris")


def test_truncated_prompts(scripted: Server) -> None:
    """The last tokens stay; so does what was asked for, echoed and scored."""
    long = "x" * 6000 + "abc"
    refused = scripted.post(COMPLETIONS, prompt=long)
    check_error(refused, 400, "context_length_exceeded", "prompt")
    answer = scripted.complete(long, truncate_prompt_tokens=3, echo=True, logprobs=0, max_tokens=1)
    assert answer.text == "abca" and answer.usage["prompt_tokens"] == 3
    assert answer.tokens == ["a", "b", "c", "a"]
    most = scripted.complete(long, truncate_prompt_tokens=-1, max_tokens=5)
    assert most.usage["prompt_tokens"] == 4096 - 5
    assert scripted.chat(long, truncate_prompt_tokens=4, max_tokens=4).text == "abc\n"


def test_token_ids(scripted: Server) -> None:
    prompt, said = scripted.tokens("user: <<say ok>>\n"), scripted.tokens("ok")
    [end] = scripted.tokens("<eos>")
    fields = {"messages": [{"role": "user", "content": "<<say ok>>"}], "return_token_ids": True, "n": 2}
    body = scripted.post(CHAT, **fields).json()
    assert body["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in body["choices"]] == [[*said, end]] * 2
    chunks = chunks_of(scripted.post(CHAT, **fields, stream=True))
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt, *[None] * (len(chunks) - 1)]
    assert joined_ids(chunks) == {0: [*said, end], 1: [*said, end]}

    texts = ["<<say ok>>", "<<say ok>>!"]
    asked: dict[str, Any] = {"prompt": texts, "return_token_ids": True}
    prompts = [scripted.tokens(text) for text in texts]
    choices = scripted.post(COMPLETIONS, **asked).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert [choice["token_ids"] for choice in choices] == [[*said, end]] * 2
    chunks = chunks_of(scripted.post(COMPLETIONS, **asked, stream=True))
    assert joined_ids(chunks) == {0: [*said, end], 1: [*said, end]}
    for index, ids in enumerate(prompts):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [part.get("prompt_token_ids") for part in own] == [ids, *[None] * (len(own) - 1)]


def joined_ids(chunks: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The output's ids of each choice."""
    ids: dict[int, list[int]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return ids


def test_prompt_logprobs(real: Server) -> None:
    """The true ones: a likely word has a low rank, and the sampled ones of the same text agree."""
    text = "The capital of France is Paris"
    tokens = real.tokens(text)
    asked = {"prompt": text, "prompt_logprobs": 2, "max_tokens": 1, "n": 2, "add_special_tokens": False}
    for choice in real.post(COMPLETIONS, **asked).raise_for_status().json()["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None and len(others) == len(tokens) - 1
        for token, entry in zip(tokens[1:], others, strict=True):
            assert str(token) in entry and 2 <= len(entry) <= 3
            assert sorted(item["rank"] for item in entry.values())[:2] == [1, 2]
    last = others[-1][str(tokens[-1])]
    assert last["decoded_token"] == " Paris" and last["rank"] <= 5
    echoed = real.complete(text, echo=True, logprobs=1, max_tokens=0, add_special_tokens=False)
    [entries] = echoed.logprobs
    assert entries is not None and abs(entries[-1]["logprob"] - last["logprob"]) < 1e-3
    chat = real.post(CHAT, messages=[HI], prompt_logprobs=0, max_tokens=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and chat["prompt_logprobs"][0] is None
    streamed = real.post(CHAT, messages=[HI], prompt_logprobs=0, stream=True)
    check_error(streamed, 400, "invalid_value", "prompt_logprobs")


def test_a_salt_keeps_prefixes_apart(scripted: Server) -> None:
    def cached(**fields: Any) -> int:
        usage = scripted.complete("a salted prompt that is longer than a block " * 3, max_tokens=1, **fields).usage
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(cache_salt="one") == 0 and cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0 and cached() == 0


def test_priorities(scripted: Server, thinking: Server) -> None:
    """Only where the server goes by them."""
    message = check_error(scripted.post(CHAT, messages=[HI], priority=1), 400, "invalid_value", "priority")
    assert "--scheduling-policy" in message
    for priority in (-5, 0, 7):
        assert thinking.chat("<<say ok>>", priority=priority).text == "ok"
