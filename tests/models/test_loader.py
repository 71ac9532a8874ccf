"""Tensors into fused parameters: right values, nothing left over, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.kernels.quantised import Grid
from miniserve.models.checkpoint import Checkpoint, open_checkpoint
from miniserve.models.gguf import GGUFFile
from miniserve.models.loader import init_dummy_weights, load_weights
from miniserve.models.transformer import Transformer

LAYER0 = "model.layers.0."
Tensors = dict[str, Tensor]
Save = Callable[..., Path]


@pytest.fixture
def tensors() -> Tensors:
    """Every tensor that conftest's untied Llama needs, under Hugging Face's names."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (96, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (96, 32),
    }
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {
            f"{layer}.input_layernorm.weight": (32,),
            f"{layer}.self_attn.q_proj.weight": (32, 32),
            f"{layer}.self_attn.k_proj.weight": (16, 32),
            f"{layer}.self_attn.v_proj.weight": (16, 32),
            f"{layer}.self_attn.o_proj.weight": (32, 32),
            f"{layer}.post_attention_layernorm.weight": (32,),
            f"{layer}.mlp.gate_proj.weight": (64, 32),
            f"{layer}.mlp.up_proj.weight": (64, 32),
            f"{layer}.mlp.down_proj.weight": (32, 64),
        }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def save(tiny: dict[str, Any], write_json: Callable[[str, Any], Path], tmp_path: Path) -> Save:
    """Write a checkpoint folder of the given shards; keyword arguments change config.json."""

    def save(*shards: Tensors, **fields: Any) -> Path:
        write_json("config.json", {**tiny, **fields})
        if len(shards) == 1:
            save_file(shards[0], tmp_path / "model.safetensors")
            return tmp_path
        weight_map: dict[str, str] = {}
        for index, shard in enumerate(shards):
            save_file(shard, tmp_path / f"shard-{index}.safetensors")
            weight_map |= dict.fromkeys(shard, f"shard-{index}.safetensors")
        write_json("model.safetensors.index.json", {"weight_map": weight_map})
        return tmp_path

    return save


def build(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Transformer:
    return Transformer(checkpoint.config, max_positions=16, dtype=dtype, device=torch.device("cpu"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    checkpoint = open_checkpoint(str(folder))
    model = build(checkpoint, dtype)
    load_weights(model, checkpoint)
    return model


def parameters(model: Transformer) -> Tensors:
    return dict(model.named_parameters())


def test_tensors_land_in_their_rows(save: Save, tensors: Tensors) -> None:
    filled = parameters(load(save(tensors)))
    attn = {part: tensors[f"{LAYER0}self_attn.{part}_proj.weight"] for part in "qkvo"}
    gate, up = (tensors[f"{LAYER0}mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(filled["layers.0.attn.qkv.weight"], torch.cat((attn["q"], attn["k"], attn["v"])))
    assert torch.equal(filled["layers.0.attn.o.weight"], attn["o"])
    assert torch.equal(filled["layers.0.mlp.gate_up.weight"], torch.cat((gate, up)))
    assert torch.equal(filled["layers.0.mlp.down.weight"], tensors[f"{LAYER0}mlp.down_proj.weight"])
    assert torch.equal(filled["layers.0.attn_branch.norm.weight"], tensors[f"{LAYER0}input_layernorm.weight"])
    assert torch.equal(
        filled["layers.1.mlp_branch.norm.weight"], tensors["model.layers.1.post_attention_layernorm.weight"]
    )
    assert torch.equal(filled["embed.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(filled["head.weight"], tensors["lm_head.weight"])
    assert torch.equal(filled["norm.weight"], tensors["model.norm.weight"])


def test_biases_and_head_norms(save: Save, tensors: Tensors) -> None:
    for layer in range(2):
        for part, rows in (("q", 32), ("k", 16), ("v", 16)):
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.randn(rows)
    filled = parameters(load(save(tensors, architectures=["Qwen2ForCausalLM"])))
    expected = torch.cat([tensors[f"{LAYER0}self_attn.{part}_proj.bias"] for part in "qkv"])
    assert torch.equal(filled["layers.0.attn.qkv.bias"], expected)


def test_shards_load_like_one_file(save: Save, tensors: Tensors) -> None:
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]
    filled = parameters(load(save(*halves)))
    assert torch.equal(filled["layers.1.attn.o.weight"], tensors["model.layers.1.self_attn.o_proj.weight"])
    assert torch.equal(filled["layers.0.attn.qkv.weight"][:32], tensors[f"{LAYER0}self_attn.q_proj.weight"])


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_is_the_models(save: Save, tensors: Tensors, stored: torch.dtype) -> None:
    folder = save({name: tensor.to(stored) for name, tensor in tensors.items()})
    filled = parameters(load(folder, torch.bfloat16))
    assert filled["head.weight"].dtype == torch.bfloat16
    assert torch.equal(filled["head.weight"], tensors["lm_head.weight"].to(stored).to(torch.bfloat16))
    assert filled["norm.weight"].dtype == torch.float32


def test_progress_counts_every_tensor(save: Save, tensors: Tensors) -> None:
    checkpoint = open_checkpoint(str(save(tensors)))
    seen: list[tuple[int, int]] = []
    load_weights(build(checkpoint), checkpoint, on_tensor=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(tensors)) for done in range(1, len(tensors) + 1)]


def test_loading_leaves_the_thread_count_alone(save: Save, tensors: Tensors) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        load(save(tensors))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["model.norm.weight", f"{LAYER0}self_attn.k_proj.weight"])
def test_a_missing_tensor_is_named(save: Save, tensors: Tensors, name: str) -> None:
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load(save(tensors))


def test_an_untied_model_without_a_head_is_refused(save: Save, tensors: Tensors) -> None:
    """Bug kind: the head kept whatever the memory held, or the error spoke of something else."""
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing .*tie_word_embeddings is false"):
        load(save(tensors))


def test_an_unused_tensor_is_named(save: Save, tensors: Tensors) -> None:
    """Bug kind: a bias that the config does not announce was dropped in silence."""
    tensors[f"{LAYER0}self_attn.q_proj.bias"] = torch.ones(32)
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.bias is not used by a llama model"):
        load(save(tensors))


def test_many_unused_tensors_are_counted(save: Save, tensors: Tensors) -> None:
    tensors |= {f"model.layers.2.part{index}.weight": torch.ones(1) for index in range(7)}
    with pytest.raises(CheckpointError, match=r"part0.* and 4 more are not used"):
        load(save(tensors))


def test_stored_rope_frequencies_are_harmless(save: Save, tensors: Tensors) -> None:
    tensors[f"{LAYER0}self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    load(save(tensors))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(save: Save, tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert load(save(tensors, tie_word_embeddings=True)).head is None
    tensors["lm_head.weight"][5, 5] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        load(save(tensors, tie_word_embeddings=True))


def test_both_shapes_are_in_the_message(save: Save, tensors: Tensors) -> None:
    tensors[f"{LAYER0}mlp.up_proj.weight"] = torch.ones(32, 64)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape \[32, 64\].* needs \[64, 32\]"):
        load(save(tensors))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(save: Save, tensors: Tensors, value: float) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = value
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight has values .*not finite"):
        load(save(tensors))


def test_values_that_do_not_fit_the_dtype_are_refused(save: Save, tensors: Tensors) -> None:
    """Bug kind: a weight beyond fp16's range became infinite, and every answer a row of exclamation marks."""
    tensors["lm_head.weight"][0, 0] = 1e6
    folder = save(tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* torch\.float16"):
        load(folder, torch.float16)
    load(folder, torch.bfloat16)


def test_a_tensor_in_two_files_is_refused(save: Save, tensors: Tensors) -> None:
    again = {"model.norm.weight": tensors["model.norm.weight"] + 1, "extra": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in both .*shard-0.*shard-1"):
        load(save(tensors, again))


def test_integer_weights_are_refused(save: Save, tensors: Tensors) -> None:
    """Bug kind: packed weights of a quantised checkpoint were read as numbers."""
    tensors["lm_head.weight"] = torch.ones(96, 32, dtype=torch.int8)
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is stored as I8"):
        load(save(tensors))


@pytest.mark.parametrize("kept", [0, 4, 500, -1])
def test_a_truncated_file_is_refused_by_name(save: Save, tensors: Tensors, kept: int) -> None:
    path = save(tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file is truncated or damaged"):
        load(path.parent)


def test_a_checkpoint_that_transformers_saved(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    reference = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
        )
    )
    torch.nn.init.normal_(reference.model.layers[1].self_attn.k_norm.weight)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    model = load(tmp_path)
    assert len(open_checkpoint(str(tmp_path)).weight_files) > 1
    expected = reference.state_dict()
    filled = parameters(model)
    assert torch.equal(filled["layers.1.attn.k_norm.weight"], expected["model.layers.1.self_attn.k_norm.weight"])
    assert torch.equal(filled["layers.1.attn.qkv.weight"][64:96], expected["model.layers.1.self_attn.k_proj.weight"])


def first_layer_of_the_embedded_model(path: Path, vocab_size: int) -> Path:
    """A file with real quantised tensors that loads in a second: no vocabulary, one layer."""
    source = GGUFFile(open_checkpoint("smollm2").path)
    data = np.memmap(source.path, dtype=np.uint8, mode="r")
    writer = gguf.GGUFWriter(path, "llama")
    changed = {"llama.block_count": 1, "llama.vocab_size": vocab_size}
    for key, value in source.metadata.items():
        if key.startswith("llama.") and isinstance(value, int):
            writer.add_uint32(key, changed.get(key, value))
        elif key.startswith("llama.") and isinstance(value, float):
            writer.add_float32(key, value)
    for tensor in source.tensors:
        if tensor.name.startswith(("blk.0.", "token_embd", "output_norm")):
            rows = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(*tensor.shape[:-1], -1)
            rows = rows[:vocab_size] if tensor.name.startswith("token_embd") else rows
            kind = gguf.GGMLQuantizationType(tensor.quant.id)
            writer.add_tensor(tensor.name, np.array(rows), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_tensors_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """Bug kind: rows of q and k stayed in llama.cpp's order, and the model spoke fluent nonsense."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model = load(first_layer_of_the_embedded_model(tmp_path / "a.gguf", vocab_size=512))
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="a.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).state_dict()
    layer = "model.layers.0."
    qkv = torch.cat([reference[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([reference[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert_close(model, "layers.0.attn.qkv.weight", qkv)
    assert_close(model, "layers.0.attn.o.weight", reference[f"{layer}self_attn.o_proj.weight"])
    assert_close(model, "layers.0.mlp.gate_up.weight", gate_up)
    assert_close(model, "layers.0.mlp.down.weight", reference[f"{layer}mlp.down_proj.weight"])
    assert_close(model, "layers.0.mlp_branch.norm.weight", reference[f"{layer}post_attention_layernorm.weight"])
    assert_close(model, "embed.weight", reference["model.embed_tokens.weight"])
    assert_close(model, "norm.weight", reference["model.norm.weight"])


def test_the_embedded_model_loads_completely() -> None:
    checkpoint = open_checkpoint("smollm2")
    model = build(checkpoint, torch.bfloat16)
    seen: list[tuple[int, int]] = []
    load_weights(model, checkpoint, on_tensor=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (272, 272)


def test_whole_numbers_of_a_file_stay_as_they_are(tmp_path: Path) -> None:
    """Also in the order of our rows, and joined where one matrix is several tensors."""
    checkpoint = open_checkpoint(str(first_layer_of_the_embedded_model(tmp_path / "a.gguf", vocab_size=512)))
    expected = load(tmp_path / "a.gguf")
    model = build(checkpoint)
    grids: dict[str, Grid | None] = {}
    load_weights(model, checkpoint, on_module=grids.__setitem__, keep_grids=model.multiplied_modules())
    assert {name for name, grid in grids.items() if grid is not None} == model.multiplied_modules()
    for name, grid in grids.items():
        if grid is not None:
            assert torch.equal(grid.values, parameters(expected)[f"{name}.weight"].data)
    assert_close(model, "norm.weight", parameters(expected)["norm.weight"].data)


def test_modules_come_when_they_are_whole_and_are_let_go(save: Save, tensors: Tensors) -> None:
    """Bug kind: all plain weights were in memory until the last one had its final layout."""
    checkpoint = open_checkpoint(str(save(tensors)))
    model = build(checkpoint)
    seen: list[str] = []
    plain: list[StorageWeakRef] = []

    def on_module(name: str, grid: Grid | None) -> None:
        assert grid is None
        seen.append(name)
        assert all(storage.expired() for storage in plain)  # type: ignore[no-untyped-call]
        if name in model.packed_modules():
            weight = model.get_parameter(f"{name}.weight")
            plain.append(StorageWeakRef(weight.untyped_storage()))  # type: ignore[no-untyped-call]
            model.get_submodule(name).register_parameter("weight", None)

    load_weights(model, checkpoint, on_module=on_module)
    assert seen == list(dict.fromkeys(name.rpartition(".")[0] for name, _ in build(checkpoint).named_parameters()))


def assert_close(model: Transformer, name: str, expected: Tensor) -> None:
    torch.testing.assert_close(parameters(model)[name].data, expected, rtol=1e-6, atol=1e-7)


def write_gguf(path: Path, architecture: str, values: dict[str, np.ndarray]) -> Path:
    """A model of one layer, 4 heads of 8, 2 KV heads."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_tensors() -> dict[str, np.ndarray]:
    """Tensors for `write_gguf`; every row of q and k holds its own number."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (96, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }
    values = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    for part, rows in (("q", 32), ("k", 16)):
        values[f"blk.0.attn_{part}.weight"] = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 32, 1)
    return values


def test_only_llama_files_hold_pairs_side_by_side(tmp_path: Path, gguf_tensors: dict[str, np.ndarray]) -> None:
    llama = parameters(load(write_gguf(tmp_path / "llama.gguf", "llama", gguf_tensors)))
    qwen2 = parameters(load(write_gguf(tmp_path / "qwen2.gguf", "qwen2", with_biases(gguf_tensors))))
    head = [0, 2, 4, 6, 1, 3, 5, 7]
    reordered = [8 * index + row for index in range(4) for row in head]
    assert llama["layers.0.attn.qkv.weight"][:32, 0].tolist() == reordered
    assert llama["layers.0.attn.qkv.weight"][32:48, 0].tolist() == reordered[:16]
    assert qwen2["layers.0.attn.qkv.weight"][:32, 0].tolist() == list(range(32))


def with_biases(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    rows = {"q": 32, "k": 16, "v": 16}
    return values | {f"blk.0.attn_{part}.bias": np.ones(size, np.float32) for part, size in rows.items()}


def test_a_gguf_file_must_be_complete_too(tmp_path: Path, gguf_tensors: dict[str, np.ndarray]) -> None:
    del gguf_tensors["blk.0.ffn_up.weight"]
    gguf_tensors["blk.0.ffn_wide.weight"] = np.ones((2, 2), np.float32)
    with pytest.raises(CheckpointError, match=r"a\.gguf: tensor blk\.0\.ffn_up\.weight is missing"):
        load(write_gguf(tmp_path / "a.gguf", "llama", gguf_tensors))


def test_dummy_weights_need_only_a_config(save: Save, tmp_path: Path) -> None:
    folder = save({}, architectures=["Qwen2ForCausalLM"])
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(folder), weights=False)
    first, second, other = build(checkpoint), build(checkpoint), build(checkpoint)
    init_dummy_weights(first, 1)
    init_dummy_weights(second, 1)
    init_dummy_weights(other, 2)
    filled = parameters(first)
    assert all(torch.equal(values, parameters(second)[name]) for name, values in filled.items())
    assert not torch.equal(filled["head.weight"], parameters(other)["head.weight"])
    assert torch.equal(filled["layers.0.attn_branch.norm.weight"], torch.ones(32))
    assert torch.equal(filled["layers.0.attn.qkv.bias"], torch.zeros(64))
    assert 0.01 < float(filled["head.weight"].std()) < 0.03
    assert not torch.equal(filled["layers.0.attn.o.weight"], filled["layers.1.attn.o.weight"])
