"""Choosing tokens from logits, and how probable tokens are, in plain PyTorch: on every device, without kernels.

`NativeKernels` has the same four operators, of which these are the twins. Both draw by an exponential race: with
e ~ Exp(1) for each token, argmax p / e draws from p; it is the Gumbel-max trick without its outer logarithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from miniserve.kernels.native import Draw
from miniserve.kernels.transfer import to_device

# The filters look at this many of the most probable tokens first, and sort the whole vocabulary only when that cannot
# tell which ones stay. Same result, for a fraction of the time.
_NUM_CANDIDATES = 1024
_MAX_UINT32 = 2**32 - 1


class SamplingOperators(Protocol):
    """What `NativeKernels` and this module have in common."""

    def forbid(self, logits: Tensor, masks: Tensor) -> Tensor:
        """See `forbid`."""

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `largest`."""

    def draw(self, logits: Tensor, likeliest: Tensor, draws: Sequence[Draw | None]) -> Tensor:
        """See `draw`."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `token_logprobs`."""


def forbid(logits: Tensor, masks: Tensor) -> Tensor:
    """The logits, with -inf for each token that its row's mask does not allow, as a new tensor.

    Args:
        logits: fp32 [num_rows, vocab_size].
        masks: int32 [num_rows, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is set if token i is allowed.
    """
    bits = torch.ones(32, dtype=torch.int32, device=logits.device) << torch.arange(32, device=logits.device)
    forbidden = (masks.unsqueeze(-1) & bits == 0).flatten(1)[:, : logits.shape[-1]]
    return logits.masked_fill(forbidden, float("-inf"))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of fp32 logits [num_rows, vocab_size], the id and the value of the first largest.

    The value of a row with NaN is NaN. As argmax, and three times as fast on a CPU.
    """
    best = logits.max(dim=-1)
    return best.indices, best.values


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """How probable a token of each row is, beside the most probable ones.

    Args:
        logits: fp32 [num_rows, vocab_size].
        token_ids: int64 [num_rows].
        num_top: how many of the most probable tokens, at most vocab_size.

    Returns:
        int32 [num_rows], one more than the number of tokens with a larger logit; fp32 [num_rows, 1 + num_top], the
        logprobs of the token and of the most probable ones, which are NaN where the row has no probabilities; int32
        [num_rows, num_top], the ids of the latter.
    """
    total = _log_sum_exp(logits).unsqueeze(1)
    total = total.masked_fill(~total.isfinite(), float("nan"))  # a logit of +inf, or all of them -inf
    top_values, top_ids = logits.topk(num_top, dim=-1)
    own = logits.gather(-1, token_ids.unsqueeze(1))
    # Summed as fp32, which is exact up to 2^24, because a CPU adds integers much more slowly.
    ranks = (logits > own).sum(dim=-1, dtype=torch.float32).int() + 1
    return ranks, torch.cat((own, top_values), dim=-1) - total, top_ids.int()


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Row by row on a CPU, where PyTorch sums a row by itself in another order than one of many."""
    if logits.device.type == "cpu" and len(logits) > 0:
        return torch.stack([row.logsumexp(dim=-1) for row in logits])
    return logits.logsumexp(dim=-1)


def draw(logits: Tensor, likeliest: Tensor, draws: Sequence[Draw | None]) -> Tensor:
    """One token a row: drawn from its tempered and filtered distribution, or the most probable one where draw is None.

    A token depends on its row and its draw only.

    Args:
        logits: fp32 [num_rows, vocab_size]. Where they are not finite, any token may be drawn.
        likeliest: int64 [num_rows], the ids that `largest` gave.
        draws: one for each row.

    Returns:
        int64 [num_rows].
    """
    drawn = likeliest.clone()
    for with_filter in (False, True):
        random = {i: draw for i, draw in enumerate(draws) if draw is not None and draw.has_filter == with_filter}
        if random:
            columns = _Columns.of(list(random), list(random.values()), logits)
            of_rows = logits if len(random) == len(logits) else logits[columns.rows]
            choose = _draw_filtered if with_filter else _draw_unfiltered
            drawn[columns.rows] = choose(of_rows, columns)
    return drawn


@dataclass(frozen=True, slots=True)
class _Columns:
    """The draws of some rows as columns [num_rows, 1], which go to the device together.

    Attributes:
        rows: int64 [num_rows], which ones.
        seeds, top_k: int64.
        temperature, top_p, min_p: fp32.
        largest_top_k: of all of them.

    A filter that is off keeps everything.
    """

    rows: Tensor
    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    largest_top_k: int

    @classmethod
    def of(cls, rows: Sequence[int], draws: Sequence[Draw], logits: Tensor) -> _Columns:
        vocab_size = logits.shape[-1]

        def floats(column: Sequence[float]) -> np.ndarray:
            return np.array(column, np.float32)[:, None]

        return cls(
            **to_device(
                {
                    "rows": np.array(rows, np.int64),
                    "seeds": np.array([draw.seed for draw in draws], np.int64)[:, None],
                    "top_k": np.array([min(draw.top_k, vocab_size) or vocab_size for draw in draws], np.int64)[:, None],
                    "temperature": floats([draw.temperature for draw in draws]),
                    # Rounding may carry a cumulative probability to 1 early: top_p 1 has to mean all of them.
                    "top_p": floats([draw.top_p if draw.top_p < 1.0 else float("inf") for draw in draws]),
                    "min_p": floats([draw.min_p for draw in draws]),
                },
                logits.device,
            ),
            largest_top_k=max(draw.top_k for draw in draws),
        )


def _draw_unfiltered(logits: Tensor, columns: _Columns) -> Tensor:
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    return _race(_weights(logits, logits.amax(dim=-1, keepdim=True), columns), token_ids, columns)


def _draw_filtered(logits: Tensor, columns: _Columns) -> Tensor:
    weights, token_ids = _filtered_weights(logits, columns)
    return token_ids.gather(-1, _race(weights, token_ids, columns).unsqueeze(1)).squeeze(1)


def _race(weights: Tensor, token_ids: Tensor, columns: _Columns) -> Tensor:
    """int64 [num_rows], where in its row the winner stands."""
    noise = uniform_noise(columns.seeds, token_ids).neg_().log1p_().neg_()  # exact for small ones, unlike log(u)
    return weights.div(noise).max(dim=-1).indices


def uniform_noise(seeds: Tensor, token_ids: Tensor) -> Tensor:
    """fp32 in [2^-33, 1), a function of seed and token id: the id, mixed twice with a key made of the seed.

    Nothing else goes into it: neither a row's place, nor the size of the vocabulary, nor the device.

    Args:
        seeds: int64 [num_rows, 1].
        token_ids: int64 [num_rows, n] or [n].
    """
    first_key = seeds & _MAX_UINT32
    # Of the whole seed: with only the first key between them, two rows would have the same noise in another order.
    second_key = _mix((first_key + 0x9E3779B9) & _MAX_UINT32) ^ (seeds >> 32 & _MAX_UINT32)
    bits = _mix(_mix(token_ids ^ first_key) ^ second_key)
    return bits.float().add_(0.5).mul_(2.0**-32).clamp_max_(1.0 - 2.0**-24)


def _mix(x: Tensor) -> Tensor:
    """In place, a bijection of 32 bits in which each bit of the result depends on all of x (Wellons, 2018)."""
    # The second factor is given as a negative number, so that products stay within 64 bits with their sign.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(_MAX_UINT32)
    return x.bitwise_xor_(x >> 16)


def _weights(logits: Tensor, most: Tensor, columns: _Columns) -> Tensor:
    """Tempered probabilities relative to that of the logit `most` [num_rows, 1], the largest."""
    return (logits - most).mul_(columns.temperature.reciprocal()).exp_()


def filtered_weights(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """The most probable tokens, down to the last that stays: fp32 weights and int64 ids, [num_rows, num_candidates].

    Weights are probabilities, relative to the largest; 0 for a token that the filters leave out. Top-p counts
    probabilities after top-k, and keeps the token that crosses p. The most probable token always stays.
    """
    return _filtered_weights(logits, _Columns.of(range(len(draws)), draws, logits))


def _filtered_weights(logits: Tensor, columns: _Columns) -> tuple[Tensor, Tensor]:
    vocab_size = logits.shape[-1]
    width = min(vocab_size, max(_NUM_CANDIDATES, columns.largest_top_k))
    filtered = _filter_candidates(logits, columns, width)
    if filtered is None:
        filtered = _filter_candidates(logits, columns, vocab_size)
    assert filtered is not None, "nothing lies beyond the whole vocabulary"
    return filtered


def _filter_candidates(logits: Tensor, columns: _Columns, width: int) -> tuple[Tensor, Tensor] | None:
    """The same with only the `width` most probable tokens sorted; None when that cannot tell which ones stay."""
    vocab_size = logits.shape[-1]
    values, token_ids = logits.topk(width, dim=-1)  # [num_rows, width], most probable first
    weights = _weights(values, values[:, :1], columns)
    in_top_k = torch.arange(width, device=logits.device) < columns.top_k
    weights = weights.where(in_top_k, 0.0)
    has_top_k = columns.top_k < vocab_size
    whole = weights if width == vocab_size else _weights(logits, values[:, :1], columns)
    total = torch.where(has_top_k, weights.sum(-1, keepdim=True), whole.sum(-1, keepdim=True))
    more_probable = (weights.cumsum(-1) - weights) / total  # the probability of all tokens before this one
    keep = in_top_k & (more_probable < columns.top_p) & (weights >= columns.min_p)
    keep[:, 0] = True
    if width < vocab_size and bool((keep[:, -1:] & ~has_top_k).any()):
        return None  # the last of the sorted tokens is kept, so the next one may be too
    return weights.where(keep, 0.0), token_ids
