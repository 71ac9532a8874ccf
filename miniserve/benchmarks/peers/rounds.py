"""The comparison: round after round, each arm in turn, alone on the machine.

A server is started for its turn and ended after it: an idle one may still use a core (vLLM's workers ask for work all
the time), memory is never shared, and no prefix cache knows a prompt. The results are written after every turn, so a
run that breaks off has what it has measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from miniserve.benchmarks.peers import llama_bench, probes
from miniserve.benchmarks.peers.arms import HOST, MINISERVE, Arm, Interface, Launch, launch
from miniserve.benchmarks.peers.load import Figures, Server, Words, Workload, measure
from miniserve.benchmarks.peers.models import part_name
from miniserve.benchmarks.peers.places import CHECKPOINT, Places
from miniserve.benchmarks.peers.results import Comparison, Turn
from miniserve.benchmarks.peers.server import free_port, running
from miniserve.benchmarks.peers.setup import State
from miniserve.errors import ConfigError, InternalError

SPARE_CONTEXT = 64  # tokens beyond the longest request, for servers that keep some

Say = Callable[[str], None]


def compare(
    plan: Comparison, arms: Sequence[Arm], places: Places, done: Callable[[Comparison], None], say: Say
) -> None:
    """Measure what `plan` says; `done` hears of all results after every turn."""
    turns: list[Turn] = []
    for model in plan.models:
        words = Words(places.model(model, CHECKPOINT))
        for number in range(1, plan.rounds + 1):
            for arm in arms:
                if arm.name in plan.left_out[model]:
                    continue
                turn = Turn(model, number, arm.name, probes.probe(len(plan.cores)))
                turns.append(_take_turn(plan, arm, places, turn, words))
                say(_line(turns[-1], plan.rounds))
                done(replace(plan, turns=tuple(turns)))


def plan_comparison(
    arms: Sequence[Arm], models: Sequence[str], workloads: Sequence[Workload], rounds: int, state: State
) -> Comparison:
    """What can be measured with what is set up.

    Raises:
        ConfigError: a number is out of range, or a model is not written yet.
    """
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {rounds}")
    for model in models:
        if reason := state.reason(part_name(model, CHECKPOINT)):
            raise ConfigError(f"the model {model} cannot be measured: {reason}")
    return Comparison(
        models=tuple(models),
        arms=tuple(arm.name for arm in arms),
        workloads=tuple(workloads),
        rounds=rounds,
        cores=_cores(),
        versions={arm.peer: state.versions[arm.peer] for arm in arms if arm.peer in state.versions},
        left_out={model: _left_out(arms, model, state) for model in models},
    )


def _left_out(arms: Sequence[Arm], model: str, state: State) -> dict[str, str]:
    reasons = {}
    for arm in arms:
        peer = () if arm.peer == MINISERVE else (arm.peer,)
        if reason := state.reason(*peer, part_name(model, arm.form)):
            reasons[arm.name] = reason
    return reasons


def _cores() -> tuple[int, ...]:
    """All that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


# One turn


def _take_turn(plan: Comparison, arm: Arm, places: Places, turn: Turn, words: Words) -> Turn:
    """`turn` with what was measured in it."""
    started = _launch(plan, arm, places, turn.model)
    command = started.command(arm)
    if arm.interface is Interface.LLAMA_BENCH:
        single = [workload for workload in plan.workloads if workload.streams == 1]
        figures, errors = _measure_all(single, lambda workload: llama_bench.measure(command, workload))
        return replace(turn, figures=figures, errors=errors)
    server = Server(f"http://{HOST}:{started.port}", started.model, arm.interface)
    log = places.logs / f"{turn.model}-{arm.name}.log"
    try:
        with running(command, started.environment(arm), server.url + arm.health, log) as start_seconds:
            figures, errors = _measure_all(
                plan.workloads, lambda workload: measure(server, workload, words, f"{turn.round}/{workload.name}")
            )
    except (InternalError, OSError) as error:
        return replace(turn, errors={"": str(error)})
    return replace(turn, start_seconds=start_seconds, figures=figures, errors=errors)


def _launch(plan: Comparison, arm: Arm, places: Places, model: str) -> Launch:
    return launch(
        arm,
        places,
        model,
        port=free_port(HOST),
        streams=max(workload.streams for workload in plan.workloads),
        context=max(workload.context for workload in plan.workloads) + SPARE_CONTEXT,
        cores=plan.cores,
    )


def _measure_all(
    workloads: Sequence[Workload], run: Callable[[Workload], Figures]
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Figures and errors by workload: one that fails does not keep the next from being tried."""
    figures: dict[str, Figures] = {}
    errors: dict[str, str] = {}
    for workload in workloads:
        try:
            figures[workload.name] = run(workload)
        except InternalError as error:
            errors[workload.name] = str(error)
    return figures, errors


def _line(turn: Turn, rounds: int) -> str:
    rates = [f"{name} {figures.output_tokens_per_second:.1f}" for name, figures in turn.figures.items()]
    errors = [f"{name or 'start'}: {error}" for name, error in turn.errors.items()]
    told = f"; tok/s: {', '.join(rates)}" if rates else ""
    return f"{turn.model}, round {turn.round} of {rounds}, {turn.arm}{told}{''.join(f'; {error}' for error in errors)}"
