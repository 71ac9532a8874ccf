"""Configuration: `EngineConfig` and `ServerConfig` are what was asked, `ResolvedConfig` is what will happen.

All are frozen. The command line's flags are generated from their fields, so a flag, its default, its help text and its
check stand in one place. Nothing here imports torch: facts about the machine come from `platform`, as arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from miniserve.errors import ConfigError
from miniserve.platform import Machine

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = ("auto", *DTYPE_BYTES, *DTYPE_ALIASES)
DEVICES = ("auto", "mps", "cuda", "cpu")
ATTENTION_BACKENDS = ("auto", "native", "sdpa", "torch", "flash_attn")
KERNELS = ("auto", "native", "torch")
QUANTIZATIONS = ("none", "int8", "int8-fast", "int4")
KV_CACHE_DTYPES = ("auto", "int8")
# What the native attention likes best; elsewhere smaller blocks share more.
NATIVE_BLOCK_SIZE = 32
DEFAULT_BLOCK_SIZE = 16
# What FlashAttention 2 needs; its successors take smaller ones.
FLASH_BLOCK_SIZE = 256
LOAD_FORMATS = ("auto", "dummy")
GENERATION_CONFIGS = ("model", "none")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class FlagInfo:
    """How a field appears on the command line. `repeatable`: the flag may be given again; the field is a tuple."""

    help: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    parse: Callable[[str], Any] = str
    repeatable: bool = False


def _flag(default: Any, help: str, **info: Any) -> Any:
    """A dataclass field that is also a flag."""
    metadata = {"flag": FlagInfo(help, **info)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_token_count(text: str) -> int:
    """An integer that may end in k (x 1024): "4096", "8k"."""
    digits, unit = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{text!r} is not a number of tokens, such as 4096 or 8k")
    return int(digits) * unit


def default_model() -> str:
    """The environment's model, else the project's default."""
    return os.environ.get("MINISERVE_MODEL") or DEFAULT_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What was asked of the engine. One flag per field.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    model: str = _flag(
        default_model,
        "HF model id, local checkpoint folder, .gguf file, or smollm2 (the embedded model); "
        "default $MINISERVE_MODEL or " + DEFAULT_MODEL,
    )
    revision: str | None = _flag(None, "branch, tag or commit of the model on the hub")
    tokenizer: str | None = _flag(None, "tokenizer from another folder, .gguf file or model id")
    chat_template: str | None = _flag(None, "file with a Jinja chat template to use in place of the model's own")
    generation_config: str = _flag(
        "model",
        "sampling defaults: model takes those of its generation_config.json, none takes temperature 1 and top_p 1",
        choices=GENERATION_CONFIGS,
    )
    load_format: str = _flag(
        "auto", "auto reads the weights; dummy makes random ones from the config", choices=LOAD_FORMATS
    )
    device: str = _flag("auto", "auto takes mps, then cuda, then cpu", choices=DEVICES)
    dtype: str = _flag(
        "auto",
        "type of weights and KV cache; auto is fp16 on mps, bf16 on cuda, and on a cpu bf16 where it has "
        "bf16 instructions, else fp32",
        choices=DTYPES,
    )
    max_model_len: int = _flag(
        4096, "longest prompt + output in tokens, such as 8k; capped by the model's own", parse=parse_token_count
    )
    max_num_seqs: int = _flag(16, "requests that run at once", parse=int)
    max_num_batched_tokens: int = _flag(
        1024, "token budget of a step; longer prompts are computed in chunks", parse=parse_token_count
    )
    scheduling_policy: str = _flag(
        "fcfs",
        "order of requests: fcfs is first come first served, priority goes by their priority first (lower is sooner)",
        choices=SCHEDULING_POLICIES,
    )
    gpu_memory_utilization: float = _flag(
        0.60, "share of the device's memory (on a cpu: of the available RAM) for the KV cache", parse=float
    )
    num_kv_blocks: int | None = _flag(
        None, "exact number of KV blocks, one of them reserved; default: from the memory share", parse=int
    )
    block_size: int | None = _flag(
        None,
        f"tokens per KV block; default: {NATIVE_BLOCK_SIZE} with native kernels, else {DEFAULT_BLOCK_SIZE}, or "
        f"{FLASH_BLOCK_SIZE} where FlashAttention needs it",
        parse=int,
    )
    kernels: str = _flag(
        "auto",
        "on a cpu, native compiles operators for this machine once; torch uses PyTorch's own; auto is native where "
        "there is a compiler",
        choices=KERNELS,
    )
    quantization: str = _flag(
        "none",
        "keeps the weights small: int8, int8-fast (activations are int8 too), or int4 (a scale for each 32 weights); a "
        "GGUF file's own 4 or 8 bits stay as they are; native kernels only",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "int8 keeps keys and values as int8, a scale for each token and head: half the memory and traffic; native "
        "attention only; auto is --dtype",
        choices=KV_CACHE_DTYPES,
    )
    attention_backend: str = _flag(
        "auto", "native, sdpa, torch (the plain reference) or flash_attn", choices=ATTENTION_BACKENDS
    )
    prefix_caching: bool = _flag(True, "reuse the KV blocks of a prompt's known beginning")
    cuda_graphs: bool = _flag(False, "replay decode steps as CUDA graphs; CUDA with flash_attn only")
    seed: int | None = _flag(None, "seed of requests without a seed of their own, and of dummy weights", parse=int)
    threads: int | None = _flag(None, "CPU threads for computing; default: physical cores", parse=int)

    def __post_init__(self) -> None:
        for name in ("generation_config", "load_format", "device", "dtype", "kernels", "attention_backend"):
            _check_choice(self, name)
        _check_choice(self, "scheduling_policy")
        _check_choice(self, "quantization")
        _check_choice(self, "kv_cache_dtype")
        _check_at_least(self, "max_model_len", 2)
        _check_at_least(self, "max_num_seqs", 1)
        _check_at_least(self, "max_num_batched_tokens", 1)
        _check_at_least(self, "block_size", 1)
        _check_at_least(self, "num_kv_blocks", 2)
        _check_at_least(self, "threads", 1)
        if not self.model:
            raise ConfigError("--model is empty; name a model, such as smollm2")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must be in [0, 2^63), got {self.seed}")


def default_api_keys() -> tuple[str, ...]:
    """The environment's key, if it has one."""
    key = os.environ.get("MINISERVE_API_KEY")
    return (key,) if key else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What was asked of the HTTP server. One flag per field.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 is every network")
    port: int = _flag(8000, "port to listen on; 0 takes a free one", parse=int)
    uds: str | None = _flag(None, "listen on this Unix socket instead", metavar="PATH")
    api_key: tuple[str, ...] = _flag(
        default_api_keys,
        "require this key for /v1, /tokenize and /detokenize; may be given again; default $MINISERVE_API_KEY",
        repeatable=True,
    )
    served_model_name: tuple[str, ...] = _flag(
        (), "name of the model in the API; may be given again for aliases; default: --model", repeatable=True
    )
    allowed_origins: tuple[str, ...] = _flag(
        (), "origin that browsers may call from (CORS); may be given again; * is any", repeatable=True
    )
    max_queued_requests: int = _flag(1024, "requests that may wait; beyond, the answer is 429", parse=int)
    max_body_bytes: int = _flag(32 * 2**20, "largest request body", parse=int)
    timeout_keep_alive: int = _flag(75, "seconds that an idle connection is kept", parse=int)
    timeout_request: int = _flag(60, "seconds that a client gets to send a request, head and body", parse=int)
    timeout_step: int = _flag(
        300, "seconds that one step of the model may take before /health says stuck and nobody waits for it", parse=int
    )
    timeout_unread: int = _flag(
        600,
        "seconds that a client may take nothing of its answer until it counts as gone; over TCP, on Linux",
        parse=int,
    )
    timeout_graceful_shutdown: int = _flag(30, "seconds that running requests get to finish at shutdown", parse=int)
    log_level: str = _flag("info", "least severe kind of log line", choices=LOG_LEVELS)
    access_log: bool = _flag(True, "log a line per HTTP request")
    log_requests: bool = _flag(False, "log prompts and parameters; without it no user text is logged")
    root_path: str = _flag("", "path prefix that a proxy strips", metavar="PATH")
    ssl_keyfile: str | None = _flag(None, "key of the TLS certificate", metavar="FILE")
    ssl_certfile: str | None = _flag(None, "TLS certificate; serves https", metavar="FILE")

    def __post_init__(self) -> None:
        _check_choice(self, "log_level")
        _check_at_least(self, "port", 0)
        _check_at_least(self, "max_queued_requests", 1)
        _check_at_least(self, "max_body_bytes", 1024)
        _check_at_least(self, "timeout_keep_alive", 1)
        _check_at_least(self, "timeout_request", 1)
        _check_at_least(self, "timeout_step", 1)
        _check_at_least(self, "timeout_unread", 1)
        _check_at_least(self, "timeout_graceful_shutdown", 0)
        if self.uds == "":
            raise ConfigError("--uds is empty; name the path of a socket")
        if self.port > 65535:
            raise ConfigError(f"--port must be at most 65535, got {self.port}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile belong together; give both")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"--root-path must start with /, got {self.root_path!r}")
        for name in ("api_key", "served_model_name", "allowed_origins"):
            if not all(getattr(self, name)):
                raise ConfigError(f"{flag_name(name)} must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What will happen: no `auto` and no None left but where None means something."""

    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kernels: str
    quantization: str
    kv_cache_dtype: str
    attention_backend: str
    prefix_caching: bool
    cuda_graphs: bool
    seed: int | None
    threads: int
    notes: tuple[str, ...] = ()  # what was asked and will not happen, and why


def resolve(asked: EngineConfig, machine: Machine, *, model_max_len: int) -> ResolvedConfig:
    """Settle every choice.

    Args:
        asked: the flags.
        machine: what the hardware offers.
        model_max_len: the longest sequence the model itself can take.

    Raises:
        ConfigError: the device that was asked for is not there.
    """
    if asked.device != "auto" and asked.device not in machine.devices:
        raise ConfigError(
            f"--device {asked.device}: this machine has {', '.join(machine.devices)}; use one of them, or auto"
        )
    device = machine.devices[0] if asked.device == "auto" else asked.device
    dtype = DTYPE_ALIASES.get(asked.dtype, asked.dtype)
    # Decided before it is known whether kernels can be compiled: any backend takes blocks of this size.
    may_be_native = device == "cpu" and asked.kernels != "torch" and asked.attention_backend in ("auto", "native")
    notes = []
    if asked.max_model_len > model_max_len:
        notes.append(f"max_model_len is {model_max_len}, the model's own limit")
    if asked.cuda_graphs and device != "cuda":
        notes.append(f"--cuda-graphs is ignored: the device is {device}")
    return ResolvedConfig(
        device=device,
        dtype=machine.native_dtype(device) if dtype == "auto" else dtype,
        max_model_len=min(asked.max_model_len, model_max_len),
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        block_size=asked.block_size or (NATIVE_BLOCK_SIZE if may_be_native else DEFAULT_BLOCK_SIZE),
        kernels=asked.kernels,
        quantization=asked.quantization,
        kv_cache_dtype=asked.kv_cache_dtype,
        attention_backend=asked.attention_backend,
        prefix_caching=asked.prefix_caching,
        cuda_graphs=asked.cuda_graphs and device == "cuda",
        seed=asked.seed,
        threads=asked.threads or machine.physical_cores,
        notes=tuple(notes),
    )


def num_kv_blocks(asked: EngineConfig, resolved: ResolvedConfig, *, bytes_per_block: int, free_bytes: int) -> int:
    """Blocks in the KV pool, the reserved block 0 included.

    The memory share, but no more than all requests at full length could use.

    Raises:
        ConfigError: not even two blocks fit.
    """
    if asked.num_kv_blocks is not None:
        _check_affordable(asked.num_kv_blocks, bytes_per_block, free_bytes)
        return asked.num_kv_blocks
    affordable = int(free_bytes * asked.gpu_memory_utilization) // bytes_per_block
    blocks_per_request = -(-resolved.max_model_len // resolved.block_size)
    blocks = min(affordable, resolved.max_num_seqs * blocks_per_request) + 1
    if affordable < 1:
        raise ConfigError(
            f"no room for the KV cache: a block takes {bytes_per_block} bytes and "
            f"{asked.gpu_memory_utilization:.0%} of {free_bytes} free bytes are allowed; free some memory, raise "
            "--gpu-memory-utilization, or lower --block-size"
        )
    return blocks


def _check_affordable(num_blocks: int, bytes_per_block: int, free_bytes: int) -> None:
    if num_blocks * bytes_per_block > free_bytes:
        raise ConfigError(
            f"--num-kv-blocks {num_blocks} takes {num_blocks * bytes_per_block / 1e9:.1f} GB and "
            f"{free_bytes / 1e9:.1f} GB are free: ask for at most {free_bytes // bytes_per_block}"
        )


def flag_name(field_name: str) -> str:
    """The command line's spelling of a config field."""
    return "--" + field_name.replace("_", "-")


def flag_info(config_field: Field[Any]) -> FlagInfo:
    """What the command line needs to know of a config field."""
    info: FlagInfo = config_field.metadata["flag"]
    return info


def _check_choice(config: EngineConfig | ServerConfig, name: str) -> None:
    value = getattr(config, name)
    [choices] = [flag_info(candidate).choices or () for candidate in fields(config) if candidate.name == name]
    if value not in choices:
        raise ConfigError(f"{flag_name(name)} must be one of {', '.join(choices)}; got {value!r}")


def _check_at_least(config: EngineConfig | ServerConfig, name: str, low: int) -> None:
    value = getattr(config, name)
    if value is not None and (not isinstance(value, int) or value < low):
        raise ConfigError(f"{flag_name(name)} must be an integer of at least {low}, got {value!r}")
