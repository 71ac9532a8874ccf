"""A stream joined together is the plain answer, for both kinds of completion, on both servers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.calls import COMPLETIONS, Answer, Server, chunks_of, fold

SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 4}


def assert_same(first: Answer, second: Answer) -> None:
    """Texts, finish reasons, tokens and usage exactly; logprobs to rounding (a prefix hit computes less at once)."""
    one, other = first.content(), second.content()
    assert _without_numbers(one) == _without_numbers(other)
    assert _numbers(one) == pytest.approx(_numbers(other), abs=1e-3)


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    return "a float" if isinstance(value, float) else value


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in _numbers(item)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize(
    ("server", "n", "logprobs"),
    [
        *(
            ("scripted", n, logprobs)
            for n in (1, 3)
            for logprobs in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2})
        ),
        ("real", 3, {"logprobs": True, "top_logprobs": 2}),
    ],
    indirect=["server"],
)
def test_chat(server: Server, n: int, logprobs: dict[str, Any]) -> None:
    fields = {**SAMPLED, "n": n, **logprobs}
    whole = server.chat("Say a word", **fields)
    assert len(whole.texts) == n
    assert all((entries is not None) == bool(logprobs) for entries in whole.logprobs)
    assert_same(server.chat_stream("Say a word", **fields), whole)


@pytest.mark.parametrize(
    ("server", "n", "logprobs"),
    [
        *(("scripted", n, logprobs) for n in (1, 3) for logprobs in ({}, {"logprobs": 0}, {"logprobs": 2})),
        ("real", 1, {"logprobs": 0}),
    ],
    indirect=["server"],
)
def test_completions(server: Server, n: int, logprobs: dict[str, Any]) -> None:
    fields = {**SAMPLED, "n": n, **logprobs}
    whole = server.complete("Once upon a time", **fields)
    assert len(whole.texts) == n
    assert_same(server.complete_stream("Once upon a time", **fields), whole)


def test_lists_of_prompts(server: Server) -> None:
    """Choices come in the order p0n0 p0n1 p1n0 p1n1."""
    fields = {**SAMPLED, "n": 2, "logprobs": 1}
    prompts = ["The sea is", "In the beginning there"]
    both = server.complete(prompts, **fields)
    assert_same(server.complete_stream(prompts, **fields), both)
    alone = [server.complete(prompt, **fields) for prompt in prompts]
    assert both.texts == [text for answer in alone for text in answer.texts]
    for name in ("prompt_tokens", "completion_tokens"):
        assert both.usage[name] == sum(answer.usage[name] for answer in alone)


def test_token_ids_are_the_prompt(server: Server) -> None:
    ids = server.tokens("Once upon a time")
    text = server.complete("Once upon a time", max_tokens=4, temperature=0, add_special_tokens=False)
    for prompt in (ids, [ids]):
        answer = server.complete(prompt, max_tokens=4, temperature=0)
        assert answer.content() == text.content()
        assert answer.usage["prompt_tokens"] == len(ids)
    assert_same(
        server.complete([ids, ids[:3]], max_tokens=4, temperature=0),
        server.complete_stream([ids, ids[:3]], max_tokens=4, temperature=0),
    )


@pytest.mark.parametrize(
    ("server", "n", "max_tokens"),
    [*(("scripted", n, max_tokens) for n in (1, 2) for max_tokens in (0, 1, 3)), ("real", 1, 0), ("real", 2, 2)],
    indirect=["server"],
)
def test_echo_with_logprobs(server: Server, max_tokens: int, n: int) -> None:
    prompt = "The sea is"
    fields = {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": max_tokens, "n": n}
    whole = server.complete(prompt, **fields)
    assert_same(server.complete_stream(prompt, **fields), whole)
    for text, entries, reason in zip(whole.texts, whole.logprobs, whole.finish_reasons, strict=True):
        assert entries is not None and text.startswith(prompt)
        assert len(entries) == whole.usage["prompt_tokens"] + max_tokens
        assert entries[0]["logprob"] is None and entries[0]["top_logprobs"] is None
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) >= 1 for entry in entries[1:])
        assert "".join(entry["token"] for entry in entries) == text
        offsets = [entry["text_offset"] for entry in entries]
        assert offsets == [sum(len(entry["token"]) for entry in entries[:at]) for at in range(len(entries))]
        assert reason == "length"
    assert whole.num_tokens == n * max_tokens


def test_echo_without_logprobs(scripted: Server) -> None:
    prompts = ["The sea is", "Once upon"]
    fields = {"echo": True, "temperature": 0, "max_tokens": 3}
    whole = scripted.complete(prompts, **fields)
    without = scripted.complete(prompts, temperature=0, max_tokens=3)
    assert whole.texts == [prompt + text for prompt, text in zip(prompts, without.texts, strict=True)]
    assert_same(scripted.complete_stream(prompts, **fields), whole)


def test_echo_of_token_ids_is_their_text(server: Server) -> None:
    answer = server.complete(server.tokens("The sea is"), echo=True, max_tokens=0)
    assert answer.text == "The sea is" and answer.num_tokens == 0


def test_max_tokens_zero_without_echo(server: Server) -> None:
    for answer in (server.complete("The sea is", max_tokens=0), server.complete_stream("The sea is", max_tokens=0)):
        assert (answer.text, answer.finish_reason, answer.num_tokens) == ("", "length", 0)


def test_a_stream_of_one_token(server: Server) -> None:
    """Bug kind: the only token of a stream with max_tokens 1 was lost."""
    whole, joined = server.chat("Hi", max_tokens=1), server.chat_stream("Hi", max_tokens=1, temperature=0)
    assert whole.num_tokens == joined.num_tokens == 1
    assert joined.text != "" and joined.finish_reason == "length"


def test_a_model_that_stops_at_once(scripted: Server) -> None:
    """The role and the finish come all the same."""
    joined = scripted.chat_stream("<<say >>")
    assert (joined.text, joined.finish_reason, joined.num_tokens) == ("", "stop", 1)
    assert len(joined.chunks) >= 3  # role, finish, usage
    joined = scripted.complete_stream("<<say >>")
    assert (joined.text, joined.finish_reason, joined.num_tokens) == ("", "stop", 1)


def test_no_usage_in_a_stream_that_did_not_ask(server: Server) -> None:
    for options in (None, {}, {"include_usage": False}):
        response = server.post(COMPLETIONS, prompt="Hi", max_tokens=2, stream=True, stream_options=options)
        fold(response, include_usage=False)


def test_continuous_usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = server.post(COMPLETIONS, prompt="Hi", max_tokens=3, ignore_eos=True, stream=True, stream_options=options)
    usages = [chunk["usage"] for chunk in chunks_of(response)]
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == 3


def test_the_prompt_is_counted_once(server: Server) -> None:
    single, many = (server.complete("Once upon a time", max_tokens=1, n=n) for n in (1, 5))
    assert many.usage["prompt_tokens"] == single.usage["prompt_tokens"]


def test_cached_tokens(server: Server) -> None:
    """A prompt that was seen is not computed again, but for its last token at least."""
    prompt = "A sentence that nobody else sends, number 4711, and long enough for some blocks. " * 2
    first = server.complete(prompt, max_tokens=1, temperature=0)
    second = server.complete(prompt, max_tokens=1, temperature=0)
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    assert first.usage["prompt_tokens_details"]["cached_tokens"] < 16
    assert cached % 16 == 0 and 0 < cached < second.usage["prompt_tokens"]
    assert second.text == first.text


def test_the_same_greedy_prompt_again_and_again(server: Server) -> None:
    """Bug kinds: a prefix hit changed the output; the second of two equal completions was empty."""
    answers = [server.complete("Once upon a time", max_tokens=4, temperature=0) for _ in range(4)]
    assert all(answer.content() == answers[0].content() for answer in answers) and answers[0].text


def test_ids_differ_between_calls(server: Server) -> None:
    ids = [server.complete("Hi", max_tokens=1).id, server.chat("Hi", max_tokens=1).id]
    ids += [server.complete("Hi", max_tokens=1).id, server.chat("Hi", max_tokens=1).id]
    assert len(set(ids)) == 4


def test_a_stream_shows_itself_while_the_prompt_is_computed(scripted: Server) -> None:
    """The role comes first and alone, and nothing of it is repeated when the text comes."""
    joined = scripted.chat_stream("<<pause 1400>><<say ab>>", max_tokens=1)
    assert joined.text == "a" and joined.pieces[0][0] == ""
