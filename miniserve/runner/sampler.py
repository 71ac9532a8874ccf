"""From logits to the next token of each row: greedy, or drawn at random by the Gumbel-max trick.

argmax(log p + g) with g = -log(e), e ~ Exp(1), draws from p (Gumbel, 1954), with no cumulative sums over the
vocabulary. The noise of a seeded row is a function of its seed and of the output position only: neither a neighbour in
the batch, nor a preemption, nor a replay changes a seeded answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miniserve.kernels.native import NativeKernels
from miniserve.runner.logits_processors import SampleRow, process_logits
from miniserve.sampling_params import SamplingParams

# Top-p looks at this many of the most probable tokens first, and sorts the whole vocabulary only when they do not
# add up to top_p. Same result; a full sort costs more than a small model's whole step on a CPU.
_TOP_P_CANDIDATES = 1024


class Sampler:
    """Samples one token a row. Holds only the random stream of rows that have no seed.

    `kernels` find the largest logit faster than PyTorch does; without them, PyTorch does.
    """

    def __init__(self, device: torch.device, seed: int | None, kernels: NativeKernels | None = None) -> None:
        self.device = device
        self._largest = _largest if kernels is None else kernels.largest
        self._unseeded = torch.Generator(device)
        if seed is None:
            self._unseeded.seed()
        else:
            self._unseeded.manual_seed(seed)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
        """The chosen token ids; None where there is no choice.

        That is a row that has NaN or +inf, or nothing but -inf; or one whose mask leaves nothing.

        Args:
            logits: fp32 [num_rows, vocab_size], as the model gave them.
            rows: one per row of logits.
        """
        chosen, values = self._largest(logits)
        finite = values.isfinite()  # the largest of a row with NaN is NaN
        changed = [index for index, row in enumerate(rows) if row.changes_logits]
        if changed:
            selected = torch.tensor(changed, device=self.device)
            processed = process_logits(logits[selected], [rows[index] for index in changed])
            chosen[selected], values = self._largest(processed)
            unmasked = torch.tensor([rows[index].mask is None for index in changed], device=self.device)
            finite[selected] &= unmasked | values.isfinite()
            logits = logits.index_copy(0, selected, processed)
        random = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        if random:
            selected = torch.tensor(random, device=self.device)
            chosen[selected] = self._draw(logits[selected], [rows[index] for index in random])
        token_ids, is_finite = torch.stack((chosen, finite.long())).tolist()  # one transfer for both
        return [token_id if ok else None for token_id, ok in zip(token_ids, is_finite, strict=True)]

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """int64 [num_rows], one token drawn from each row's tempered and filtered distribution."""
        temperature = self._column([row.sampling.temperature for row in rows])
        scores = filter_logits(logits / temperature, [row.sampling for row in rows])
        return (scores + self._gumbel_noise(scores, rows)).argmax(dim=-1)

    def _gumbel_noise(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        noise = torch.empty_like(scores).exponential_(generator=self._unseeded)
        for index, row in enumerate(rows):
            if row.sampling.seed is not None:
                generator = torch.Generator(self.device)
                generator.manual_seed(noise_seed(row.sampling.seed, row.position))
                noise[index].exponential_(generator=generator)
        # An exact 0 would be infinite noise, and NaN where the token was filtered out.
        return noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_().neg_()

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).unsqueeze(1)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """ids and values of the first of the largest: as argmax, and three times as fast on a CPU."""
    best = logits.max(dim=-1)
    return best.indices, best.values


def noise_seed(seed: int, position: int) -> int:
    """The generator seed of one output position, spread over 63 bits so that seeds 1, 2, 3 share no noise."""
    key = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def filter_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Tokens that top-k, top-p and min-p exclude, in that order, become -inf. fp32 [num_rows, vocab_size].

    Top-p counts probabilities after top-k, and keeps the token that crosses p. The most probable token always stays.
    """
    chosen = [index for index, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0]
    if not chosen:
        return logits
    rows = torch.tensor(chosen, device=logits.device)
    return logits.index_copy(0, rows, _filter_rows(logits[rows], [params[index] for index in chosen]))


def _filter_rows(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`filter_logits` for rows that all have a filter."""
    vocab_size = logits.shape[-1]
    limits = FilterLimits.of(params, vocab_size, logits.device)
    width = min(vocab_size, max(_TOP_P_CANDIDATES, *(p.top_k for p in params)))
    filtered = _filter_candidates(logits, limits, width)
    if filtered is None:
        filtered = _filter_candidates(logits, limits, vocab_size)
    assert filtered is not None, "nothing lies beyond the whole vocabulary"
    return filtered


@dataclass(frozen=True, slots=True)
class FilterLimits:
    """The three filters as columns [num_rows, 1]; a filter that is off keeps everything."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> FilterLimits:
        """The limits of each row, on `device`."""
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        # Rounding may carry a cumulative probability to 1 early: top_p 1 has to mean all of them.
        top_p = [p.top_p if p.top_p < 1.0 else float("inf") for p in params]
        min_p = [p.min_p for p in params]
        return cls(*(torch.tensor(column, device=device).unsqueeze(1) for column in (top_k, top_p, min_p)))


def _filter_candidates(logits: Tensor, limits: FilterLimits, width: int) -> Tensor | None:
    """Filter with only the `width` most probable tokens sorted; None when that cannot tell what to keep."""
    vocab_size = logits.shape[-1]
    values, token_ids = logits.topk(width, dim=-1)  # [num_rows, width], most probable first
    in_top_k = torch.arange(width, device=logits.device) < limits.top_k
    values = values.masked_fill(~in_top_k, float("-inf"))
    has_top_k = limits.top_k < vocab_size
    total = torch.where(has_top_k, values.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    probs = (values - total).exp()
    more_probable = probs.cumsum(-1) - probs  # the probability of all tokens before this one
    keep = in_top_k & (more_probable < limits.top_p) & (probs >= limits.min_p * probs[:, :1])
    keep[:, 0] = True
    if width < vocab_size and bool((keep[:, -1:] & ~has_top_k).any()):
        return None  # the last of the sorted tokens is kept, so the next one may be too
    filtered = torch.full_like(logits, float("-inf"))
    return filtered.scatter_(-1, token_ids, values.masked_fill(~keep, float("-inf")))
