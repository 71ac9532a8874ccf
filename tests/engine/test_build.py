"""What `build_engine` takes from the files around the weights, and what it refuses at start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from miniserve import platform
from miniserve.config import EngineConfig
from miniserve.engine.build import EngineParts, build_engine
from miniserve.engine.options import RequestOptions
from miniserve.errors import ConfigError, InvalidParameterError
from miniserve.outputs import FinishReason
from miniserve.sampling_params import SamplingParams, StructuredOutput
from tests.chat_templates import THINKING_WITH_TOOLS
from tests.support import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny_model(path, "llama")
    return path


def build(folder: Path, **options: Any) -> EngineParts:
    return build_engine(
        EngineConfig(
            model=str(folder), device="cpu", dtype="fp32", threads=1, max_model_len=64, num_kv_blocks=9, **options
        )
    )


def recommend(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def text_of_chat(parts: EngineParts) -> str:
    processor = parts.input_processor
    return processor.tokenizer.decode(processor.tokenize_chat([{"role": "user", "content": "hi"}]))


def test_the_summary(folder: Path) -> None:
    parts = build(folder, kernels="torch")
    [line] = [line for line in parts.summary if line.startswith("KV cache")]
    assert re.fullmatch(r"KV cache: 9 blocks x 16 tokens = 128 tokens \(\d+\.\d\d GB\)", line)
    assert parts.backend_name == "sdpa"
    assert "device cpu, float32, kernels torch, attention sdpa, threads 1" in parts.summary
    assert parts.input_processor.kv_capacity_tokens == 128


FIRST_REQUEST = """
import sys
from miniserve import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", max_model_len=64, num_kv_blocks=9)
before = set(sys.modules)
llm.generate(["hi"], SamplingParams(max_tokens=3))
print(sorted(set(sys.modules) - before), "torch._dynamo" in sys.modules)
"""


def test_the_first_request_waits_for_nothing_that_comes_once(folder: Path) -> None:
    """Bug: it recorded the model's step, for which torch imported its compiler: that took seconds."""
    ended = subprocess.run(
        [sys.executable, "-c", FIRST_REQUEST, str(folder)], check=False, capture_output=True, text=True
    )
    assert ended.stdout == "[] False\n", ended.stderr


def test_native_kernels_and_their_blocks_are_the_default(folder: Path) -> None:
    parts = build(folder)
    instruction_set = platform.detect().instruction_sets[0]
    line = f"device cpu, float32, kernels native ({instruction_set}), attention native, threads 1"
    assert line in parts.summary
    assert any(line.startswith("KV cache: 9 blocks x 32 tokens = 256 tokens") for line in parts.summary)
    assert not any(line.startswith("note: ") for line in parts.summary)


@pytest.mark.parametrize(
    ("options", "backend", "note"),
    [
        ({"block_size": 8}, "sdpa", None),
        ({"block_size": 8, "attention_backend": "native"}, "sdpa", "--block-size 8 is no multiple of 32"),
        ({"attention_backend": "torch"}, "torch", None),
        ({"kernels": "torch", "attention_backend": "native"}, "sdpa", "there are no native kernels"),
    ],
)
def test_attention_that_is_not_native(folder: Path, options: dict[str, Any], backend: str, note: str | None) -> None:
    """The linear layers may still be: kernels and attention are chosen one after the other."""
    parts = build(folder, **options)
    assert parts.backend_name == backend
    notes = [line for line in parts.summary if line.startswith("note: ")]
    assert notes == ([] if note is None else [f"note: native attention is passed over: {note}"])
    kernels = "kernels torch" if options.get("kernels") == "torch" else "kernels native"
    assert any(kernels in line for line in parts.summary)


def test_a_dtype_that_the_kernels_do_not_have(folder: Path) -> None:
    config = EngineConfig(model=str(folder), device="cpu", dtype="fp16", kernels="native", num_kv_blocks=9)
    parts = build_engine(config)
    assert "note: native kernels are passed over: they have no float16" in parts.summary
    assert parts.backend_name == "sdpa"


@pytest.mark.parametrize("quantization", ["int8", "int8-fast", "int4"])
def test_small_weights(folder: Path, quantization: str) -> None:
    config = EngineConfig(model=str(folder), device="cpu", dtype="bf16", quantization=quantization, threads=1)
    parts = build_engine(config)
    assert any(f"device cpu, bfloat16 (weights {quantization}), kernels native" in line for line in parts.summary)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": "bf16", "kernels": "torch"}, "needs the native kernels: leave --kernels torch out"),
        ({"dtype": "fp16"}, "needs the native kernels: they have no float16: add --dtype bfloat16"),
    ],
)
def test_weights_that_should_be_small_are_not_silently_large(
    folder: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--quantization int8 {complaint}$"):
        build_engine(EngineConfig(model=str(folder), device="cpu", quantization="int8", **options))


def test_an_int8_kv_cache(folder: Path) -> None:
    """A block takes half the memory, and scales; heads of 16 are padded to 32, so that these weigh an eighth here."""
    fixed: dict[str, Any] = {"model": str(folder), "device": "cpu", "dtype": "bf16", "threads": 1, "num_kv_blocks": 100}
    plain, int8 = (build_engine(EngineConfig(**fixed, kv_cache_dtype=dtype)) for dtype in ("auto", "int8"))
    [line] = [line for line in int8.summary if line.startswith("KV cache")]
    assert re.fullmatch(r"KV cache: 100 blocks x 32 tokens = 3168 tokens \(\d+\.\d\d GB, int8\)", line)
    caches = [parts.engine.runner.caches for parts in (plain, int8)]  # type: ignore[attr-defined]
    assert caches[0][0].key_values.nbytes * 0.5625 == caches[1][0].key_values.nbytes


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kernels": "torch"}, "leave --kernels torch out"),
        ({"dtype": "fp16"}, "the kernels have no float16"),
        ({"dtype": "fp16", "kernels": "native"}, "native kernels are passed over: they have no float16"),
        ({"attention_backend": "sdpa"}, "leave --attention-backend sdpa out"),
        ({"attention_backend": "torch", "kernels": "torch"}, "leave --attention-backend torch out"),
        ({"block_size": 40}, "--block-size 40 is no multiple of 32"),
    ],
    ids=str,
)
def test_a_kv_cache_that_should_be_small_is_not_silently_large(
    folder: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--kv-cache-dtype int8 needs the native attention: {complaint}$"):
        build_engine(EngineConfig(model=str(folder), device="cpu", kv_cache_dtype="int8", **options))


def test_the_summary_says_how_the_model_answers(folder: Path, tmp_path: Path) -> None:
    assert "tools: generic (the template knows none); reasoning: none" in build(folder).summary
    path = tmp_path / "chat.jinja"
    path.write_text(THINKING_WITH_TOOLS, encoding="utf-8")
    assert "tools: hermes; reasoning: <think>" in build(folder, chat_template=str(path)).summary


def test_priorities_are_for_the_policy_of_this_name(folder: Path) -> None:
    options = RequestOptions(priority=7)
    processor = build(folder, scheduling_policy="priority").input_processor
    assert processor.process_prompt("r", "hi", SamplingParams(), options=options).priority == 7
    with pytest.raises(InvalidParameterError, match="--scheduling-policy"):
        build(folder).input_processor.process_prompt("r", "hi", SamplingParams(), options=options)


def test_a_structured_answer(folder: Path) -> None:
    """The compiler, the masks and the sampler know the same tokens: a random model says what it is made to."""
    parts = build(folder)
    sampling = SamplingParams(max_tokens=20, structured_outputs=StructuredOutput.choice(["yes, it is"]))
    parts.engine.add(parts.input_processor.process_prompt("r", "hi", sampling))
    outputs = [output for _ in range(12) for output in parts.engine.step()]
    assert "".join(output.text for output in outputs) == "yes, it is"
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_sampling_defaults_of_the_model(folder: Path) -> None:
    recommend(folder, temperature=0.6, top_p=0.95, top_k=20)
    parts = build(folder)
    assert SamplingParams(**parts.sampling_defaults) == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    assert "sampling defaults of the model: temperature 0.6, top_p 0.95, top_k 20" in parts.summary


def test_sampling_defaults_are_not_taken(folder: Path) -> None:
    recommend(folder, temperature=0.6)
    parts = build(folder, generation_config="none")
    assert parts.sampling_defaults == {}
    assert "sampling defaults: temperature 1, top_p 1" in parts.summary


def test_sampling_defaults_that_nobody_can_take(folder: Path) -> None:
    """Bug: a model that recommends temperature 3 refused every request that named none."""
    recommend(folder, temperature=3.0)
    with pytest.raises(ConfigError, match=r"temperature must be .*3\.0.*--generation-config none"):
        build(folder)
    assert build(folder, generation_config="none").sampling_defaults == {}


def test_the_models_own_template(folder: Path) -> None:
    assert text_of_chat(build(folder)) == "user: hiassistant:"


def test_a_template_from_a_file(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }} ü]{% endfor %}", encoding="utf-8")
    assert text_of_chat(build(folder, chat_template=str(path))) == "[hi ü]"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), (b"{% for %}", "is not valid Jinja"), (b"\xff\xfe", "is not UTF-8 text")],
    ids=["missing", "broken", "binary"],
)
def test_a_template_file_that_is_wrong(folder: Path, tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        build(folder, chat_template=str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_weights_that_lead_beyond_all_numbers(folder: Path, kernels: str) -> None:
    """Finite as they are, so that the model loads: each request is told, and none hangs."""
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = 1e36
    weights["lm_head.weight"] *= 1e4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    parts = build(folder, kernels=kernels)
    for request_id in "ab":
        parts.engine.add(parts.input_processor.process_prompt(request_id, [1, 2, 3], SamplingParams()))
    outputs = parts.engine.step()
    assert [output.error for output in outputs] == ["the model's logits are not finite"] * 2
    assert not parts.engine.has_work and parts.engine.scheduler.kv.pool.num_used == 0
