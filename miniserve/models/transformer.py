"""The transformer. The file to read first: what a decoder-only language model computes, for every family.

A step's tokens, of all its requests, lie one after the other on a single axis; there is no batch dimension and no
padding. Only attention knows where one request ends and the next begins, through its `plan`. The residual stream is
fp32, matrices and activations between them are in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from miniserve.attention.base import AttentionPlan, LayerKVCache
from miniserve.kernels.native import NativeKernels
from miniserve.kernels.quantised import Grid, Scheme
from miniserve.layers.attention import Attention
from miniserve.layers.embedding import TokenMatrix
from miniserve.layers.linear import Linear
from miniserve.layers.mlp import MLP
from miniserve.layers.norm import RMSNorm
from miniserve.layers.rotary import Rope, RotaryEmbedding
from miniserve.models.config import ModelConfig


class Layer(nn.Module):
    """Attention, then feed-forward, each on a normalised copy of the residual stream and added back to it."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, device=device)
        self.attn = Attention(
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            dtype=dtype,
            device=device,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, device=device)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device)

    def forward(self, residual: Tensor, rope: Rope, plan: AttentionPlan, cache: LayerKVCache) -> None:
        """residual: fp32 [num_tokens, hidden_size], updated in place."""
        self.attn(residual, self.attn_norm, rope, plan, cache)
        self.mlp(residual, self.mlp_norm)


class Transformer(nn.Module):
    """Embedding, layers, final norm, head. Parameters are unfilled until the loader has run.

    `max_positions` bounds the RoPE table; `dtype` is that of matrices, activations and the KV cache.
    """

    def __init__(self, config: ModelConfig, *, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed = TokenMatrix(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, max_positions, device=device)
        self.layers = nn.ModuleList(Layer(config, dtype=dtype, device=device) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, device=device)
        self.head: TokenMatrix | None = None  # None: the embedding matrix serves
        if not config.tie_word_embeddings:
            self.head = TokenMatrix(config.vocab_size, config.hidden_size, dtype=dtype, device=device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, caches: Sequence[LayerKVCache]
    ) -> Tensor:
        """Run the layers over a step's tokens, writing their KV.

        Args:
            token_ids, positions: int64 [num_tokens].
            plan: attention of this step.
            caches: one per layer.

        Returns:
            fp32 [num_tokens, hidden_size], before the final norm.
        """
        residual = self.embed.embed(token_ids)
        rope = self.rotary(positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(residual, rope, plan, cache)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [num_rows, vocab_size] for the rows of `forward`'s result that need a next token."""
        return (self.embed if self.head is None else self.head).logits(hidden, self.norm)

    @property
    def bytes_of_step(self) -> int:
        """Memory of the matrices that each step multiplies with."""
        return sum(module.num_bytes for module in map(self.get_submodule, self.multiplied_modules()))  # type: ignore[misc]

    def packed_modules(self) -> frozenset[str]:
        """The names of the modules whose matrix gets a layout of its own."""
        return self.multiplied_modules() | {"embed"}

    def multiplied_modules(self) -> frozenset[str]:
        """Those of them that each step multiplies with: not an embedding that is no head as well."""
        return frozenset(name for name, module in self.named_modules() if self._is_multiplied(module))

    def _is_multiplied(self, module: nn.Module) -> bool:
        return isinstance(module, Linear) or module is (self.embed if self.head is None else self.head)

    def pack(
        self, name: str, kernels: NativeKernels | None = None, scheme: Scheme | None = None, grid: Grid | None = None
    ) -> None:
        """After loading: give the matrix of a packed module the layout that is fastest, in place of the plain one.

        Args:
            name: of the module.
            kernels: that multiply; None for PyTorch.
            scheme: makes the matrix small, if it is multiplied with: rows that are looked up cost nothing.
            grid: is the matrix, where it is small already; what was loaded into the plain one does not matter then.
        """
        module = self.get_submodule(name)
        assert isinstance(module, Linear | TokenMatrix)
        module.pack(kernels, scheme if self._is_multiplied(module) else None, grid)
