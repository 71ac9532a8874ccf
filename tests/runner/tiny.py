"""A random model in memory, without a checkpoint."""

from __future__ import annotations

import torch

from miniserve.attention.sdpa import SdpaBackend
from miniserve.layers.rotary import RopeConfig
from miniserve.models.config import LayerConfig, ModelConfig
from miniserve.models.loader import init_dummy_weights
from miniserve.models.transformer import Transformer
from miniserve.runner.kv_cache import allocate_kv_cache
from miniserve.runner.model_runner import ModelRunner

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    family="llama",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rotary_dim=8,
    attention_scale=8**-0.5,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    layers=(LayerConfig(rope=RopeConfig()),) * 2,
    tie_word_embeddings=False,
)


def tiny_runner(*, num_token_ids: int = 40, seed: int | None = 0) -> ModelRunner:
    model = Transformer(CONFIG, max_positions=64, dtype=torch.float32, device=CPU)
    init_dummy_weights(model, seed=0)
    backend = SdpaBackend(torch.float32)
    return ModelRunner(
        model,
        allocate_kv_cache(CONFIG, backend, num_blocks=17, block_size=4, device=CPU),
        backend,
        block_size=4,
        num_token_ids=num_token_ids,
        device=CPU,
        seed=seed,
    )
