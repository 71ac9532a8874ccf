"""The table of arms: every command is complete, and differs from the others only where the table says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miniserve.benchmarks.peers.arms import ARMS, LLAMA, MINISERVE, VLLM, Arm, Interface, Launch, launch, select_arms
from miniserve.benchmarks.peers.places import CHECKPOINT, Places
from miniserve.cli.flags import Parser, add_config_flags, engine_config, server_config
from miniserve.config import EngineConfig, ServerConfig
from miniserve.errors import ConfigError

PLACES = Places(Path("/cache"))


def started(arm: Arm) -> Launch:
    return launch(arm, PLACES, "tiny", port=4321, streams=16, context=1128, cores=(0, 3))


def by_name(name: str) -> Arm:
    (arm,) = select_arms([name])
    return arm


def test_names_are_unique() -> None:
    assert len({arm.name for arm in ARMS}) == len(ARMS)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_command_is_filled_in(arm: Arm) -> None:
    command, environment = started(arm).command(arm), started(arm).environment(arm)
    assert not [text for text in (*command, *environment.values()) if "{" in text or "}" in text]
    assert str(PLACES.model("tiny", arm.form)) in command
    if arm.interface is not Interface.LLAMA_BENCH:
        assert command[command.index("--port") + 1] == "4321"
        assert command[command.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm.peer == MINISERVE], ids=lambda arm: arm.name)
def test_our_own_flags_exist(arm: Arm) -> None:
    """Each arm of ours must start: its command line is one that the program takes."""
    interpreter, _, _, name, *flags = started(arm).command(arm)
    assert (interpreter, name) == (sys.executable, "serve")
    parser = Parser()
    add_config_flags(parser, "server", ServerConfig)
    add_config_flags(parser, "engine", EngineConfig)
    args = parser.parse_args(flags)
    engine = engine_config(args)
    assert server_config(args).port == 4321
    assert (engine.max_num_seqs, engine.max_model_len, engine.threads, engine.dtype) == (16, 1128, 2, "bfloat16")


def test_a_peer_runs_in_its_own_environment() -> None:
    command = started(by_name("vLLM")).command(by_name("vLLM"))
    assert command[0] == str(PLACES.python(VLLM)) != sys.executable
    assert started(by_name("vLLM")).environment(by_name("vLLM"))["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"


def test_llama_servers_context_is_shared_by_its_streams() -> None:
    arm = by_name("llama-server")
    command = started(arm).command(arm)
    assert command[command.index("--ctx-size") + 1] == str(16 * 1128)
    assert Path(command[0]).is_relative_to(PLACES.peer(LLAMA))


def test_the_forms_of_a_model() -> None:
    assert PLACES.model("tiny", CHECKPOINT) == Path("/cache/models/tiny")
    assert PLACES.model("tiny", "q8_0") == Path("/cache/models/tiny-q8_0.gguf")


def test_arms_are_selected_in_the_order_of_the_table() -> None:
    assert [arm.name for arm in select_arms(["vLLM", "miniserve"])] == ["miniserve", "vLLM"]
    assert select_arms([]) == ARMS
    with pytest.raises(ConfigError, match="no-such-arm"):
        select_arms(["no-such-arm"])
