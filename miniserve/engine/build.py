"""Puts an engine together: checkpoint, configuration, tokenizer, runner, scheduler. And says what came out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miniserve import platform
from miniserve.config import EngineConfig, ResolvedConfig, resolve
from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.scheduler import Scheduler
from miniserve.engine.engine import Engine
from miniserve.engine.input_processor import InputProcessor
from miniserve.engine.metrics import MetricsHook
from miniserve.engine.output_processor import OutputProcessor
from miniserve.models.checkpoint import Checkpoint, locate_tokenizer, open_checkpoint
from miniserve.runner.build import RunnerParts, build_runner
from miniserve.text.tokenizer import Tokenizer

LoadProgress = Callable[[int, int], None]  # (tensors loaded, tensors in all)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine, its input side, and what was settled on the way.

    Attributes:
        sampling_defaults: what the model's generation config recommends, as `SamplingParams` arguments.
        summary: the lines to print at start.
    """

    engine: Engine
    input_processor: InputProcessor
    resolved: ResolvedConfig
    sampling_defaults: dict[str, Any]
    summary: tuple[str, ...]


def build_engine(
    asked: EngineConfig, *, progress: LoadProgress | None = None, hooks: Sequence[MetricsHook] = ()
) -> EngineParts:
    """Load everything that `asked` names.

    Raises:
        StartupError: something cannot be had as asked.
    """
    machine = platform.detect()
    checkpoint = open_checkpoint(asked.model, revision=asked.revision, weights=asked.load_format != "dummy")
    resolved = resolve(asked, machine, model_max_len=checkpoint.config.max_position_embeddings)
    platform.set_threads(resolved.threads)
    platform.keep_freed_memory()
    tokenizer = load_tokenizer(asked, checkpoint)
    num_token_ids = min(tokenizer.num_token_ids, checkpoint.config.vocab_size)
    runner = build_runner(checkpoint, asked, resolved, num_token_ids=num_token_ids, on_tensor=progress)
    kv = KVCacheManager(runner.num_kv_blocks, resolved.block_size, prefix_caching=resolved.prefix_caching)
    scheduler = Scheduler(
        kv,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
    )
    return EngineParts(
        engine=Engine(scheduler, runner.runner, OutputProcessor(tokenizer), hooks),
        input_processor=InputProcessor(
            tokenizer,
            num_token_ids=num_token_ids,
            max_model_len=resolved.max_model_len,
            eos_token_ids=_eos_token_ids(checkpoint, tokenizer),
        ),
        resolved=resolved,
        sampling_defaults={k: v for k, v in asdict(checkpoint.generation).items() if v is not None},
        summary=_summary(checkpoint, resolved, runner, kv),
    )


def load_tokenizer(asked: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """The model's tokenizer, or the one that `--tokenizer` names."""
    path: Path = checkpoint.path if asked.tokenizer is None else locate_tokenizer(asked.tokenizer)
    return Tokenizer.from_gguf(path) if path.suffix == ".gguf" else Tokenizer.from_folder(path)


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    from_tokenizer = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return checkpoint.config.eos_token_ids.union(from_tokenizer)


def _summary(
    checkpoint: Checkpoint, resolved: ResolvedConfig, runner: RunnerParts, kv: KVCacheManager
) -> tuple[str, ...]:
    config = checkpoint.config
    return (
        f"model {checkpoint.name}: {config.family}, {runner.num_parameters / 1e6:.1f} M parameters, "
        f"context {resolved.max_model_len} tokens",
        f"device {resolved.device}, {resolved.dtype}, attention {runner.backend_name}, threads {resolved.threads}",
        f"KV cache: {runner.num_kv_blocks} blocks x {resolved.block_size} tokens = {kv.capacity_tokens} tokens "
        f"({runner.kv_bytes / 1e9:.2f} GB)",
        *(f"note: {note}" for note in (*checkpoint.notes, *resolved.notes, *runner.notes)),
    )
