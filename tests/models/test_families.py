"""What single families say in their files, and what is refused where it makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from miniserve.errors import CheckpointError, ModelLoadError, UnsupportedModelError
from miniserve.models.fields import Fields
from miniserve.models.hf_config import ParsedConfig, parse_config
from miniserve.models.registry import FAMILIES
from tests.models.conftest import TINY

S, F = "sliding_attention", "full_attention"


def parse(architecture: str, **fields: Any) -> ParsedConfig:
    config = {**TINY, "architectures": [architecture], **fields}
    return parse_config(Fields("config.json", config), Fields("generation_config.json", {}))


def windows(architecture: str, **fields: Any) -> list[int | None]:
    return [layer.window for layer in parse(architecture, **fields).config.layers]


def test_mistral_with_layer_types_alternates() -> None:
    """Bug: they were ignored, and all layers slid."""
    assert windows("MistralForCausalLM", sliding_window=16, layer_types=[S, F]) == [16, None]


def test_all_layers_of_qwen3_moe_slide_or_none() -> None:
    """Bug: only those from max_window_layers on did, as in Qwen3."""
    fields = {"sliding_window": 16, "max_window_layers": 1}
    assert windows("Qwen3MoeForCausalLM", use_sliding_window=True, **fields) == [16, 16]
    assert windows("Qwen3MoeForCausalLM", use_sliding_window=False, **fields) == [None, None]


def test_gemma_3_has_no_soft_cap_of_scores() -> None:
    """Bug: a field that the model does not read capped them."""
    config = parse("Gemma3ForCausalLM", attn_logit_softcapping=5.0, final_logit_softcapping=7.0).config
    assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 7.0)
    assert parse("Gemma2ForCausalLM", attn_logit_softcapping=5.0).config.attention_soft_cap == 5.0


def test_gemma_3_in_its_old_spelling() -> None:
    config = parse("Gemma3ForCausalLM", rope_theta=1e6, rope_local_base_freq=5e3, sliding_window_pattern=2).config
    local, whole = (layer.rope for layer in config.layers)
    assert local is not None and whole is not None and (local.theta, whole.theta) == (5e3, 1e6)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("fields", "original", "factor"),
    [
        ({"original_max_position_embeddings": 32}, 32, 4.0),
        ({}, 4096, 128 / 4096),  # what the family's configuration means without it
    ],
)
def test_the_context_before_longrope_is_the_configurations_own(
    fields: dict[str, Any], original: int, factor: float
) -> None:
    """Bug: what stood among the RoPE parameters came first."""
    scaling = {**LONGROPE, "original_max_position_embeddings": 64}
    [rope] = {layer.rope for layer in parse("Phi3ForCausalLM", rope_scaling=scaling, **fields).config.layers}
    assert rope is not None
    assert (rope.original_max_position_embeddings, rope.factor) == (original, factor)


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("SmolLM3ForCausalLM", {"layer_types": [S, F], "sliding_window": 16}, "use_sliding_window is false"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar must be above 0"),
        ("GraniteForCausalLM", {"attention_multiplier": -0.1}, "scale of attention scores must be above 0"),
        ("MistralForCausalLM", {"sliding_window": 10**20}, "sliding_window must be at most 2147483647"),
        ("LlamaForCausalLM", {"vocab_size": 10**12}, "vocab_size must be at most"),
        ("LlamaForCausalLM", {"num_hidden_layers": 10**5}, "100000 layers are more than 1000"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 0}},
            "beta_slow must be above",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "above 1"),
        ("Phi3ForCausalLM", {"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 4}}, r"above 0, got \[0, 0, 0, 0\]"),
        ("Phi3ForCausalLM", {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor must be 4 numbers"),
        ("OlmoForCausalLM", {}, "Olmo2ForCausalLM"),
        (
            "Olmo3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "one RoPE for all layers",
        ),
        ("Gemma3ForCausalLM", {"layer_types": [S]}, "1 entries for 2 layers"),
        ("Gemma3ForCausalLM", {"layer_types": [S, "chunked_attention"]}, "chunked_attention"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of integers"),
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "swiglu_limit 5 is not supported"),
        ("GraniteForCausalLM", {"logits_scaling": 0.0}, "scale of 0"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported for llama"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "at most 1"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(architecture: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        parse(architecture, **fields)


def test_an_unsupported_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse("MambaForCausalLM")
    assert all(name in str(caught.value) for family in FAMILIES for name in family.architectures)


def test_a_model_that_no_memory_holds(tmp_path: Path) -> None:
    """Bug: a traceback of the allocator."""
    import json

    from miniserve import LLM
    from tests.support import write_byte_tokenizer

    config = {**TINY, "hidden_size": 2**30, "intermediate_size": 2**30, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match="does not fit into memory"):
        LLM(str(tmp_path), device="cpu", load_format="dummy", dtype="fp32")
    assert torch.empty(1).numel() == 1
