"""What a request changes in its logits before a token is chosen: banned tokens, logit_bias, penalties, a mask.

Owns the order of these changes. Every function is pure; rows that ask for nothing are never seen here. What the earlier
tokens are is told anew in each step, so a preemption or a replay changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miniserve.kernels.sampling import SamplingOperators
from miniserve.kernels.transfer import to_device
from miniserve.sampling_params import SamplingParams

# Tokens of a row, and a number for each: int64 and fp32 [n].
_Elements = tuple[NDArray[np.int64], NDArray[np.float32]]
_NOTHING: _Elements = (np.empty(0, np.int64), np.empty(0, np.float32))


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
    if any(row.changes_scores for row in rows):
        logits = logits.clone()
        _change_scores(logits, rows)
    if all(row.mask is None for row in rows):
        return logits
    return operators.forbid(logits, _masks(rows, logits))  # last: nothing makes up for what they forbid


def _change_scores(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    """Bans, biases and penalties, to `scores`, fp32 [num_rows, vocab_size], in place.

    All rows at once: on a device, a transfer and a few operators for each row would take longer than the model.
    """
    elements = {change: [change.elements(row) for row in rows] for change in _CHANGES}
    there = [change for change in _CHANGES if any(len(token_ids) for token_ids, _ in elements[change])]
    arrays: dict[str, np.ndarray] = {}
    for change in there:
        arrays |= _pack(change.name, elements[change])
    on_device = to_device(arrays, scores.device)
    for change in there:
        rows_and_ids = on_device[f"{change.name} rows"], on_device[f"{change.name} ids"]
        scores[rows_and_ids] = change.apply(scores[rows_and_ids], on_device[f"{change.name} values"])


def _pack(name: str, of_rows: Sequence[_Elements]) -> dict[str, np.ndarray]:
    """All rows' elements, one after the other: which row, which token, which number."""
    return {
        f"{name} rows": np.repeat(np.arange(len(of_rows)), [len(token_ids) for token_ids, _ in of_rows]),
        f"{name} ids": np.concatenate([token_ids for token_ids, _ in of_rows]),
        f"{name} values": np.concatenate([values for _, values in of_rows]),
    }


def _bans(row: SampleRow) -> _Elements:
    banned_ids = _banned_ids(row)
    return _NOTHING if not banned_ids else _elements(banned_ids, [float("-inf")] * len(banned_ids))


def _biases(row: SampleRow) -> _Elements:
    biases = row.sampling.logit_bias
    return _NOTHING if not biases else _elements(biases.keys(), biases.values())


def _repetitions(row: SampleRow) -> _Elements:
    """What is divided by, or multiplied with where the score is not positive (Keskar et al., 2019, CTRL)."""
    if row.sampling.repetition_penalty == 1.0:
        return _NOTHING
    seen = np.unique([*row.prompt_ids, *row.output_ids])
    # As fp32, the smallest legal penalties would be 0, and 0 times -inf, a banned token, is NaN.
    penalty = max(row.sampling.repetition_penalty, float(np.finfo(np.float32).tiny))
    return _elements(seen, np.full(len(seen), penalty))


def _counts(row: SampleRow) -> _Elements:
    """What is subtracted: OpenAI's API reference, c[j] * frequency + (c[j] > 0) * presence."""
    sampling = row.sampling
    if not (sampling.frequency_penalty or sampling.presence_penalty):
        return _NOTHING
    token_ids, counts = np.unique(row.output_ids, return_counts=True)
    return _elements(token_ids, sampling.frequency_penalty * counts + sampling.presence_penalty)


def _elements(token_ids: Iterable[int], values: Iterable[float]) -> _Elements:
    return np.fromiter(token_ids, np.int64), np.fromiter(values, np.float32)


def _divide(scores: Tensor, penalties: Tensor) -> Tensor:
    """A quotient may not become infinite, as what is not finite counts as a fault of the model."""
    changed = torch.where(scores > 0, scores / penalties, scores * penalties)
    return changed.clamp_(max=torch.finfo(scores.dtype).max)


@dataclass(frozen=True, slots=True)
class _Change:
    """Which tokens of a row are changed, each with a number; and how scores are changed by these numbers."""

    name: str
    elements: Callable[[SampleRow], _Elements]
    apply: Callable[[Tensor, Tensor], Tensor]


# In the order in which they are made.
_CHANGES = (
    _Change("bans", _bans, lambda _scores, values: values),
    _Change("biases", _biases, torch.add),
    _Change("repetitions", _repetitions, _divide),
    _Change("counts", _counts, torch.sub),
)


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
