"""Puts an engine together: checkpoint, configuration, tokenizer, runner, scheduler. And says what came out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from miniserve.errors import CheckpointError, ConfigError, InvalidParameterError
from miniserve.models.checkpoint import Checkpoint, locate_tokenizer, open_checkpoint
from miniserve.runner.build import RunnerParts, build_runner
from miniserve.sampling_params import SamplingParams
from miniserve.structured.masks import MaskWorker
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.tokenizer import Tokenizer

LoadProgress = Callable[[int, int], None]  # (tensors loaded, tensors in all)
BuildProgress = Callable[[str], None]  # one line on what is compiled


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine, its input side, and what was settled on the way.

    Attributes:
        backend_name: the attention backend that was chosen.
        sampling_defaults: what a request that names no value takes, as `SamplingParams` arguments; what is not here
            is as `SamplingParams` has it.
        summary: the lines to print at start.
    """

    engine: Engine
    input_processor: InputProcessor
    resolved: ResolvedConfig
    backend_name: str
    sampling_defaults: dict[str, Any]
    summary: tuple[str, ...]


def build_engine(
    asked: EngineConfig,
    *,
    progress: LoadProgress | None = None,
    on_build: BuildProgress = lambda _line: None,
    hooks: Sequence[MetricsHook] = (),
) -> EngineParts:
    """Load everything that `asked` names.

    Args:
        asked: the flags.
        progress: told of each tensor that is loaded.
        on_build: told that kernels are being compiled.
        hooks: told of what happens to requests.

    Raises:
        StartupError: something cannot be had as asked.
    """
    machine = platform.detect()
    checkpoint = open_checkpoint(asked.model, revision=asked.revision, weights=asked.load_format != "dummy")
    resolved = resolve(asked, machine, model_max_len=checkpoint.config.max_position_embeddings)
    platform.set_threads(resolved.threads)
    platform.keep_freed_memory()
    # What can be wrong with small files comes before the weights, which take long.
    sampling_defaults = _sampling_defaults(asked, checkpoint)
    tokenizer = load_tokenizer(asked, checkpoint)
    chat_template = _chat_template(asked, tokenizer)
    num_token_ids = min(tokenizer.num_token_ids, checkpoint.config.vocab_size)
    runner = build_runner(
        checkpoint,
        asked,
        resolved,
        num_token_ids=num_token_ids,
        instruction_sets=machine.instruction_sets,
        on_tensor=progress,
        on_build=on_build,
    )
    resolved = replace(resolved, block_size=runner.block_size)
    kv = KVCacheManager(runner.num_kv_blocks, resolved.block_size, prefix_caching=resolved.prefix_caching)
    scheduler = Scheduler(
        kv,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
    )
    input_processor = InputProcessor(
        tokenizer,
        num_token_ids=num_token_ids,
        max_model_len=resolved.max_model_len,
        kv_capacity_tokens=kv.capacity_tokens,
        eos_token_ids=_eos_token_ids(checkpoint, tokenizer),
        chat_template=chat_template,
        priorities=asked.scheduling_policy == "priority",
    )
    masks = MaskWorker(num_threads=1, ahead=False) if resolved.device == "cpu" else MaskWorker()
    return EngineParts(
        engine=Engine(scheduler, runner.runner, OutputProcessor(tokenizer), hooks, masks),
        input_processor=input_processor,
        resolved=resolved,
        backend_name=runner.backend_name,
        sampling_defaults=sampling_defaults,
        summary=_summary(
            checkpoint,
            resolved,
            runner,
            kv,
            sampling_defaults=sampling_defaults,
            answers=input_processor.formats.description,
        ),
    )


def load_tokenizer(asked: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """The model's tokenizer, or the one that `--tokenizer` names."""
    path: Path = checkpoint.path if asked.tokenizer is None else locate_tokenizer(asked.tokenizer)
    return Tokenizer.from_gguf(path) if path.suffix == ".gguf" else Tokenizer.from_folder(path)


def _sampling_defaults(asked: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The generation config's recommendations, unless they are not wanted."""
    if asked.generation_config == "none":
        return {}
    defaults = {name: value for name, value in asdict(checkpoint.generation).items() if value is not None}
    try:
        SamplingParams(**defaults)
    except InvalidParameterError as error:
        raise ConfigError(
            f"the generation config of {checkpoint.name} is refused: {error}; start with --generation-config none"
        ) from error
    return defaults


def _chat_template(asked: EngineConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's template, or that of the file that `--chat-template` names."""
    if asked.chat_template is None:
        return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    path = Path(asked.chat_template).expanduser()
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer.special_tokens)
    except OSError as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path} is not UTF-8 text: see byte {error.start}") from error
    except CheckpointError as error:
        raise ConfigError(f"--chat-template {path} is not valid Jinja: {error.__cause__}") from error


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    from_tokenizer = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return checkpoint.config.eos_token_ids.union(from_tokenizer)


def _summary(
    checkpoint: Checkpoint,
    resolved: ResolvedConfig,
    runner: RunnerParts,
    kv: KVCacheManager,
    *,
    sampling_defaults: Mapping[str, Any],
    answers: str,
) -> tuple[str, ...]:
    config = checkpoint.config
    weights = (
        resolved.dtype if resolved.quantization == "none" else f"{resolved.dtype} (weights {resolved.quantization})"
    )
    kv_cache_dtype = "" if resolved.kv_cache_dtype == "auto" else f", {resolved.kv_cache_dtype}"
    taken = ", ".join(f"{name} {value:g}" for name, value in sampling_defaults.items())
    return (
        f"model {checkpoint.name}: {config.family}, {runner.num_parameters / 1e6:.1f} M parameters, "
        f"context {resolved.max_model_len} tokens",
        f"device {resolved.device}, {weights}, kernels {runner.kernels_name}, attention {runner.backend_name}, "
        f"threads {resolved.threads}",
        f"KV cache: {runner.num_kv_blocks} blocks x {resolved.block_size} tokens = {kv.capacity_tokens} tokens "
        f"({runner.kv_bytes / 1e9:.2f} GB{kv_cache_dtype})",
        f"sampling defaults of the model: {taken}" if taken else "sampling defaults: temperature 1, top_p 1",
        answers,
        *(f"note: {note}" for note in (*checkpoint.notes, *resolved.notes, *runner.notes)),
    )
