"""What may be asked of the engine, and how it is settled on a given machine."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from miniserve.config import (
    DEFAULT_MODEL,
    EngineConfig,
    ResolvedConfig,
    ServerConfig,
    flag_info,
    flag_name,
    num_kv_blocks,
    parse_token_count,
    resolve,
)
from miniserve.errors import ConfigError
from miniserve.platform import Machine

CPU = Machine(("cpu",), physical_cores=6, cpu_has_bf16=False)
CPU_BF16 = Machine(("cpu",), physical_cores=6, cpu_has_bf16=True)
CUDA = Machine(("cuda", "cpu"), physical_cores=6, cpu_has_bf16=True)
MPS = Machine(("mps", "cpu"), physical_cores=6, cpu_has_bf16=False)


def settle(machine: Machine = CPU, *, model_max_len: int = 100_000, **asked: Any) -> ResolvedConfig:
    return resolve(EngineConfig(**asked), machine, model_max_len=model_max_len)


# What is asked


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISERVE_MODEL", raising=False)
    config = EngineConfig()
    assert config.model == DEFAULT_MODEL == "Qwen/Qwen3-0.6B"
    assert (config.device, config.dtype, config.attention_backend, config.load_format, config.kernels) == ("auto",) * 5
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (4096, 16, 1024)
    assert (config.gpu_memory_utilization, config.num_kv_blocks, config.block_size) == (0.6, None, None)
    assert (config.prefix_caching, config.cuda_graphs) == (True, False)


def test_model_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISERVE_MODEL", "smollm2")
    assert EngineConfig().model == "smollm2"
    assert EngineConfig(model="other").model == "other"
    monkeypatch.setenv("MINISERVE_MODEL", "")
    assert EngineConfig().model == DEFAULT_MODEL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("load_format", "fast"),
        ("device", "gpu"),
        ("device", ""),
        ("dtype", "int8"),
        ("attention_backend", "xformers"),
        ("kernels", "triton"),
        ("quantization", "int7"),
        ("kv_cache_dtype", "fp8"),
        ("max_model_len", 1),
        ("max_model_len", -4),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("block_size", 0),
        ("num_kv_blocks", 1),
        ("threads", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
        ("scheduling_policy", "lottery"),
    ],
)
def test_out_of_range(field: str, value: Any) -> None:
    asked: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**asked)
    message = str(caught.value)
    assert message.startswith(f"{flag_name(field)} ")
    assert str(value) in message and "\n" not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 2),
        ("num_kv_blocks", 2),
        ("gpu_memory_utilization", 1.0),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("dtype", "fp16"),
        ("kernels", "native"),
        ("quantization", "int8"),
        ("kv_cache_dtype", "int8"),
        ("block_size", None),
        ("threads", None),
        ("scheduling_policy", "priority"),
    ],
)
def test_just_in_range(field: str, value: Any) -> None:
    asked: dict[str, Any] = {field: value}
    assert getattr(EngineConfig(**asked), field) == value


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().max_num_seqs = 3  # type: ignore[misc]


def test_every_field_is_a_flag() -> None:
    for field in fields(EngineConfig):
        assert flag_info(field).help
    assert flag_name("max_model_len") == "--max-model-len"


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("4096", 4096), ("8k", 8192), ("8K", 8192), ("0", 0)])
def test_token_count(text: str, count: int) -> None:
    assert parse_token_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "8 k", "8kk", "8m", "-1", "1.5k", "1e3", "0x10", "٣", "²", "1_000"])
def test_not_a_token_count(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens"):
        parse_token_count(text)


# What will happen


@pytest.mark.parametrize(
    ("machine", "device", "dtype"),
    [
        (CPU, "cpu", "float32"),
        (CPU_BF16, "cpu", "bfloat16"),
        (CUDA, "cuda", "bfloat16"),
        (MPS, "mps", "float16"),
    ],
)
def test_auto(machine: Machine, device: str, dtype: str) -> None:
    resolved = settle(machine)
    assert (resolved.device, resolved.dtype, resolved.threads) == (device, dtype, 6)
    assert resolved.notes == ()


def test_cpu_beside_a_gpu() -> None:
    assert (settle(CUDA, device="cpu").device, settle(CUDA, device="cpu").dtype) == ("cpu", "bfloat16")
    assert settle(MPS, device="cpu").dtype == "float32"


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float16", "float16"), ("float32", "float32")],
)
def test_dtype_names(asked: str, dtype: str) -> None:
    assert settle(CUDA, dtype=asked).dtype == dtype


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {device}: this machine has cpu"):
        settle(CPU, device=device)


def test_the_models_own_limit() -> None:
    capped = settle(model_max_len=2048)
    assert capped.max_model_len == 2048
    assert capped.notes == ("max_model_len is 2048, the model's own limit",)
    assert settle(model_max_len=4096).notes == ()
    assert settle(model_max_len=8192).max_model_len == 4096


def test_cuda_graphs_are_for_cuda() -> None:
    on_cpu, on_cuda = settle(CPU, cuda_graphs=True), settle(CUDA, cuda_graphs=True)
    assert not on_cpu.cuda_graphs and on_cuda.cuda_graphs and not settle(CUDA).cuda_graphs
    [note] = on_cpu.notes
    assert note == "--cuda-graphs is ignored: the device is cpu"
    assert on_cuda.notes == ()


def test_what_is_passed_on() -> None:
    resolved = settle(threads=3, seed=9, block_size=8, prefix_caching=False, max_num_seqs=2, attention_backend="torch")
    assert (resolved.kernels, settle(kernels="native").kernels) == ("auto", "native")
    assert (resolved.threads, resolved.seed, resolved.block_size) == (3, 9, 8)
    assert (resolved.prefix_caching, resolved.max_num_seqs, resolved.attention_backend) == (False, 2, "torch")


@pytest.mark.parametrize(
    ("machine", "asked", "block_size"),
    [
        (CPU, {}, 32),
        (CPU_BF16, {"kernels": "native", "attention_backend": "native"}, 32),
        (CUDA, {"device": "cpu"}, 32),
        (CPU, {"kernels": "torch"}, 16),
        (CPU, {"attention_backend": "sdpa"}, 16),
        (CUDA, {}, 16),
        (MPS, {"kernels": "native"}, 16),
        (CPU, {"block_size": 8}, 8),
        (CPU, {"kernels": "torch", "block_size": 64}, 64),
    ],
)
def test_blocks_suit_the_attention_that_may_serve(machine: Machine, asked: dict[str, Any], block_size: int) -> None:
    assert settle(machine, **asked).block_size == block_size


# The pool


def blocks(*, free_bytes: int, bytes_per_block: int = 1000, **asked: Any) -> int:
    config = EngineConfig(**asked)
    resolved = resolve(config, CPU, model_max_len=100_000)
    return num_kv_blocks(config, resolved, bytes_per_block=bytes_per_block, free_bytes=free_bytes)


def test_pool_is_as_large_as_the_memory_share() -> None:
    assert blocks(free_bytes=100_000, gpu_memory_utilization=0.5) == 51  # block 0 is one more
    assert blocks(free_bytes=100_999, gpu_memory_utilization=0.5) == 51


def test_pool_is_no_larger_than_all_requests_need() -> None:
    asked = {"max_num_seqs": 3, "max_model_len": 33, "block_size": 16}
    assert blocks(free_bytes=10**12, **asked) == 3 * 3 + 1


def test_exact_pool() -> None:
    assert blocks(free_bytes=7000, num_kv_blocks=7) == 7


def test_an_exact_pool_that_does_not_fit() -> None:
    """Bug: it ended in a traceback of the allocator."""
    with pytest.raises(ConfigError, match=r"--num-kv-blocks 8 takes .* ask for at most 7"):
        blocks(free_bytes=7999, num_kv_blocks=8)


def test_no_room_for_a_pool() -> None:
    with pytest.raises(ConfigError, match="a block takes 1000 bytes and 60% of 1500 free bytes"):
        blocks(free_bytes=1500)
    assert blocks(free_bytes=1700) == 2


def test_the_server_listens_on_loopback() -> None:
    """Unless it is told otherwise: whoever starts it on a shared network must not serve that network."""
    assert ServerConfig().host == "127.0.0.1"
