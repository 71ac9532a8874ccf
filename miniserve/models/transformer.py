"""The transformer. The file to read first: what a decoder-only language model computes, for every family.

A step's tokens, of all its requests, lie one after the other on a single axis; there is no batch dimension and no
padding. Only attention knows where one request ends and the next begins, through its `plan`. The residual stream is
fp32, matrices and activations between them are in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from miniserve.attention.base import AttentionPlan, LayerKVCache
from miniserve.kernels.native import NativeKernels
from miniserve.kernels.quantised import Grid, Scheme
from miniserve.layers.attention import Attention, AttentionShape
from miniserve.layers.branch import Branch
from miniserve.layers.embedding import TokenMatrix
from miniserve.layers.linear import Linear
from miniserve.layers.mlp import MLP
from miniserve.layers.moe import MoE
from miniserve.layers.norm import RMSNorm
from miniserve.layers.rotary import Rope, RopeConfig, RotaryEmbedding
from miniserve.models.config import LayerConfig, ModelConfig


class Layer(nn.Module):
    """Attention, then feed-forward, each on a normalised copy of the residual stream and added back to it."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, device=device)

        def branch() -> Branch:
            return Branch(
                norm() if config.pre_norm else None, norm() if config.post_norm else None, config.residual_scale
            )

        self.rope: RopeConfig | None = layer.rope
        self.attn = Attention(config.hidden_size, _attention_shape(config, layer), dtype=dtype, device=device)
        self.attn_branch = branch()
        self.mlp = _feed_forward(config, layer, dtype=dtype, device=device)
        self.mlp_branch = branch()

    def forward(self, residual: Tensor, rope: Rope | None, plan: AttentionPlan, cache: LayerKVCache) -> None:
        """residual: fp32 [num_tokens, hidden_size], updated in place."""
        self.attn(residual, self.attn_branch, rope, plan, cache)
        self.mlp(residual, self.mlp_branch)


def _feed_forward(config: ModelConfig, layer: LayerConfig, *, dtype: torch.dtype, device: torch.device) -> MLP | MoE:
    hidden_size, activation = config.hidden_size, config.activation
    if layer.sparse:
        assert config.experts is not None, "checked when the checkpoint is parsed"
        return MoE(hidden_size, config.experts, activation=activation, dtype=dtype, device=device)
    size, bias = config.intermediate_size, config.mlp_bias
    return MLP(hidden_size, size, activation=activation, bias=bias, dtype=dtype, device=device)


def _attention_shape(config: ModelConfig, layer: LayerConfig) -> AttentionShape:
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        qk_norm=config.qk_norm,
        qk_norm_eps=config.rms_norm_eps,
        scale=config.attention_scale,
        window=layer.window,
        soft_cap=config.attention_soft_cap,
        sinks=config.sinks,
    )


class Transformer(nn.Module):
    """Embedding, layers, final norm, head. Parameters are unfilled until the loader has run.

    `max_positions` bounds the RoPE tables; `dtype` is that of matrices, activations and the KV cache.
    """

    def __init__(self, config: ModelConfig, *, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed = TokenMatrix(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self.rotaries = {rope: RotaryEmbedding(rope, config.rotary_dim, max_positions, device=device) for rope in ropes}
        self.layers = nn.ModuleList(Layer(config, layer, dtype=dtype, device=device) for layer in config.layers)
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
        residual = self.embed.embed(token_ids, self.config.embedding_scale)
        ropes: dict[RopeConfig | None, Rope | None] = {None: None}
        ropes.update((config, rotary(positions)) for config, rotary in self.rotaries.items())
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            layer(residual, ropes[layer.rope], plan, cache)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [num_rows, vocab_size] for the rows of `forward`'s result that need a next token."""
        logits = (self.embed if self.head is None else self.head).logits(hidden, self.norm)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if self.config.logit_soft_cap:
            logits.div_(self.config.logit_soft_cap).tanh_().mul_(self.config.logit_soft_cap)
        return logits

    @property
    def bytes_of_step(self) -> int:
        """Memory of the matrices that each step multiplies with."""
        return sum(module.num_bytes for module in map(self.get_submodule, self.multiplied_modules()))  # type: ignore[misc]

    def packed_modules(self) -> frozenset[str]:
        """The names of the modules whose matrix gets a layout of its own."""
        return self.multiplied_modules() | {"embed"}

    def small_modules(self) -> frozenset[str]:
        """Those of them that a scheme makes small."""
        return frozenset(name for name, module in self.named_modules() if self._may_be_small(module))

    def multiplied_modules(self) -> frozenset[str]:
        """Those of them that each step multiplies with: not an embedding that is no head as well."""
        return frozenset(name for name, module in self.named_modules() if self._is_multiplied(module))

    def _is_multiplied(self, module: nn.Module) -> bool:
        return isinstance(module, Linear) or module is (self.embed if self.head is None else self.head)

    def _may_be_small(self, module: nn.Module) -> bool:
        return self._is_multiplied(module) and getattr(module, "may_be_small", True)

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
        module.pack(kernels, scheme if self._may_be_small(module) else None, grid)
