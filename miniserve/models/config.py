"""One normalised description of every model family: what the transformer needs to know, and nothing else.

Families translate a checkpoint's own spelling (config.json, GGUF metadata) into a `ModelConfig`; the transformer
and the layers read only this. It does not know files, devices or dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

from miniserve.layers.rotary import RopeConfig

__all__ = ["ModelConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a decoder-only transformer.

    Attributes:
        max_position_embeddings: the longest sequence for which the model's attention is exact as implemented.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: RMSNorm over each head of q and k, before RoPE (Qwen3).
        tie_word_embeddings: the output head is the embedding matrix.
        eos_token_ids: from the model's config and generation config; the tokenizer's is added later.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: frozenset[int] = frozenset()

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
