"""The whole engine in random lives: whatever happens, each request gets exactly its answer, or an error of its own.

Scheduler, KV cache, output processor, detokenizer and masks are real. The model is a script (`foretold`), its runner
keeps what would lie in each KV slot, and it fails together with everything else that may (`faulty`). The normal run is
the same each time. A million rules, others each time, take ten minutes:

    python -m pytest tests/engine/test_engine_machine.py -m slow --numprocesses 0

`ENGINE_MACHINE_ROUNDS` sets another number of rounds, of about 18,000 rules each.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request, RequestStatus
from miniserve.core.schedule import SchedulerOutput
from miniserve.core.scheduler import Scheduler
from miniserve.engine.engine import Engine
from miniserve.errors import ContextLengthError, InternalError, InvalidParameterError
from miniserve.outputs import EngineOutput, FinishReason, OutputFormat
from miniserve.sampling_params import SamplingParams
from miniserve.structured.masks import MaskWorker
from tests.core.line import Line
from tests.core.shadow import check_blocks
from tests.engine.faulty import (
    OF_A_REQUEST,
    OF_A_STEP,
    OF_THE_RUNNER,
    Faults,
    FaultyHook,
    FaultyProcessor,
    FaultyRunner,
    Grammar,
    Place,
)
from tests.engine.foretold import BOS, SAID, Life, foretell
from tests.engine.scripted import EOS, RecordingHook, token

NORMAL = settings(
    max_examples=500,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.reuse, Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
RANDOM = settings(NORMAL, derandomize=False)

A, B, S = token("a"), token("b"), token("S")
ONE_PLACE = st.sampled_from(
    [frozenset({A}), frozenset({A}), frozenset({S}), frozenset({A, B}), frozenset({B, S}), frozenset(SAID)]
)
ERRORS = st.sampled_from([RuntimeError, MemoryError, AssertionError, KeyError])
INDEX = st.integers(0, 100)


def _sampling(min_tokens: int, max_tokens: int | None, **others: object) -> SamplingParams:
    least = min_tokens if max_tokens is None else min(min_tokens, max_tokens)
    return SamplingParams(min_tokens=least, max_tokens=max_tokens, **others)  # type: ignore[arg-type]


SAMPLING = st.builds(
    _sampling,
    min_tokens=st.sampled_from([0, 0, 0, 3, 6]),
    max_tokens=st.sampled_from([None, 16, 12, 5, 1, 0]),
    stop=st.just(())
    | st.sampled_from([("STOP", "OPS"), ("OP", "STOP"), ("é",), ("\ufffd",), ("o w", "aa"), ("😀b", "<bos>")]),
    stop_token_ids=st.sampled_from([(), (), (S,), (BOS, EOS)]),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    seed=st.none() | st.integers(0, 10_000),
    logprobs=st.sampled_from([None, None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
    top_p=st.sampled_from([1.0, 1.0, 0.5]),
)


def _sampling_of_fork(sampling: SamplingParams, index: int) -> SamplingParams:
    return replace(sampling, prompt_logprobs=None, seed=None if sampling.seed is None else sampling.seed + index)


class EngineMachine(RuleBasedStateMachine):
    """Add, abort, step and break in any order; the invariants are checked after every rule.

    `lives` are the requests that have not ended, by id; the ids are few, and used again. `line` is their order.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        cache_tokens=st.sampled_from([16, 24, 32, 12]),
        max_num_seqs=st.sampled_from([4, 6, 2, 1]),
        budget=st.sampled_from([8, 20, 12, 5, 1]),
        max_model_len=st.sampled_from([18, 30, 12, 8]),
        prefix_caching=st.booleans(),
        ahead=st.booleans(),
        priorities=st.sampled_from([(0,), (-1, 0, 7)]),
    )
    def start(
        self,
        block_size: int,
        cache_tokens: int,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        prefix_caching: bool,
        ahead: bool,
        priorities: tuple[int, ...],
    ) -> None:
        self.scheduler = Scheduler(
            KVCacheManager(cache_tokens // block_size + 1, block_size, prefix_caching),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
        )
        self.priorities = priorities
        self.limit = min(max_model_len, cache_tokens // block_size * block_size)
        self.faults = Faults()
        self.runner = FaultyRunner(self.scheduler, self.faults)
        self.processor = FaultyProcessor(self.faults)
        self.hooks = (RecordingHook(), RecordingHook())
        hooks = (self.hooks[0], FaultyHook(self.faults), self.hooks[1])
        self.engine = Engine(self.scheduler, self.runner, self.processor, hooks, MaskWorker(2, ahead=ahead))
        self.line = Line()
        self.lives: dict[str, Life] = {}
        self.old_sequences: list[list[int]] = []

    @rule(
        number=st.integers(0, 7),
        tail=st.lists(st.sampled_from([A, B]), min_size=1, max_size=9),
        history=st.none() | INDEX,
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
        num_choices=st.sampled_from([1, 1, 2, 4]),
        same_again=st.booleans(),
        urgency=INDEX,
        places=st.none() | st.lists(ONE_PLACE, min_size=1, max_size=6),
        sampling=SAMPLING,
        fails=st.sampled_from([None] * 7 + [0, 1]),
        error=ERRORS,
    )
    def add(
        self,
        number: int,
        tail: list[int],
        history: int | None,
        salt: bytes,
        num_choices: int,
        same_again: bool,
        urgency: int,
        places: list[frozenset[int]] | None,
        sampling: SamplingParams,
        fails: int | None,
        error: type[Exception],
    ) -> None:
        prompt = tail
        if history is not None and self.old_sequences:  # a next turn
            prompt = [*self.old_sequences[history % len(self.old_sequences)], *tail]
        prompt = prompt[: self.limit - 1]
        priority = self.priorities[urgency % len(self.priorities)]
        for one in range(number, number + 1 + same_again):
            choices = self._choices(f"r{one}", num_choices, prompt, sampling, salt, priority, places)
            failing = None if fails is None or places is None else choices[fails % num_choices].request_id
            self._add(choices, places, failing, error)

    def _choices(
        self,
        name: str,
        number: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        salt: bytes = b"",
        priority: int = 0,
        places: Sequence[frozenset[int]] | None = None,
    ) -> list[Request]:
        """As the input processor makes them, but that each has a grammar of its own."""
        choices = []
        for index in range(number):
            request_id = f"{name}-{index}"
            grammar = None if places is None else Grammar(places, request_id, self.faults)
            asked = sampling if index == 0 else _sampling_of_fork(sampling, index)
            output_format = OutputFormat(grammar=grammar)
            choices.append(Request(request_id, list(prompt), asked, frozenset({EOS}), salt, priority, output_format))
        return choices

    def _add(
        self,
        choices: Sequence[Request],
        places: Sequence[frozenset[int]] | None,
        failing: str | None,
        error: type[Exception],
    ) -> None:
        """Queue the choices of a prompt, which fit; nothing is left of them if that fails."""
        ids = [choice.request_id for choice in choices]
        prompt = choices[0].token_ids
        refusal: type[Exception] | None = None
        if not self.lives.keys().isdisjoint(ids):
            refusal = InvalidParameterError
        elif failing is not None:
            refusal = InternalError
            self.faults.lasting[failing] = (Place.ADD, error)
        if refusal is not None:
            with pytest.raises(refusal):
                self.engine.add(choices[0], choices[1:])
            self.faults.forget_all_but(self.lives)
            return
        self.engine.add(choices[0], choices[1:])
        self.line.add(choices[0], choices[1:])
        for choice in choices:
            self.runner.salts[choice.request_id] = choice.cache_salt
            answer = foretell(prompt, choice.sampling, self.limit, places)
            self.lives[choice.request_id] = Life(choice, tuple(prompt), answer)

    @precondition(lambda self: self.lives)
    @rule()
    def step(self) -> None:
        self._step()

    @precondition(lambda self: self.lives)
    @rule(num_steps=st.integers(2, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.lives:
                self._step()

    @precondition(lambda self: self.lives)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        request = self.line.pick(index)
        self.line.take_out(request)
        output = self.engine.abort(request.request_id)
        assert output is not None and output.error is None
        self._check_hooks([output])
        life = self.lives[request.request_id]
        life.take_end(output, FinishReason.ABORT)
        assert output.usage.completion_tokens == life.num_tokens
        self._end(life)

    @rule(number=st.integers(0, 9), too_long_by=st.none() | st.integers(0, 4), num_choices=st.integers(1, 2))
    def ask_in_vain(self, number: int, too_long_by: int | None, num_choices: int) -> None:
        """For what can never run, and for the end of who is not there."""
        prompt = [] if too_long_by is None else [A] * (self.limit + too_long_by)
        choices = self._choices(f"r{number}", num_choices, prompt, SamplingParams())
        with pytest.raises((InvalidParameterError, ContextLengthError)):
            self.engine.add(choices[0], choices[1:])
        for choice in choices:
            if choice.request_id not in self.lives:
                assert self.engine.abort(choice.request_id) is None
        self._check_hooks([])

    @precondition(lambda self: self.lives)
    @rule(index=INDEX, place=st.sampled_from(OF_A_REQUEST), error=ERRORS)
    def break_a_request(self, index: int, place: Place, error: type[Exception]) -> None:
        self.faults.lasting[self.line.pick(index).request_id] = (place, error)

    @precondition(lambda self: self.lives)
    @rule(place=st.sampled_from(OF_A_STEP), error=ERRORS, num_hook_calls=st.integers(0, 3))
    def break_a_step(self, place: Place, error: type[Exception], num_hook_calls: int) -> None:
        self.faults.once[place] = error
        self.faults.num_hook_calls = num_hook_calls
        self._step()

    def _step(self) -> None:
        self.faults.begin_step()
        self.runner.steps.clear()
        running = [request.request_id for request in self.scheduler._running]
        outputs = self.engine.step()
        assert not self.runner.complaints
        assert self.runner.steps, "nothing is computed, and there is work"
        step = self.runner.steps[0]
        self.line.check_step(step, running)
        assert step.num_tokens <= self.scheduler.max_num_batched_tokens
        assert [output.request_id for output in outputs] == [
            item.request_id for item in step.scheduled if item.samples or item.request_id in self.faults.struck
        ]
        self._check_hooks(outputs)
        self._move_line(step, outputs)
        for output in outputs:
            self._take(output)
        assert not self.faults.struck, "who met a fault has ended"

    def _move_line(self, step: SchedulerOutput, outputs: Sequence[EngineOutput]) -> None:
        """As the scheduler takes in what was computed; then those end of whom it does not know yet that they do."""
        ended = [self.lives[one.request_id].request for one in outputs if one.finish_reason is not None]
        for request in ended:
            self.line.live.remove(request)
        self.line.release(
            [
                self.lives[item.request_id].request
                for item in step.scheduled
                if item.end >= item.num_prompt_tokens or self._has_broken_runner(item.request_id)
            ]
        )
        for request in ended:
            self.line.release([request])

    def _has_broken_runner(self, request_id: str) -> bool:
        return not OF_THE_RUNNER.isdisjoint(self.faults.struck.get(request_id, ()))

    def _take(self, output: EngineOutput) -> None:
        life = self.lives[output.request_id]
        if output.request_id not in self.faults.struck:
            life.take(output)
        else:
            life.take_end(output, FinishReason.ERROR)
            assert output.error in self.faults.told(output.request_id)
            num_lost = output.usage.completion_tokens - life.num_tokens
            assert num_lost == 0 or (num_lost > 0 and not self._has_broken_runner(output.request_id))
        if output.finish_reason is not None:
            self._end(life)

    def _end(self, life: Life) -> None:
        request = life.request
        assert request.status is RequestStatus.FINISHED and request.block_ids == []
        self.old_sequences.append(request.token_ids)
        self.faults.forget(request.request_id)
        del self.lives[request.request_id]

    def _check_hooks(self, outputs: Sequence[EngineOutput]) -> None:
        """They were told of exactly these."""
        for hook in self.hooks:
            assert [*map(id, hook.outputs)] == [*map(id, outputs)]
            hook.outputs.clear()

    @invariant()
    def blocks_are_right(self) -> None:
        if hasattr(self, "engine"):
            check_blocks(self.scheduler, self.runner.cache)

    @invariant()
    def requests_are_right(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.line.check(self.scheduler)
        assert self.engine.has_work == bool(self.lives)
        assert self.processor._states.keys() == self.scheduler._requests.keys() == self.lives.keys()
        for life in self.lives.values():
            assert life.request.token_ids == [*life.prompt, *life.answer.token_ids[: life.num_tokens]]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        with closing(self.engine):
            if sys.exc_info()[0] is None:  # else what has failed already would be hidden by what follows from it
                self._come_to_an_end()

    def _come_to_an_end(self) -> None:
        self.faults.once.clear()
        # Each is the first for at most so many steps, twice if one more urgent comes between.
        for _ in range(2 * len(self.lives) * self.limit):
            if self.lives:
                self._step()
        assert not self.lives and not self.engine.has_work
        self.blocks_are_right()
        self.requests_are_right()
        assert self.scheduler.kv.pool.num_used == 0
        assert self.engine.masks._jobs.empty()
        assert self.engine.step() == []


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """Each fault is a traceback, and pytest keeps them all."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(600)  # what has failed takes up to five minutes to be made short
def test_engine_machine() -> None:
    run_state_machine_as_test(EngineMachine, settings=NORMAL)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_engine_machine_for_long() -> None:
    for _ in range(int(os.environ.get("ENGINE_MACHINE_ROUNDS", "55"))):  # of one, hypothesis would keep all in memory
        run_state_machine_as_test(EngineMachine, settings=RANDOM)
