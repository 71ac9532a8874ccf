"""gpt-oss's files: experts stacked in one tensor, as floats or as MXFP4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from miniserve import LLM, SamplingParams
from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.models.checkpoint import open_checkpoint
from miniserve.models.gpt_oss import dequantise_mxfp4
from miniserve.models.loader import load_weights
from miniserve.models.transformer import Transformer
from miniserve.runner.model_runner import ModelRunner
from tests.support import random_prompt, tiny_model

EXPERTS = "model.layers.0.mlp.experts."
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
Change = Callable[[dict[str, Tensor]], None]


def random_codes(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_scales(*shape: int, seed: int) -> Tensor:
    """Powers of two that make weights of about 0.25."""
    return torch.randint(122, 126, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    """Every code, and the smallest and largest exponents that a float32 has."""
    blocks, scales = random_codes(2, 6, 4, 16, seed=0), torch.randint(2, 250, (2, 6, 4), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, size, num_rows]
    for index in range(2):
        assert torch.equal(dequantise_mxfp4(blocks[index], scales[index]), expected[index].T)
    assert len(set(dequantise_mxfp4(blocks[0], scales[0]).flatten().tolist())) > 16


def make_mxfp4(folder: Path, change: Change = lambda _tensors: None) -> dict[str, Tensor]:
    """A folder whose experts are MXFP4, and its tensors with the experts as plain ones."""
    tiny_model(folder, "gpt_oss")
    plain = load_file(folder / "model.safetensors")
    packed = dict(plain)
    for layer in range(3):
        for index, (name, rows, size) in enumerate((("gate_up_proj", 192, 64), ("down_proj", 64, 96))):
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = random_codes(8, rows, size // 32, 16, seed=2 * layer + index)
            scales = random_scales(8, rows, size // 32, seed=2 * layer + index)
            packed[f"{prefix}_blocks"], packed[f"{prefix}_scales"] = blocks, scales
            del packed[prefix]
            plain[prefix] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    change(packed)
    save_file(packed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    return plain


def load(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(str(folder))
    model = Transformer(checkpoint.config, max_positions=64, dtype=torch.float32, device=torch.device("cpu"))
    load_weights(model, checkpoint)
    return {name: parameter.data for name, parameter in model.named_parameters()}


def test_a_checkpoint_of_mxfp4(tmp_path: Path) -> None:
    """Bug kind: gate and up lie in turn; read as halves, the model speaks nonsense."""
    plain = make_mxfp4(tmp_path)
    loaded = load(tmp_path)
    for expert in range(8):
        gate_up = plain[f"{EXPERTS}gate_up_proj"][expert].T
        ours = loaded[f"layers.0.mlp.experts.{expert}.gate_up.weight"]
        assert torch.equal(ours[:96], gate_up[0::2]) and torch.equal(ours[96:], gate_up[1::2])
        down = plain[f"{EXPERTS}down_proj"][expert].T
        assert torch.equal(loaded[f"layers.0.mlp.experts.{expert}.down.weight"], down)


def drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(f"{EXPERTS}{name}")


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(f"{EXPERTS}{name}", tensor)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("down_proj_scales"), "down_proj_scales does not give a scale"),
        (put("down_proj_scales", torch.zeros(8, 64, 2, dtype=torch.uint8)), "down_proj_scales does not give a scale"),
        (put("gate_up_proj_blocks", torch.zeros(8, 192, 32, dtype=torch.uint8)), "gate_up_proj_blocks has shape"),
        (drop("gate_up_proj_bias"), "experts.0.gate_up_proj.bias"),
        (put("down_proj", torch.zeros(8, 96, 64)), "are there twice"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, change: Change, named: str) -> None:
    make_mxfp4(tmp_path, change)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


def test_scales_without_blocks_are_not_passed_over(tmp_path: Path) -> None:
    """Bug: they were taken for read."""
    make_mxfp4(tmp_path, drop("down_proj_blocks"))
    with pytest.raises((CheckpointError, UnsupportedModelError), match="down_proj"):
        load(tmp_path)


def test_mxfp4_is_known_in_this_family_only(tmp_path: Path) -> None:
    tiny_model(tmp_path, "qwen3_moe")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    with pytest.raises(UnsupportedModelError, match="mxfp4"):
        open_checkpoint(str(tmp_path))


OPTIONS: list[dict[str, Any]] = [{"quantization": "int8"}, {"quantization": "int4", "kv_cache_dtype": "int8"}]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("options", OPTIONS, ids=["int8", "int4"])
def test_small_weights(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Experts become small as all layers do, the router does not: it still chooses nearly the same ones."""
    tiny_model(tmp_path, family)
    prompts = [random_prompt(60, seed) for seed in range(3)]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def scores(**options: Any) -> tuple[Tensor, int]:
        llm = LLM(str(tmp_path), dtype="bf16", device="cpu", threads=1, kernels="native", **options)
        runner = llm.parts.engine.runner
        assert isinstance(runner, ModelRunner)
        outputs = llm.generate(prompts, sampling)
        entries = [entry.logprob for output in outputs for entry in output.prompt_logprobs or () if entry is not None]
        return torch.tensor(entries), runner.model.bytes_of_step

    (plain, plain_bytes), (small, small_bytes) = scores(), scores(**options)
    assert small_bytes < 0.8 * plain_bytes
    assert len(plain) == len(small) == 3 * 59
    # Random weights magnify every rounding; scores that had nothing to do with each other would be 1.1 apart.
    assert (plain - small).abs().mean() < (0.2 if options["quantization"] == "int8" else 0.8) * plain.std()
