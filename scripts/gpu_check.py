"""What only a GPU can show, in one bounded command:

    python scripts/gpu_check.py --out gpu_check.json

Parity of every attention backend with transformers, CUDA graphs against single launches, preemption, and throughput of
a model of Qwen3-0.6B's shape with random weights. Needs what a usual torch image has: torch 2.11 or newer, transformers
and safetensors. Each part is guarded: one that fails is reported, and the others go on. Ends with 1 if any failed.

With --small, all of it runs on a CPU within two minutes, where FlashAttention and graphs are reported as not there.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from miniserve import platform
from miniserve.attention.base import AttentionBackend, AttentionVariant
from miniserve.attention.flash_attn import FLASH_BACKENDS
from miniserve.attention.probe import ProbeShape, why_not
from miniserve.attention.sdpa import SdpaBackend
from scripts.gpu_engine import TokenEngine, random_tokens
from tests.support import FAMILIES, reference_logits, tiny_model

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
SMALL_QWEN3 = {**QWEN3, "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `failed` where something that must hold does not."""

    part: str
    case: str
    outcome: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Bench:
    """How much work the check does."""

    device: str
    families: Sequence[str]
    streams: Sequence[int]
    model: dict[str, Any]

    @property
    def graphs(self) -> Sequence[bool]:
        """Whether to capture, in turn."""
        return (False, True) if self.device == "cuda" else (False,)


def environment(bench: Bench) -> list[Row]:
    """What the numbers were got with."""
    facts = {"torch": torch.__version__, "device": bench.device}
    if bench.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        facts |= {"name": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return [Row("environment", name, value) for name, value in facts.items()]


def backends(bench: Bench) -> list[Row]:
    """Each library's attention against the reference, for blocks and windows that it may or may not take."""
    rows = []
    variants = {"full": AttentionVariant(scale=0.09), "window": AttentionVariant(scale=0.09, window=100)}
    libraries: list[type[AttentionBackend]] = [SdpaBackend, *FLASH_BACKENDS]
    if bench.device == "cuda":
        platform.leave_out_cudnn_attention()  # as every engine does
    for library in libraries:
        backend = library(torch.bfloat16)
        missing = library.missing() if library in FLASH_BACKENDS else None
        for block_size in (16, 256):
            for name, variant in variants.items():
                shape = ProbeShape(num_heads=16, num_kv_heads=8, head_dim=128, block_size=block_size)
                refusal = missing or why_not(backend, shape, [variant], torch.device(bench.device))
                case = f"{backend.label}, blocks of {block_size}, {name}"
                rows.append(
                    Row("backends", case, refusal or "ok", failed=library is SdpaBackend and refusal is not None)
                )
    return rows


def parity(bench: Bench) -> list[Row]:
    """Tiny random models: in fp32 transformers' greedy tokens; in bf16 the reference backend's, nearly."""
    rows = []
    for family in bench.families:
        with tempfile.TemporaryDirectory() as name:
            reference = tiny_model(Path(name), family)
            reference.to(bench.device)  # type: ignore[arg-type]
            prompts = [random_tokens(length, 256, length) for length in (5, 17, 61)]
            for backend in ("torch", "sdpa"):
                engine = TokenEngine(
                    Path(name), bench.device, dtype="fp32", attention_backend=backend, num_kv_blocks=64
                )
                answers = engine.generate(prompts, 32)
                same = [
                    _choices(reference, prompt, tokens) == tokens
                    for prompt, tokens in zip(prompts, answers, strict=True)
                ]
                rows.append(
                    Row("parity fp32", f"{family}, {backend}", f"{sum(same)} of {len(same)} answers", not all(same))
                )
            rows += _parity_bf16(bench, Path(name), family, prompts) if bench.device == "cuda" else []
    return rows


def _choices(reference: Any, prompt: list[int], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """What transformers would choose after the prompt and each of the tokens."""
    logits = reference_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
    return tuple(logits.argmax(dim=-1).tolist())


def _parity_bf16(bench: Bench, folder: Path, family: str, prompts: list[list[int]]) -> list[Row]:
    """Where backends round differently, near ties fall differently: most first tokens must be the same."""
    options: dict[str, Any] = {"dtype": "bf16", "num_kv_blocks": 64}
    expected = TokenEngine(folder, bench.device, attention_backend="torch", **options).generate(prompts, 8)
    engine = TokenEngine(folder, bench.device, attention_backend="auto", **options)
    answers = engine.generate(prompts, 8)
    same = sum(a == b for one, two in zip(answers, expected, strict=True) for a, b in zip(one, two, strict=True))
    total = sum(map(len, expected))
    outcome = f"{same} of {total} tokens; {'; '.join(engine.parts.notes) or 'nothing passed over'}"
    return [Row("parity bf16", f"{family}, {engine.parts.backend_name}", outcome, failed=same < total // 2)]


def graphs(bench: Bench) -> list[Row]:
    """The same tokens from replayed steps as from single launches, at the borders of buckets and between them."""
    if bench.device != "cuda":
        return [Row("graphs", "capture", "not here: there is no CUDA device")]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        tiny_model(Path(name), "gemma3")
        options: dict[str, Any] = {"dtype": "bf16", "max_num_seqs": 16, "max_model_len": 256, "num_kv_blocks": 64}
        plain = TokenEngine(Path(name), bench.device, **options)
        replayed = TokenEngine(Path(name), bench.device, cuda_graphs=True, **options)
        rows.append(Row("graphs", "notes", "; ".join(replayed.parts.notes)))
        obstacle = replayed.parts.runner.cannot_capture()
        if obstacle is not None:
            return [*rows, Row("graphs", "capture", obstacle)]
        for count in (1, 2, 3, 4, 7, 8, 9, 16):
            prompts = [random_tokens(20, 256, seed) for seed in range(count)]
            expected, answers = plain.generate(prompts, 24), replayed.generate(prompts, 24)
            same = sum(a == b for a, b in zip(answers, expected, strict=True))
            # Filled up to a bucket, products are of another size, and may round differently.
            is_whole = count in (1, 2, 4, 8, 16)
            failed = same < count if is_whole else same < count // 2
            rows.append(Row("graphs", f"{count} requests", f"{same} of {count} answers", failed))
    return rows


def preemption(bench: Bench) -> list[Row]:
    """In fp32, a pool that is too small for all changes no token."""
    with tempfile.TemporaryDirectory() as name:
        tiny_model(Path(name), "llama")
        prompts = [random_tokens(30, 256, seed) for seed in range(6)]
        options: dict[str, Any] = {"dtype": "fp32", "block_size": 16, "attention_backend": "sdpa"}
        expected = TokenEngine(Path(name), bench.device, num_kv_blocks=64, **options).generate(prompts, 30)
        small = TokenEngine(Path(name), bench.device, num_kv_blocks=12, **options)
        answers = small.generate(prompts, 30)
        same, times = sum(a == b for a, b in zip(answers, expected, strict=True)), small.scheduler.num_preemptions
    outcome = f"{same} of {len(prompts)} answers, {times} preemptions"
    return [Row("preemption", "12 blocks for 6 requests", outcome, failed=same < len(prompts) or times == 0)]


def throughput(bench: Bench) -> list[Row]:
    """Decode and prompt throughput with random weights; the second run of each size counts."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(bench.model))
        for with_graphs in bench.graphs:
            engine = TokenEngine(
                Path(name),
                bench.device,
                dtype="bf16",
                load_format="dummy",
                max_num_seqs=max(bench.streams),
                max_num_batched_tokens=8192,
                max_model_len=512,
                cuda_graphs=with_graphs,
                **({} if bench.device == "cuda" else {"num_kv_blocks": 300}),
            )
            how = f"{engine.parts.backend_name}, {'graphs' if with_graphs else 'eager'}"
            rows += [_throughput(engine, streams, how) for streams in bench.streams]
            del engine
            gc.collect()  # it refers to itself, and its memory is needed for the next
    return rows


def _throughput(engine: TokenEngine, streams: int, how: str) -> Row:
    rates = []
    for seed in (0, 1):
        prompts = [random_tokens(PROMPT_TOKENS, engine.vocab_size, 1000 * seed + index) for index in range(streams)]
        start = perf_counter()
        requests, seconds = engine.run(prompts, OUTPUT_TOKENS)
        total = perf_counter() - start
        rates = [sum(request.num_output_tokens for request in requests) / total, streams / median(seconds)]
    outcome = f"{rates[0]:.0f} tokens/s with the prompts, {rates[1]:.0f} in a decode step"
    return Row("throughput", f"{streams} streams, {how}", outcome)


PARTS: tuple[Callable[[Bench], list[Row]], ...] = (environment, backends, parity, graphs, preemption, throughput)


def check(bench: Bench) -> list[Row]:
    """All parts, one after the other; what a part raises is its result."""
    rows = []
    for part in PARTS:
        try:
            rows += part(bench)
        except Exception as error:
            rows.append(Row(part.__name__, "the whole part", f"{type(error).__name__}: {error}", failed=True))
        for row in rows[-1:]:
            print(f"{part.__name__}: done; last: {row.case}: {row.outcome}", file=sys.stderr, flush=True)
    return rows


def show(rows: Sequence[Row]) -> None:
    """A table on stdout."""
    widths = [max(len(getattr(row, column)) for row in rows) for column in ("part", "case")]
    for row in rows:
        mark = "FAILED" if row.failed else ""
        print(f"{row.part:{widths[0]}}  {row.case:{widths[1]}}  {row.outcome}  {mark}".rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description="check what only a GPU can show")
    parser.add_argument("--small", action="store_true", help="on the CPU, within two minutes")
    parser.add_argument("--out", type=Path, help="write the report here as JSON")
    asked = parser.parse_args(arguments)
    if not asked.small and not torch.cuda.is_available():
        print("there is no CUDA device; --small runs what a CPU can", file=sys.stderr)
        return 2
    bench = Bench("cuda", list(FAMILIES), (1, 16, 64, 256), QWEN3)
    if asked.small:
        bench = Bench("cpu", ["llama", "gemma3", "gpt_oss"], (1, 4), SMALL_QWEN3)
    rows = check(bench)
    show(rows)
    if asked.out is not None:
        asked.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
