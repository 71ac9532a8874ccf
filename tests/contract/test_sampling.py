"""Sampling parameters do what they say, on the real model in fp32."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.contract.calls import COMPLETIONS, Server

PROMPT = "Once upon a time, there was a"
WILD = {"temperature": 1.5, "top_p": 1.0, "max_tokens": 8}


def test_a_seed_makes_it_reproducible(real: Server) -> None:
    """Alone, streamed, and with neighbours."""
    alone = real.complete(PROMPT, seed=11, **WILD).text
    assert real.complete_stream(PROMPT, seed=11, **WILD).text == alone
    with ThreadPoolExecutor(4) as pool:
        seeds = [11, 12, 11, 13]
        texts = list(pool.map(lambda seed: real.complete(PROMPT, seed=seed, **WILD).text, seeds))
    assert texts[0] == texts[2] == alone
    assert len(set(texts)) == 3


def test_choices_of_one_seed_differ(real: Server) -> None:
    texts = real.complete(PROMPT, seed=11, n=3, **WILD).texts
    assert len(set(texts)) == 3
    assert real.complete(PROMPT, seed=11, n=3, **WILD).texts == texts


def test_without_a_seed_equal_requests_differ(real: Server) -> None:
    """Bug kind: they were identical, also beside each other."""
    assert real.complete(PROMPT, **WILD).text != real.complete(PROMPT, **WILD).text
    assert len(set(real.complete([PROMPT, PROMPT], n=2, **WILD).texts)) == 4


@pytest.mark.parametrize("fields", [{"temperature": 0.0001, "top_p": 0.0001}, {"temperature": 1e-300}, {"top_k": 1}])
def test_what_equals_greedy(real: Server, fields: dict[str, Any]) -> None:
    """Bug kind: a tiny temperature made infinities, and killed the engine."""
    greedy = real.complete(PROMPT, temperature=0, max_tokens=6).text
    assert real.complete(PROMPT, **{"temperature": 2, "max_tokens": 6, **fields}).text == greedy


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.8}])
def test_penalties_change_the_answer(real: Server, penalty: dict[str, float]) -> None:
    """Bug kind: silently ignored."""
    prompt = "no no no no no no no no no no no no"
    plain, other = (real.complete(prompt, temperature=0, max_tokens=8, **fields).text for fields in ({}, penalty))
    assert plain != other


def test_logit_bias(real: Server) -> None:
    ids = real.tokens(PROMPT)
    first = real.complete(PROMPT, temperature=0, max_tokens=1)
    [token_id] = real.tokens(first.text)
    banned = real.complete(PROMPT, temperature=0, max_tokens=1, logit_bias={str(token_id): -100})
    assert banned.text != first.text
    forced = real.complete(PROMPT, temperature=1, max_tokens=4, logit_bias={str(ids[0]): 100})
    assert real.tokens(forced.text) == [ids[0]] * 4


def test_logprobs_are_numbers(real: Server) -> None:
    """Bug kind: -inf where top_k leaves one token, which JSON cannot spell."""
    answer = real.chat("Hi", max_tokens=2, logprobs=True, top_logprobs=5, top_k=1, logit_bias={"5": -100})
    assert answer.logprobs[0] is not None
    for entry in answer.logprobs[0]:
        numbers = [candidate["logprob"] for candidate in entry["top_logprobs"]]
        assert len(numbers) == 5 and numbers == sorted(numbers, reverse=True)
        assert all(math.isfinite(number) and number <= 0 for number in numbers)
        assert sum(map(math.exp, numbers)) <= 1.001


def test_logprobs_are_raw(real: Server) -> None:
    """Penalties, temperature and filters change what is chosen, not what is reported."""
    first = real.complete(PROMPT, temperature=0, max_tokens=1, logprobs=5)
    fields = {"temperature": 0.3, "seed": 1, "top_k": 3, "repetition_penalty": 1.5, "presence_penalty": 1}
    second = real.complete(PROMPT, max_tokens=1, logprobs=5, **fields)
    assert first.logprobs[0] is not None and second.logprobs[0] is not None
    one, other = (answer[0]["top_logprobs"] for answer in (first.logprobs[0], second.logprobs[0]))
    shared = set(one) & set(other)
    assert len(shared) >= 5
    assert [one[token] for token in shared] == pytest.approx([other[token] for token in shared], abs=1e-3)


def test_scoring_agrees_with_generating(real: Server) -> None:
    """What lm-evaluation-harness sends: the logprobs of a text are those it would have been generated with."""
    ids = real.tokens(PROMPT)
    generated = real.complete(ids, temperature=0, max_tokens=6, logprobs=1)
    continuation = real.tokens(generated.text)
    scored = real.complete(
        [[*ids, *continuation]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    ).logprobs[0]
    assert scored is not None and generated.logprobs[0] is not None
    assert len(scored) == len(ids) + 6 + 1 and len(continuation) == 6
    for entry, other in zip(generated.logprobs[0], scored[len(ids) :], strict=False):
        assert entry["token"] == other["token"]
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert entry["logprob"] == pytest.approx(max(entry["top_logprobs"].values()))
    # The same again: the prefix cache has all of it now, and must not keep its logprobs back.
    again = real.complete([*ids, *continuation], temperature=0, max_tokens=0, logprobs=1, echo=True).logprobs[0]
    assert again is not None and len(again) == len(ids) + 6
    for entry, other in zip(again[1:], scored[1:], strict=False):
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-3)


def test_min_tokens_with_the_real_model(real: Server) -> None:
    messages = [{"role": "user", "content": "Say only: Hi"}]
    chat = real.post("/v1/chat/completions", messages=messages, temperature=0, min_tokens=12, max_tokens=13)
    assert chat.json()["usage"]["completion_tokens"] >= 12


def test_defaults_of_the_model_can_be_overridden(real: Server) -> None:
    greedy = [real.post(COMPLETIONS, prompt=PROMPT, max_tokens=4, temperature=0.0).json()["choices"][0]["text"]]
    assert greedy * 2 == [real.complete(PROMPT, max_tokens=4, temperature=0).text for _ in range(2)]
