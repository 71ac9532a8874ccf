"""Logprobs against log_softmax in double precision."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from miniserve.outputs import TokenLogprobs
from miniserve.runner.logprobs import LogprobQuery, pack_logprobs, unpack_logprobs


def logprobs(logits: torch.Tensor, queries: list[LogprobQuery]) -> list[TokenLogprobs | None]:
    num_top = max(query.num_top for query in queries)
    return unpack_logprobs(pack_logprobs(logits, queries, num_top), queries)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("vocab_size", [1, 15, 3000])
def test_against_log_softmax_in_double_precision(vocab_size: int, scale: float) -> None:
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0)) * scale
    expected = logits.double().log_softmax(-1)
    queries = [LogprobQuery(row, (row * 7) % vocab_size, num_top) for row, num_top in enumerate([0, 1, 5, 20, 0, 3])]
    for query, entry in zip(queries, logprobs(logits, queries), strict=True):
        assert entry is not None and entry.token_id == query.token_id
        assert entry.logprob == pytest.approx(float(expected[query.row, query.token_id]), abs=1e-5, rel=1e-6)
        assert entry.rank == 1 + int((logits[query.row] > logits[query.row, query.token_id]).sum())
        top = expected[query.row].topk(min(query.num_top, vocab_size))
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5, rel=1e-6)


def test_token_ids_survive_the_transfer() -> None:
    """Ids travel beside the logprobs in one tensor: as floating point numbers, large ones would be rounded."""
    logits = torch.zeros(1, 2**18)
    logits[0, 200_001], logits[0, 17] = 9.0, 8.0
    [entry] = logprobs(logits, [LogprobQuery(0, 200_001, 2)])
    assert entry is not None and [token_id for token_id, _ in entry.top] == [200_001, 17]


def test_equals_share_a_rank() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -inf]])
    entries = [logprobs(logits, [LogprobQuery(0, token_id, 0)])[0] for token_id in range(5)]
    assert [entry.rank for entry in entries if entry is not None] == [4, 1, 3, 1, 5]


def test_a_token_that_cannot_be_is_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -inf, 0.0]])
    [entry] = logprobs(logits, [LogprobQuery(0, 1, 3)])
    assert entry is not None and entry.logprob == -inf
    assert entry.top[2] == (1, -inf)


@pytest.mark.parametrize("broken", [[nan, 0.0, 1.0], [inf, 0.0, 1.0], [inf, inf, -inf], [-inf] * 3], ids=str)
@pytest.mark.parametrize("token_id", [0, 1, 2])
def test_a_broken_row_has_no_answer_and_the_others_have(broken: list[float], token_id: int) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], broken, [2.0, 1.0, 0.0]])
    before, failed, after = logprobs(logits, [LogprobQuery(row, token_id, 2) for row in range(3)])
    assert failed is None
    for row, entry in ((0, before), (2, after)):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(logits[row].double().log_softmax(-1)[token_id]), abs=1e-6)
