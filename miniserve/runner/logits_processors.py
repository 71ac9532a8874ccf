"""What a request changes in its logits before a token is chosen: banned tokens, logit_bias, penalties, a mask.

Owns the order of these changes. Every function is pure; rows that ask for nothing are never seen here. What the earlier
tokens are is told anew in each step, so a preemption or a replay changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miniserve.kernels.sampling import SamplingOperators
from miniserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: how its next token is to be chosen.

    Attributes:
        position: which output position it is; 0 is the first output token.
        banned_ids: tokens that must not be chosen.
        prompt_ids, output_ids: the tokens so far; only needed where the sampling has penalties.
        mask: what a grammar allows, int32 [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is set if token i may be
            chosen. None allows all.
    """

    sampling: SamplingParams
    position: int
    banned_ids: frozenset[int] = frozenset()
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    mask: NDArray[np.int32] | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether the row's logits are not to be taken as the model gave them."""
        return self.mask is not None or self.changes_scores

    @property
    def changes_scores(self) -> bool:
        """The same, but for the mask."""
        return bool(self.banned_ids or self.sampling.logit_bias or self.sampling.has_penalties)


def process_logits(logits: Tensor, rows: Sequence[SampleRow], operators: SamplingOperators) -> Tensor:
    """The logits after the changes that each row asks for, as a new tensor if there are any.

    Args:
        logits: fp32 [num_rows, vocab_size].
        rows: one per row of logits.
        operators: what forbids tokens.
    """
    changed = {index: row for index, row in enumerate(rows) if row.changes_scores}
    if changed:
        logits = logits.clone()
    for index, row in changed.items():
        _change_scores(logits[index], row)
    if all(row.mask is None for row in rows):
        return logits
    return operators.forbid(logits, _masks(rows, logits))  # last: nothing makes up for what they forbid


def _change_scores(scores: Tensor, row: SampleRow) -> None:
    """Bans, biases and penalties, to `scores`, fp32 [vocab_size], in place."""
    if banned_ids := _banned_ids(row):
        scores[_indices(banned_ids, scores.device)] = float("-inf")
    if row.sampling.logit_bias:
        biases = torch.tensor(list(row.sampling.logit_bias.values()), dtype=scores.dtype, device=scores.device)
        scores[_indices(row.sampling.logit_bias, scores.device)] += biases
    if row.sampling.has_penalties:
        _penalise(scores, row)


def _banned_ids(row: SampleRow) -> frozenset[int]:
    """The tokens that must not be chosen; none if the grammar allows no others, as it could not go on."""
    if row.mask is None or not row.banned_ids:
        return row.banned_ids
    allowed = row.mask.view(np.uint32).copy()
    for token_id in row.banned_ids:
        if token_id // 32 < len(allowed):
            allowed[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return row.banned_ids if allowed.any() else frozenset()


def _masks(rows: Sequence[SampleRow], logits: Tensor) -> Tensor:
    """int32 [num_rows, ceil(vocab_size / 32)]; who has no mask is free."""
    masks = np.empty((len(rows), -(-logits.shape[-1] // 32)), np.int32)
    for words, row in zip(masks, rows, strict=True):
        words[:] = -1 if row.mask is None else row.mask[: len(words)]
    return torch.from_numpy(masks).to(logits.device)


def _penalise(scores: Tensor, row: SampleRow) -> None:
    """Apply the three penalties to `scores`, fp32 [vocab_size], in place.

    Repetition: Keskar et al., 2019 (CTRL), with the usual care for the sign; frequency and presence: OpenAI's
    API reference, mu[j] - c[j] * frequency - (c[j] > 0) * presence.
    """
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = _indices(np.unique([*row.prompt_ids, *row.output_ids]), scores.device)
        # As fp32, the smallest legal penalties would be 0, and 0 times -inf, a banned token, is NaN.
        penalty = max(sampling.repetition_penalty, torch.finfo(scores.dtype).tiny)
        values = scores[seen]
        # Nor may a quotient become infinite, as what is not finite counts as a fault of the model.
        most = torch.finfo(scores.dtype).max
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty).clamp_(max=most)
    if (sampling.frequency_penalty or sampling.presence_penalty) and row.output_ids:
        token_ids, counts = np.unique(row.output_ids, return_counts=True)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        penalties = penalties.astype(np.float32)  # before it goes to a device, which may know no longer floats
        scores[_indices(token_ids, scores.device)] -= torch.from_numpy(penalties).to(scores.device)


def _indices(token_ids: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=device)
