"""The compiled operators, as Python calls them: matrices in the kernels' layout, and attention over a paged cache.

The operators are in `torch.ops.miniserve_<instruction set>_<key>`, their checks in `csrc/register_*.cpp`, and each has
a twin in `reference`. They work on dense CPU tensors of fp32 or bf16, release the interpreter lock, and run on torch's
threads. A result never depends on what else is computed in the same call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miniserve.kernels.layout import huge_pages, interleaved, padded, round_up

MAX_HEAD_DIM = 512
DTYPES = (torch.float32, torch.bfloat16)
# What a model computes with: see `recording`.
_RECORDED = (
    "linear",
    "feed_forward",
    "add",
    "normalise",
    "linear_quantised",
    "unpack_columns",
    "unpack_quantised_columns",
    "attention",
)
_OPERATORS = (
    *_RECORDED,
    "pack",
    "pack_grid",
    "forbid",
    "largest_of_rows",
    "token_logprobs",
    "draw",
)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm in front of a product: weight fp32 [size], and epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What is done to queries and keys before attention.

    Attributes:
        rope: fp32 [max_positions, 2, rotary_dim], cos and signed sin of each position; None leaves heads unrotated.
        q_norm, k_norm: fp32 [head_dim], weights of the RMSNorm of each head; None for none.
        eps: of both norms.
    """

    rope: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where a step's tokens live: see `AttnMetadata`, whose tensors these are."""

    query_start_loc: Tensor  # int32 [num_reqs + 1]
    seq_lens: Tensor  # int32 [num_reqs]
    block_tables: Tensor  # int64 [num_reqs, max_blocks]


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token of a row of logits is drawn at random; the filters come in this order, each over what is left.

    Attributes:
        temperature: more than 0.
        top_k: how many of the most probable tokens stay; 0 for all.
        top_p: the most probable ones stay that it takes to reach this together; 1 for all.
        min_p: those stay that have at least this times the largest probability.
        seed: of the row's noise, in [0, 2^63). The same seed gives the same noise on every device.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @property
    def has_filter(self) -> bool:
        """Whether any token may be left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


_NO_DRAW = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class NativeKernels:
    """The operators of one compiled library, for `instruction_set`. Loaded once in a process.

    Attributes:
        recorded: the full names of the operators that recordings keep.
    """

    def __init__(self, instruction_set: str, path: Path, namespace: str) -> None:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        self.instruction_set = instruction_set
        ops = getattr(torch.ops, namespace)
        # Looked up once: a call takes a few microseconds, and a step makes hundreds.
        self.linear: Any = ops.linear.default
        self.feed_forward: Any = ops.feed_forward.default
        self._add: Any = ops.add.default
        self._normalise: Any = ops.normalise.default
        self.pack: Any = ops.pack.default
        self.unpack_columns: Any = ops.unpack_columns.default
        self.linear_quantised: Any = ops.linear_quantised.default
        self.pack_grid: Any = ops.pack_grid.default
        self.unpack_quantised_columns: Any = ops.unpack_quantised_columns.default
        self.attention: Any = ops.attention.default
        self.begin_recording: Any = ops.begin_recording.default
        self.end_recording: Any = ops.end_recording.default
        self.replay: Any = ops.replay.default
        self.forget: Any = ops.forget.default
        self._forbid: Any = ops.forbid.default
        self._largest_of_rows: Any = ops.largest_of_rows.default
        self._token_logprobs: Any = ops.token_logprobs.default
        self._draw: Any = ops.draw.default
        self.recorded = frozenset(f"{namespace}::{name}" for name in _RECORDED)
        _register_fakes(namespace)

    def attend(
        self,
        qkv: Tensor,
        num_kv_heads: int,
        transform: HeadTransform,
        cache: Tensor,
        step: PagedStep,
        *,
        scale: float,
        soft_cap: float = 0.0,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Normalise and rotate heads, write keys and values to the cache, and attend causally.

        Args:
            qkv: [num_tokens, q | k | v heads, head_dim]; queries and keys are transformed in place.
            num_kv_heads: how many of the heads are keys, and how many values.
            transform: what is done to queries and keys.
            cache: of shape `cache_shape`, in the dtype of `qkv` or int8, written in place.
            step: where the tokens live.
            scale: of the scores.
            soft_cap: scores become soft_cap x tanh(score / soft_cap); 0 for none.
            window: tokens that a query sees, its own included; 0 for all.
            sinks: fp32 [num_heads], a score of each head that takes part in the softmax without a value.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        out = qkv.new_empty((qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads, qkv.shape[2]))
        self.attention(
            qkv,
            num_kv_heads,
            transform.rope,
            transform.q_norm,
            transform.k_norm,
            transform.eps,
            scale,
            soft_cap,
            window,
            sinks,
            cache,
            step.query_start_loc,
            step.seq_lens,
            step.block_tables,
            out,
        )
        return out

    def add_(self, residual: Tensor, x: Tensor, norm: Norm | None = None, scale: float = 1.0) -> None:
        """residual += scale x norm(x), both [num_rows, size]: fp32, and x also bf16."""
        self._add(residual, x, None if norm is None else norm.weight, 0.0 if norm is None else norm.eps, scale)

    def normalise_(self, x: Tensor, first: int, norm: Norm) -> None:
        """The norm of columns [first, first + its size) of x [num_rows, num_columns], fp32 or bf16, in place."""
        self._normalise(x, first, norm.weight, norm.eps)

    def forbid(self, logits: Tensor, masks: Tensor) -> Tensor:
        """See `sampling.forbid`."""
        out = torch.empty(logits.shape, dtype=torch.float32)
        self._forbid(logits, masks, out)
        return out

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of fp32 logits [num_rows, size], the first largest: ids int64 and values fp32, each [num_rows].

        The value of a row with NaN is NaN.
        """
        ids = torch.empty(len(logits), dtype=torch.int64)
        values = torch.empty(len(logits), dtype=torch.float32)
        self._largest_of_rows(logits, ids, values)
        return ids, values

    def draw(self, logits: Tensor, likeliest: Tensor, draws: Sequence[Draw | None]) -> Tensor:
        """See `sampling.draw`; the noise is that of `sampling.uniform_noise`."""
        ids = likeliest.clone()
        rows = [_NO_DRAW if draw is None else draw for draw in draws]
        self._draw(
            logits,
            torch.tensor([row.temperature for row in rows], dtype=torch.float32),
            torch.tensor([row.top_k for row in rows], dtype=torch.int64),
            torch.tensor([row.top_p for row in rows], dtype=torch.float32),
            torch.tensor([row.min_p for row in rows], dtype=torch.float32),
            torch.tensor([row.seed for row in rows], dtype=torch.int64),
            ids,
        )
        return ids

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `sampling.token_logprobs`."""
        num_rows = len(logits)
        ranks = torch.empty(num_rows, dtype=torch.int32)
        logprobs = torch.empty((num_rows, 1 + num_top), dtype=torch.float32)
        top_ids = torch.empty((num_rows, num_top), dtype=torch.int32)
        self._token_logprobs(logits, token_ids, ranks, logprobs, top_ids)
        return ranks, logprobs, top_ids


# As the operators take them: x, norm and epsilon; and epilogue, activation and out.
RowArguments = tuple[Tensor, Tensor | None, float]
OutputArguments = tuple[str, str, Tensor]


class Matrix(ABC):
    """A weight [out_features, in_features] in a layout of the kernels, with the products that a transformer needs.

    Attributes:
        kernels: that multiply.
        dtype: of the results, and of rows that are not fp32.
    """

    def __init__(self, kernels: NativeKernels, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        self.kernels = kernels
        self.out_features, self.in_features, self.dtype = out_features, in_features, dtype

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the matrix."""

    @abstractmethod
    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows `ids` int64 [n] of the plain matrix, times `scale`, as fp32 [n, in_features]."""

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """norm(x) W^T + b. x: [num_rows, in_features], fp32 or `dtype` -> [num_rows, out_features]."""
        out = torch.empty((x.shape[0], self.out_features), dtype=self.dtype)
        self._product(x, norm, "store", out)
        return out

    def logits(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """The same in fp32, not rounded to `dtype`."""
        out = torch.empty((x.shape[0], self.out_features), dtype=torch.float32)
        self._product(x, norm, "store", out)
        return out

    def add_to_(self, residual: Tensor, x: Tensor) -> None:
        """residual += x W^T + b, with residual fp32 [num_rows, out_features]."""
        self._product(x, None, "add", residual)

    def gate(self, x: Tensor, norm: Norm | None = None, activation: str = "silu") -> Tensor:
        """activation(gate) x up of a matrix made with `gate` -> [num_rows, out_features / 2].

        Activations are those of `reference.ACTIVATIONS`.
        """
        out = torch.empty((x.shape[0], self.out_features // 2), dtype=self.dtype)
        self._product(x, norm, "gate", out, activation)
        return out

    def feed_forward_(self, residual: Tensor, norm: Norm, down: Matrix, activation: str = "silu") -> None:
        """residual += down(activation(gate) x up of norm(residual)), by a matrix made with `gate`; residual is fp32."""
        down.add_to_(residual, self.gate(residual, norm, activation))

    def _product(self, x: Tensor, norm: Norm | None, epilogue: str, out: Tensor, activation: str = "silu") -> None:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        self._run((x, weight, eps), (epilogue, activation, out))

    @abstractmethod
    def _run(self, rows: RowArguments, output: OutputArguments) -> None:
        """One call of the operator; its columns are `out_features`."""


class PackedMatrix(Matrix):
    """A matrix of fp32 or bf16, in its own dtype.

    Made of weight [out_features, in_features], and bias [out_features] or None. With `gate`, the rows are those of two
    matrices of the same size, gate and up, one after the other.
    """

    def __init__(
        self, kernels: NativeKernels, weight: Tensor, bias: Tensor | None = None, *, gate: bool = False
    ) -> None:
        super().__init__(kernels, weight.shape[0], weight.shape[1], weight.dtype)
        if gate:
            weight = interleaved(weight)
            bias = None if bias is None else interleaved(bias)
        columns = round_up(weight.shape[0])
        self._packed = huge_pages(columns * round_up(self.in_features), weight.dtype)
        kernels.pack(weight.contiguous(), self._packed)
        self._bias = None if bias is None else padded(bias.float(), columns)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix."""
        return self._packed.nbytes

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """As `Matrix.rows`."""
        out = torch.empty((len(ids), self.in_features), dtype=torch.float32)
        self.kernels.unpack_columns(self._packed, self.out_features, ids, scale, out)
        return out

    def feed_forward_(self, residual: Tensor, norm: Norm, down: Matrix, activation: str = "silu") -> None:
        """As `Matrix.feed_forward_`; in one call, where `down` is in its own dtype too."""
        if not isinstance(down, PackedMatrix):
            super().feed_forward_(residual, norm, down, activation)
            return
        self.kernels.feed_forward(
            residual,
            self._packed,
            self._bias,
            down._packed,
            down._bias,
            down.in_features,
            norm.weight,
            norm.eps,
            activation,
        )

    def _run(self, rows: RowArguments, output: OutputArguments) -> None:
        x, *norm = rows
        self.kernels.linear(x, self._packed, self.out_features, self._bias, *norm, *output)


def _register_fakes(namespace: str) -> None:
    """For tracing: each operator only writes to what it is given, so its fake does nothing."""
    for name in _OPERATORS:
        torch.library.register_fake(f"{namespace}::{name}", _nothing)


def _nothing(*_args: object) -> None:
    return None
