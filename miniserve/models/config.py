"""One normalised description of every model family: what the transformer needs to know, and nothing else.

Families translate a checkpoint's own spelling (config.json, GGUF metadata) into a `ModelConfig`; the transformer
and the layers read only this. It does not know files, devices or dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

from miniserve.layers.attention import QKNorm
from miniserve.layers.mlp import Activation
from miniserve.layers.moe import ExpertsConfig
from miniserve.layers.rotary import RopeConfig

__all__ = ["ExpertsConfig", "LayerConfig", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What sets one layer apart from the others.

    Attributes:
        rope: how positions turn its queries and keys; None leaves them as they are (SmolLM3).
        window: how many tokens a query sees, its own included; None for all.
        sparse: its feed-forward is a mixture of experts.
    """

    rope: RopeConfig | None
    window: int | None = None
    sparse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a decoder-only transformer.

    Attributes:
        layers: one for each.
        rotary_dim: how many dimensions of a head turn with the position, the first ones.
        attention_scale: of the scores.
        max_position_embeddings: the longest sequence for which the model's attention is exact as implemented.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: RMSNorm of q and k before RoPE: of each head (Qwen3), or of all heads as one vector (OLMo 2).
        sinks: attention has a learnt score per head without a value (gpt-oss).
        pre_norm, post_norm: RMSNorm in front of attention and feed-forward, and on what they add to the stream.
        activation: of the feed-forward's gate.
        embedding_scale, residual_scale, logit_scale: factors on the embedding, on what each block adds to the residual
            stream, and on the logits.
        attention_soft_cap, logit_soft_cap: c in c x tanh(x / c) of scores and of logits; 0 for none.
        experts: of the sparse layers.
        tie_word_embeddings: the output head is the embedding matrix.
        eos_token_ids: from the model's config and generation config; the tokenizer's is added later.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    attention_scale: float
    rms_norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    sinks: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    experts: ExpertsConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def num_layers(self) -> int:
        """How many."""
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token takes in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size
