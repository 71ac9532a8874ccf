"""Bans, biases and penalties against a plain loop over the tokens, and through the sampler."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.kernels import sampling as sampling_operators
from miniserve.runner.logits_processors import SampleRow, process_logits
from miniserve.runner.sampler import Sampler
from miniserve.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE = 12
TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)


def by_the_book(logits: list[float], row: SampleRow) -> list[float]:
    """One token after the other, in double precision."""
    sampling = row.sampling
    gives_way = row.mask is not None and all(i in row.banned_ids for i in range(VOCAB_SIZE) if is_allowed(row, i))
    banned_ids = frozenset() if gives_way else row.banned_ids
    scores = []
    for token_id, logit in enumerate(logits):
        score = -inf if token_id in banned_ids else logit
        score += sampling.logit_bias.get(token_id, 0.0)
        if token_id in row.prompt_ids or token_id in row.output_ids:
            score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
        count = sum(output_id == token_id for output_id in row.output_ids)
        score -= sampling.frequency_penalty * count
        if count > 0:
            score -= sampling.presence_penalty
        scores.append(score if is_allowed(row, token_id) else -inf)
    return scores


def is_allowed(row: SampleRow, token_id: int) -> bool:
    return row.mask is None or bool(int(row.mask[token_id // 32]) >> token_id % 32 & 1)


def mask_of(*token_ids: int, num_words: int = 1) -> np.ndarray:
    words = [sum(1 << token_id % 32 for token_id in set(token_ids) if token_id // 32 == i) for i in range(num_words)]
    return np.array(words, np.uint32).view(np.int32)


@st.composite
def sample_rows(draw: st.DrawFn) -> SampleRow:
    sampling = SamplingParams(
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -1.0, 2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2, 0.5, 100.0])),
        logit_bias=draw(st.dictionaries(TOKEN_IDS, st.sampled_from([-100.0, -1.5, 0.0, 2.0, 100.0]), max_size=4)),
    )
    return SampleRow(
        sampling,
        position=0,
        banned_ids=draw(st.frozensets(TOKEN_IDS, max_size=4)),
        prompt_ids=draw(st.lists(TOKEN_IDS, max_size=20)),
        output_ids=draw(st.lists(TOKEN_IDS, max_size=20)),
        mask=draw(st.none() | st.sets(TOKEN_IDS).map(lambda token_ids: mask_of(*token_ids))),
    )


@settings(deadline=None, max_examples=200)
@given(rows=st.lists(sample_rows(), min_size=1, max_size=4), seed=st.integers(0, 3))
def test_against_a_loop_over_the_tokens(rows: list[SampleRow], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, 2] = 0.0
    logits[:, 3] = -inf
    before = logits.clone()
    processed = process_logits(logits, rows, sampling_operators)
    assert torch.equal(logits, before), "the logprobs are still to be taken of them"
    expected = [by_the_book(values, row) for values, row in zip(logits.tolist(), rows, strict=True)]
    np.testing.assert_allclose(processed.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sampling", "banned_ids", "changes"),
    [
        ({}, frozenset(), False),
        ({"seed": 1, "top_p": 0.5, "logprobs": 3, "min_tokens": 2}, frozenset(), False),
        ({}, frozenset({1}), True),
        ({"logit_bias": {1: 0.5}}, frozenset(), True),
        ({"presence_penalty": -0.1}, frozenset(), True),
        ({"frequency_penalty": 0.1}, frozenset(), True),
        ({"repetition_penalty": 0.9}, frozenset(), True),
    ],
)
def test_who_changes_logits(sampling: dict[str, Any], banned_ids: frozenset[int], changes: bool) -> None:
    assert SampleRow(SamplingParams(**sampling), 0, banned_ids).changes_logits is changes


def test_a_mask_changes_logits() -> None:
    assert SampleRow(SamplingParams(), 0, mask=mask_of(*range(VOCAB_SIZE))).changes_logits


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 70])
def test_a_mask_of_any_length(vocab_size: int) -> None:
    """Its last word may be shorter than the vocabulary's, or hold more than that; every bit has its place."""
    mask = mask_of(0, 30, 31, 32, 63, 64, 69, 95, num_words=3)
    processed = process_logits(
        torch.zeros(1, vocab_size), [SampleRow(SamplingParams(), 0, mask=mask)], sampling_operators
    )
    kept = np.flatnonzero(np.isfinite(processed[0].numpy())).tolist()
    assert kept == [token_id for token_id in (0, 30, 31, 32, 63, 64, 69) if token_id < vocab_size]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.9}])
def test_what_a_mask_forbids_is_never_chosen(sampling: dict[str, Any]) -> None:
    """Whatever its logit and its bias; and the mask is left as it was."""
    logits = torch.arange(float(VOCAB_SIZE)).expand(100, -1)
    mask = mask_of(2, 3, 5)
    row = SampleRow(SamplingParams(logit_bias={11: 100.0, 3: -5.0}, **sampling), 0, frozenset({5}), mask=mask)
    chosen = Sampler(CPU, 0).sample(logits, [row] * 100)
    assert set(chosen) <= {2, 3} and chosen.count(2) > 50
    assert mask.tolist() == [0b101100]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.5, "seed": 1}])
def test_a_mask_that_leaves_nothing_is_no_choice(sampling: dict[str, Any]) -> None:
    """Token 0 would be an answer that nobody asked for. The neighbours have their choice.

    Bug: so did a stop token, banned before `min_tokens`, where a grammar allows nothing else.
    """
    params = SamplingParams(**sampling)
    nothing = SampleRow(params, 0, mask=mask_of())
    banned = SampleRow(params, 0, frozenset({4, 70}), mask=mask_of(4))
    fine = SampleRow(params, 0, mask=mask_of(4))
    logits = torch.zeros(5, VOCAB_SIZE)
    logits[4, 4] = -inf
    assert Sampler(CPU, 0).sample(logits, [nothing, fine, banned, fine, fine]) == [None, 4, 4, 4, None]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.1}, {"temperature": 2.0, "top_p": 0.9}])
@pytest.mark.parametrize("mask", [None, mask_of(*range(VOCAB_SIZE))])
def test_a_penalty_that_leaves_the_range_of_numbers(sampling: dict[str, Any], mask: Any) -> None:
    """Bug: a logit divided by it was infinite, and with a mask, only then, no choice at all."""
    params = SamplingParams(repetition_penalty=1e-38, seed=1, **sampling)
    row = SampleRow(params, 1, prompt_ids=[3], output_ids=[5], mask=mask)
    assert set(Sampler(CPU, 0).sample(torch.full((20, VOCAB_SIZE), 9.0), [row] * 20)) <= {3, 5}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, 0),
        ({"presence_penalty": 2.0}, 1),
        ({"frequency_penalty": 1.0}, 1),
        ({"repetition_penalty": 3.0}, 2),
        ({"logit_bias": {7: 100.0}}, 7),
        ({"logit_bias": {0: -100.0}}, 1),
    ],
)
def test_greedy_heeds_them(sampling: dict[str, Any], expected: int) -> None:
    """Bug: presence_penalty was accepted, and silently ignored where the sampling was greedy."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, :3] = torch.tensor([4.0, 3.5, 3.0])
    params = SamplingParams(temperature=0, **sampling)
    row = SampleRow(params, 2, prompt_ids=[1], output_ids=[0, 0])
    assert Sampler(CPU, 0).sample(logits, [row]) == [expected]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("repetition_penalty", [1.0, 100.0, 1e-45, 1e-300])
def test_a_banned_token_is_never_chosen(sampling: dict[str, Any], repetition_penalty: float) -> None:
    """Bug: a repetition penalty too small for fp32 made 0 of itself, and NaN, the choice, of what was banned."""
    logits = torch.arange(float(VOCAB_SIZE)).expand(200, -1)
    params = SamplingParams(repetition_penalty=repetition_penalty, **sampling)
    everything = list(range(VOCAB_SIZE))
    row = SampleRow(params, 5, frozenset({VOCAB_SIZE - 1, 2}), prompt_ids=everything, output_ids=everything)
    chosen = Sampler(CPU, 0).sample(logits, [row] * 200)
    assert None not in chosen and not {2, VOCAB_SIZE - 1} & set(chosen)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"seed": 1, "min_p": 0.1}])
def test_when_everything_is_banned_a_token_is_chosen_all_the_same(sampling: dict[str, Any]) -> None:
    """The vocabulary may hold nothing but end tokens; it is no fault of the model's, and must not raise."""
    row = SampleRow(SamplingParams(**sampling), 0, frozenset(range(VOCAB_SIZE)))
    [chosen] = Sampler(CPU, 0).sample(torch.zeros(1, VOCAB_SIZE), [row])
    assert chosen is not None and 0 <= chosen < VOCAB_SIZE
