"""The arms of the comparison: which servers, with which command, on which form of the model. Nothing is run here.

To add an arm is to add a row. Every server gets the same cores, as many sequences at once as the load has streams, and
bf16 unless its name says otherwise; all else is as the server has it when nothing is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from miniserve.benchmarks.peers.places import CHECKPOINT, Places
from miniserve.errors import ConfigError

HOST = "127.0.0.1"
MINISERVE = "miniserve"  # the peer that needs no setup
LLAMA = "llama.cpp"
VLLM = "vllm"
TRANSFORMERS = "transformers"


class Interface(StrEnum):
    """How an arm is asked."""

    TOKEN_IDS = "token ids"  # /v1/completions with a list of ids and `ignore_eos`
    TEXT = "text"  # /v1/completions with a text, and transformers' own field for the rest
    LLAMA_BENCH = "llama-bench"  # no server: the engine alone, by its own benchmark


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of the comparison.

    Attributes:
        name: in the table.
        peer: whose setup it needs.
        form: of the model's files: `CHECKPOINT`, or a GGUF type.
        command: here and in `environment`, the names of `Launch`'s fields in braces stand for their values.
        health: path that answers 200 when the server is ready.
    """

    name: str
    peer: str
    form: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    interface: Interface = Interface.TOKEN_IDS
    health: str = "/health"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a command depends on.

    Attributes:
        python: the interpreter of the arm's peer.
        programs: folder of the programs built from llama.cpp.
        model: path of its files.
        streams: requests that run at once, at most.
        context: prompt and output together, at most, in tokens.
        total_context: that of all streams together.
        cores: to compute on, such as "0,1"; `threads` says how many.
    """

    python: str
    programs: str
    model: str
    port: int
    streams: int
    context: int
    total_context: int
    threads: int
    cores: str
    host: str = HOST

    def command(self, arm: Arm) -> list[str]:
        """The command line of `arm`."""
        return [part.format(**asdict(self)) for part in arm.command]

    def environment(self, arm: Arm) -> dict[str, str]:
        """What `arm` needs in its environment."""
        return {name: value.format(**asdict(self)) for name, value in arm.environment.items()}


def launch(
    arm: Arm, places: Places, model: str, *, port: int, streams: int, context: int, cores: Sequence[int]
) -> Launch:
    """What the command of `arm` needs to know to serve `model`."""
    return Launch(
        python=sys.executable if arm.peer == MINISERVE else str(places.python(arm.peer)),
        programs=str(places.llama_programs),
        model=str(places.model(model, arm.form)),
        port=port,
        streams=streams,
        context=context,
        total_context=streams * context,
        threads=len(cores),
        cores=",".join(map(str, cores)),
    )


def _miniserve(name: str, *flags: str) -> Arm:
    start = ("{python}", "-c", "from miniserve.cli import main; raise SystemExit(main())", "serve")
    address = ("--served-model-name", "{model}", "--host", "{host}", "--port", "{port}", "--no-access-log")
    sizes = ("--max-num-seqs", "{streams}", "--max-model-len", "{context}", "--threads", "{threads}")
    return Arm(
        name=name,
        peer=MINISERVE,
        form=CHECKPOINT,
        command=(*start, "--model", "{model}", *address, *sizes, "--device", "cpu", "--dtype", "bfloat16", *flags),
    )


def _llama_server(name: str, form: str) -> Arm:
    address = ("--host", "{host}", "--port", "{port}")
    sizes = ("--parallel", "{streams}", "--ctx-size", "{total_context}", "--threads", "{threads}")
    return Arm(
        name=name,
        peer=LLAMA,
        form=form,
        command=("{programs}/llama-server", "--model", "{model}", *address, *sizes),
    )


def _llama_bench(name: str, form: str) -> Arm:
    return Arm(
        name=name,
        peer=LLAMA,
        form=form,
        command=("{programs}/llama-bench", "--model", "{model}", "--threads", "{threads}", "--output", "json"),
        interface=Interface.LLAMA_BENCH,
    )


# vLLM's own command asks for a distribution named vllm, which its CPU package is not; its module does not.
_VLLM_SERVER = ("{python}", "-m", "vllm.entrypoints.openai.api_server", "--host", "{host}", "--port", "{port}")
_VLLM_SIZES = ("--max-num-seqs", "{streams}", "--max-model-len", "{context}")
_TRANSFORMERS_SERVER = ("{python}", "-m", "transformers.cli.transformers", "serve", "{model}", "--host", "{host}")

ARMS: tuple[Arm, ...] = (
    _miniserve("miniserve"),
    _miniserve("miniserve, int8", "--quantization", "int8"),
    _miniserve("miniserve, int4", "--quantization", "int4"),
    _miniserve("miniserve, int8 KV", "--kv-cache-dtype", "int8"),
    _miniserve("miniserve, PyTorch's operators", "--kernels", "torch"),
    _llama_server("llama-server", "bf16"),
    _llama_server("llama-server, Q8_0", "q8_0"),
    _llama_bench("llama-bench", "bf16"),
    Arm(
        name="vLLM",
        peer=VLLM,
        form=CHECKPOINT,
        command=(*_VLLM_SERVER, "--model", "{model}", "--dtype", "bfloat16", *_VLLM_SIZES),
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; without it, a share of all memory
            "VLLM_CPU_OMP_THREADS_BIND": "{cores}",  # by itself it would leave a core to its front
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    ),
    Arm(
        name="transformers serve",
        peer=TRANSFORMERS,
        form=CHECKPOINT,
        command=(*_TRANSFORMERS_SERVER, "--port", "{port}", "--device", "cpu", "--continuous-batching"),
        environment={"OMP_NUM_THREADS": "{threads}", "HF_HUB_OFFLINE": "1"},
        interface=Interface.TEXT,
    ),
)


def select_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of these names in the order of the table; all of them for no name.

    Raises:
        ConfigError: there is no arm of a name.
    """
    known = [arm.name for arm in ARMS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--arms {name}: there is no such arm; there are: {'; '.join(known)}")
    return tuple(arm for arm in ARMS if not names or arm.name in names)
