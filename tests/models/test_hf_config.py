"""config.json -> ModelConfig: defaults as transformers has them, both spellings, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.models.config import ModelConfig, RopeConfig
from miniserve.models.fields import Fields
from miniserve.models.hf_config import ParsedConfig, parse_config
from tests.models.ropes import only_rope

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ParsedConfig:
    return parse_config(Fields("config.json", config), Fields("generation_config.json", generation or {}))


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("smollm3", "SmolLM3ForCausalLM"),
        ("phi3", "Phi3ForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
        ("olmo3", "Olmo3ForCausalLM"),
        ("granite", "GraniteForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
    ],
)
def test_omitted_fields_mean_what_transformers_says(model_type: str, architecture: str) -> None:
    from transformers import AutoConfig

    shapes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 32,
    }
    reference = AutoConfig.for_model(model_type, **shapes)
    config = parse({"architectures": [architecture], **shapes}).config
    expected_kv_heads = reference.num_key_value_heads or reference.num_attention_heads
    assert config.num_kv_heads == expected_kv_heads
    assert config.head_dim == (getattr(reference, "head_dim", None) or 64 // 32)
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert [layer.window for layer in config.layers] == expected_windows(reference)
    assert [None if rope is None else (rope.type, rope.theta) for rope in ropes(config)] == expected_ropes(reference)
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.eos_token_ids == (set() if reference.eos_token_id is None else {reference.eos_token_id})


def expected_windows(reference: Any) -> list[int | None]:
    window = getattr(reference, "sliding_window", None)
    types = getattr(reference, "layer_types", None) or ["sliding_attention"] * reference.num_hidden_layers
    return [window if layer_type == "sliding_attention" else None for layer_type in types]


def ropes(config: ModelConfig) -> list[RopeConfig | None]:
    return [layer.rope for layer in config.layers]


def expected_ropes(reference: Any) -> list[tuple[str, float] | None]:
    """Type and theta of each layer's; None where it knows no positions."""
    parameters, layers = reference.rope_parameters, range(reference.num_hidden_layers)
    turns = getattr(reference, "no_rope_layers", None) or [1] * reference.num_hidden_layers
    of_layers = [
        parameters.get(reference.layer_types[i], parameters) if "full_attention" in parameters else parameters
        for i in layers
    ]
    return [
        (rope["rope_type"], rope["rope_theta"]) if turn else None for rope, turn in zip(of_layers, turns, strict=True)
    ]


def test_biases_and_norms_per_family(tiny: dict[str, Any]) -> None:
    def switches(architecture: str, **fields: Any) -> tuple[bool | str, ...]:
        config = parse({**tiny, "architectures": [architecture], **fields}).config
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert switches("LlamaForCausalLM") == (False, False, False, "none")
    assert switches("LlamaForCausalLM", attention_bias=True) == (True, True, False, "none")
    assert switches("LlamaForCausalLM", mlp_bias=True) == (False, False, True, "none")
    assert switches("MistralForCausalLM", attention_bias=True) == (False, False, False, "none")
    assert switches("Qwen2ForCausalLM") == (True, False, False, "none")
    assert switches("Qwen3ForCausalLM") == (False, False, False, "heads")
    assert switches("Qwen3ForCausalLM", attention_bias=True) == (True, True, False, "heads")


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_both_spellings_of_rope_give_the_same(tiny: dict[str, Any], spelling: dict[str, Any]) -> None:
    """Bug kind: a reader of one spelling only dropped the scaling of files in the other, and ran unscaled."""
    rope = only_rope(parse({**tiny, **spelling}).config)
    assert (rope.type, rope.theta, rope.factor) == ("llama3", 5e5, 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert rope.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "proportional", "factor": 2.0}, "proportional"),
        ({"rope_type": "xpos", "factor": 2.0}, "xpos"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}, "layer type"),
    ],
)
def test_unknown_rope_is_refused_by_name(tiny: dict[str, Any], scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse({**tiny, "rope_parameters": scaling})


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3"])
def test_a_scaling_without_its_factor_is_refused(tiny: dict[str, Any], rope_type: str) -> None:
    with pytest.raises(CheckpointError, match="factor is missing"):
        parse({**tiny, "rope_scaling": {"rope_type": rope_type}})


@pytest.mark.parametrize("missing", ["low_freq_factor", "high_freq_factor"])
def test_llama3_needs_all_of_its_parameters(tiny: dict[str, Any], missing: str) -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        parse({**tiny, "rope_scaling": {"rope_type": "llama3", **scaling}})


def test_yarn_reaches_its_scaled_context(tiny: dict[str, Any]) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse({**tiny, "rope_scaling": yarn}).config.max_position_embeddings == 512
    longer = {**tiny, "max_position_embeddings": 4096, "rope_scaling": yarn}
    assert parse(longer).config.max_position_embeddings == 4096


def test_yarn_without_its_original_context_takes_the_models_own(tiny: dict[str, Any]) -> None:
    rope = only_rope(parse({**tiny, "rope_scaling": {"type": "yarn", "factor": 4.0}}).config)
    assert rope.original_max_position_embeddings == 128


def test_dynamic_rope_stays_within_the_original_context(tiny: dict[str, Any]) -> None:
    parsed = parse({**tiny, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert parsed.config.max_position_embeddings == 128
    assert "128 tokens" in parsed.notes[0]


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 50}, [50, 50]),
        ("MistralForCausalLM", {"sliding_window": None}, [None, None]),
        ("LlamaForCausalLM", {"sliding_window": 50}, [None, None]),
        ("Phi3ForCausalLM", {"sliding_window": 50}, [50, 50]),
        ("Qwen2ForCausalLM", {"sliding_window": 50}, [None, None]),
        ("Qwen2ForCausalLM", {"sliding_window": 50, "use_sliding_window": True}, [None, None]),
        ("Qwen2ForCausalLM", {"sliding_window": 50, "use_sliding_window": True, "max_window_layers": 1}, [None, 50]),
        ("Qwen3ForCausalLM", {"sliding_window": 50, "use_sliding_window": True, "max_window_layers": 0}, [50, 50]),
        ("Gemma3ForCausalLM", {"sliding_window": 50, "sliding_window_pattern": 2}, [50, None]),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, [None, 4096]),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 50,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "full_attention"],
            },
            [None, None],
        ),
    ],
)
def test_which_layers_have_a_window(
    tiny: dict[str, Any], architecture: str, fields: dict[str, Any], windows: list[int | None]
) -> None:
    parsed = parse({**tiny, "architectures": [architecture], **fields})
    assert [layer.window for layer in parsed.config.layers] == windows
    assert parsed.config.max_position_embeddings == 128 and not parsed.notes


def test_end_tokens_are_the_union_of_both_files(tiny: dict[str, Any]) -> None:
    """Bug kind: the model ended a turn with the second id of generation_config.json and ran on."""
    assert parse({**tiny, "eos_token_id": 7}, {"eos_token_id": [8, 9]}).config.eos_token_ids == {7, 8, 9}
    assert parse({**tiny, "eos_token_id": [7]}).config.eos_token_ids == {7}
    assert parse({**tiny, "eos_token_id": None}, {"eos_token_id": 0}).config.eos_token_ids == {0}


def test_head_dim_is_explicit_or_derived(tiny: dict[str, Any]) -> None:
    assert parse({**tiny, "head_dim": 16}).config.head_dim == 16
    assert parse({**tiny, "head_dim": None}).config.head_dim == 8
    assert parse({**tiny, "architectures": ["Qwen3ForCausalLM"]}).config.head_dim == 128


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act gelu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, UnsupportedModelError, "gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModelError, "fp8"),
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedModelError, "Mamba.*LlamaForCausalLM.*Qwen3"),
        ({"architectures": None}, CheckpointError, "architectures is missing"),
        ({"hidden_size": None}, CheckpointError, "hidden_size is missing"),
        ({"vocab_size": "many"}, CheckpointError, "vocab_size must be a positive integer, got 'many'"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, CheckpointError, "4 attention heads cannot share 3"),
        ({"head_dim": 7}, CheckpointError, "pairs of dimensions, and a head has 7"),
        ({"rms_norm_eps": "x"}, CheckpointError, "rms_norm_eps"),
        ({"rope_theta": 0.5}, CheckpointError, "rope_theta"),
        ({"eos_token_id": ["x"]}, CheckpointError, "eos_token_id"),
        ({"tie_word_embeddings": 1}, CheckpointError, "tie_word_embeddings"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    tiny: dict[str, Any], fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        parse({**tiny, **fields})
