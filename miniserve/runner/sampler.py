"""From logits to the next token of each row: greedy, or drawn at random.

Owns where a row's noise comes from. That of a seeded row is a function of its seed and of the output position only:
neither a neighbour in the batch, nor a preemption, nor a replay changes a seeded answer. How tokens are drawn is in
`kernels.sampling`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import isfinite
from random import Random

import torch
from torch import Tensor

from miniserve.kernels import sampling
from miniserve.kernels.native import Draw
from miniserve.kernels.sampling import SamplingOperators
from miniserve.runner.logits_processors import SampleRow, process_logits


class Sampler:
    """Samples one token a row. Holds only the random stream that gives rows without a seed one for each token.

    `operators` do the work: the native kernels, or PyTorch's.
    """

    def __init__(self, device: torch.device, seed: int | None, operators: SamplingOperators = sampling) -> None:
        self.device = device
        self._operators = operators
        self._unseeded = Random(seed)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
        """The chosen token ids; None where there is no choice.

        That is a row that has NaN or +inf, or nothing but -inf; or one whose mask leaves nothing.

        Args:
            logits: fp32 [num_rows, vocab_size], as the model gave them.
            rows: one per row of logits.
        """
        draws = [self._draw(row, logits.shape[-1]) for row in rows]
        likeliest, values = self._operators.largest(logits)
        changed = [index for index, row in enumerate(rows) if row.changes_logits]
        if not changed:
            chosen, allowed = self._choose(logits, likeliest, draws), values
        elif len(changed) == len(rows):
            chosen, allowed = self._choose_changed(logits, rows, draws)
        else:
            unchanged = [None if row.changes_logits else draw for row, draw in zip(rows, draws, strict=True)]
            chosen, allowed = self._choose(logits, likeliest, unchanged), values.clone()
            selected = torch.tensor(changed, device=self.device)
            chosen[selected], allowed[selected] = self._choose_changed(
                logits[selected], [rows[index] for index in changed], [draws[index] for index in changed]
            )
        return [
            int(token_id) if isfinite(value) and (row.mask is None or isfinite(best)) else None
            for row, token_id, value, best in zip(rows, *self._on_host(chosen, values, allowed), strict=True)
        ]

    def _on_host(self, chosen: Tensor, values: Tensor, allowed: Tensor) -> list[list[float]]:
        """Their elements: in one transfer, where it takes one. As fp32, ids are exact up to 2^24."""
        if self.device.type == "cpu":
            return [chosen.tolist(), values.tolist(), allowed.tolist()]
        columns: list[list[float]] = torch.stack((chosen.float(), values, allowed)).tolist()
        return columns

    def _choose_changed(
        self, logits: Tensor, rows: Sequence[SampleRow], draws: Sequence[Draw | None]
    ) -> tuple[Tensor, Tensor]:
        """The tokens of rows that change their logits, int64, and the largest changed logit of each row, fp32."""
        processed = process_logits(logits, rows, self._operators)
        likeliest, values = self._operators.largest(processed)
        return self._choose(processed, likeliest, draws), values

    def _choose(self, logits: Tensor, likeliest: Tensor, draws: Sequence[Draw | None]) -> Tensor:
        if all(draw is None for draw in draws):
            return likeliest
        return self._operators.draw(logits, likeliest, draws)

    def _draw(self, row: SampleRow, vocab_size: int) -> Draw | None:
        """How the row's token is drawn; None where the most probable one is taken."""
        params = row.sampling
        if params.greedy:
            return None
        seed = self._unseeded.getrandbits(63) if params.seed is None else noise_seed(params.seed, row.position)
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        return Draw(params.temperature, top_k, params.top_p, params.min_p, seed)


def noise_seed(seed: int, position: int) -> int:
    """The seed of one output position's noise, spread over 63 bits so that seeds 1, 2, 3 share no noise."""
    key = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
