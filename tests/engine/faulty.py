"""Everything around an engine that can go wrong, and goes wrong when it is told to: runner, detokenizer, grammar, hook.

Each fault that has been met is noted, so that it can be said exactly who may end with an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miniserve.core.request import Request
from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest, SchedulerOutput
from miniserve.core.scheduler import RequestNews, Scheduler
from miniserve.engine.engine import ENGINE_FAILED
from miniserve.engine.metrics import StepStats
from miniserve.engine.output_processor import LEFT_GRAMMAR, OutputProcessor, Processed
from miniserve.outputs import EngineOutput
from miniserve.structured.compiler import GrammarError
from miniserve.text.tokenizer import Tokenizer
from tests.core.shadow import ShadowCache
from tests.engine.foretold import logprobs_at, next_token
from tests.engine.scripted import TOKENIZER


class Place(Enum):
    """Where something goes wrong."""

    ADD = auto()  # no answer can begin
    BEGIN = auto()  # the runner raises before it has done anything
    COMPUTE = auto()  # the runner raises, and has left useless KV for all of the step
    SAMPLE = auto()
    REPORT = auto()  # the runner says that it cannot go on with a request, whose KV is useless
    MASK = auto()  # what a grammar allows cannot be told
    GRAMMAR = auto()  # an answer leaves its grammar
    OUTPUT = auto()  # the output processor raises at once
    TEXT = auto()  # the detokenizer raises


OF_A_STEP = (Place.BEGIN, Place.COMPUTE, Place.SAMPLE)
OF_A_REQUEST = (*OF_A_STEP, Place.REPORT, Place.MASK, Place.GRAMMAR, Place.OUTPUT, Place.TEXT)
OF_THE_RUNNER = frozenset({*OF_A_STEP, Place.REPORT, Place.MASK})  # as the scheduler is told
TOLD = {Place.REPORT: "reported", Place.MASK: "broken", Place.GRAMMAR: f"{LEFT_GRAMMAR}: broken"}


@dataclass
class Faults:
    """What is to go wrong, and what went wrong.

    Attributes:
        once: the next step fails there, whoever is in it.
        lasting: by request, where it fails each time that it gets there.
        num_hook_calls: so many calls of a hook fail.
        struck: by request, where it failed: it has to end.
    """

    once: dict[Place, type[Exception]] = field(default_factory=dict)
    lasting: dict[str, tuple[Place, type[Exception]]] = field(default_factory=dict)
    num_hook_calls: int = 0
    struck: dict[str, set[Place]] = field(default_factory=dict)
    _alone: bool = False

    def begin_step(self) -> None:
        self._alone = False

    def hits(self, place: Place, step: SchedulerOutput) -> bool:
        """Whether the step is to fail there."""
        return place in self.once or any(self._is_due(place, item.request_id) for item in step.scheduled)

    def meet_in_step(self, place: Place, step: SchedulerOutput) -> None:
        """Fail if the step is to; after that, whoever is computed alone and fails again has to end."""
        kinds = [self.lasting[item.request_id][1] for item in step.scheduled if self._is_due(place, item.request_id)]
        if place in self.once:
            kinds.append(self.once.pop(place))
        if not kinds:
            return
        if self._alone:
            [item] = step.scheduled
            self._strike(place, item.request_id)
        self._alone = True
        raise kinds[0]("broken")

    def meet(self, place: Place, request_id: str) -> None:
        """Fail if the request is to."""
        if self.met(place, request_id):
            raise self.lasting[request_id][1]("broken")

    def met(self, place: Place, request_id: str) -> bool:
        """Whether the request is to fail here; then it has."""
        if not self._is_due(place, request_id):
            return False
        self._strike(place, request_id)
        return True

    def told(self, request_id: str) -> set[str]:
        """What its client may be told."""
        return {TOLD.get(place, ENGINE_FAILED) for place in self.struck[request_id]}

    def forget(self, request_id: str) -> None:
        self.lasting.pop(request_id, None)
        self.struck.pop(request_id, None)

    def forget_all_but(self, request_ids: Collection[str]) -> None:
        for request_id in self.lasting.keys() - request_ids:
            self.forget(request_id)

    def _is_due(self, place: Place, request_id: str) -> bool:
        return request_id in self.lasting and self.lasting[request_id][0] is place

    def _strike(self, place: Place, request_id: str) -> None:
        self.struck.setdefault(request_id, set()).add(place)


class FaultyRunner:
    """Says what the script says, and keeps what would lie in the KV cache.

    Attributes:
        salts: by request id.
        steps: what was to be computed; the machine empties it.
        complaints: what it was asked for and must not be. The engine takes any exception for a broken runner.
    """

    def __init__(self, scheduler: Scheduler, faults: Faults) -> None:
        self.cache = ShadowCache(scheduler)
        self.faults = faults
        self.salts: dict[str, bytes] = {}
        self.steps: list[SchedulerOutput] = []
        self.complaints: list[str] = []

    def execute(self, step: SchedulerOutput) -> SchedulerOutput:
        self.steps.append(step)
        self.cache.spoil(step.blocks_to_clear)  # until they are
        self.faults.meet_in_step(Place.BEGIN, step)
        ids = [item.request_id for item in step.scheduled]
        is_broken = self.faults.hits(Place.COMPUTE, step)
        failing = frozenset(one for one in ids if is_broken or self.faults.met(Place.REPORT, one))
        try:
            self.cache.compute(step, self.salts, failing)
        except AssertionError as error:
            self.complaints.append(str(error))
            raise
        self.faults.meet_in_step(Place.COMPUTE, step)
        return step

    def sample(
        self, step: SchedulerOutput, logits: SchedulerOutput, masks: Mapping[str, Any] = MappingProxyType({})
    ) -> RunnerOutput:
        if not {item.request_id for item in step.scheduled} <= {item.request_id for item in logits.scheduled}:
            self.complaints.append("sampled from the logits of another step")
        self.faults.meet_in_step(Place.SAMPLE, step)
        return RunnerOutput(tuple(self._result(item, masks.get(item.request_id)) for item in step.scheduled))

    def _result(self, item: ScheduledRequest, mask: NDArray[np.int32] | None) -> RunnerResult:
        if self.faults.met(Place.REPORT, item.request_id):
            return RunnerResult(error=TOLD[Place.REPORT])
        asked, prefix = item.sampling, item.token_ids
        token_ids = (next_token(prefix, asked.seed, item.banned_ids, _allowed(mask)),) if item.samples else ()
        places = range(item.start + 1, min(item.end + 1, item.num_prompt_tokens)) if item.wants_prompt_logprobs else ()
        return RunnerResult(
            token_ids,
            tuple(logprobs_at(prefix, one, asked.logprobs) for one in token_ids if asked.logprobs is not None),
            tuple(logprobs_at(prefix[:place], prefix[place], asked.prompt_logprobs or 0) for place in places),
        )


def _allowed(mask: NDArray[np.int32] | None) -> Collection[int] | None:
    if mask is None:
        return None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@dataclass(frozen=True)
class Grammar:
    """Answers of as many tokens as there are places; at each, any of some tokens. For one request."""

    places: Sequence[Collection[int]]
    request_id: str
    faults: Faults

    def start(self) -> Follower:
        self.faults.meet(Place.ADD, self.request_id)
        return Follower(self)


class Follower:
    """Follows one answer, as a `structured.Matcher`."""

    num_words = -(-TOKENIZER.num_token_ids // 32)

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._left = list(grammar.places)

    @property
    def complete(self) -> bool:
        return not self._left

    def accept(self, token_ids: Iterable[int]) -> None:
        if self._grammar.faults.met(Place.GRAMMAR, self._grammar.request_id):
            raise GrammarError("broken")
        for token_id in token_ids:
            if not self.allows(token_id):
                raise GrammarError(f"the token {token_id} comes at the wrong place")
            self._left.pop(0)

    def forced(self) -> tuple[int, ...]:
        choices = (len(place) > 1 for place in self._left)
        return tuple(token_id for [token_id] in self._left[: [*choices, True].index(True)])

    def allows(self, token_id: int) -> bool:
        return token_id in self._left[0]

    def fill(self, row: NDArray[np.int32]) -> None:
        if self._grammar.faults.met(Place.MASK, self._grammar.request_id):
            raise GrammarError("broken")
        bits = row.view(np.uint32)
        for token_id in self._left[0]:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)


class FaultyTokenizer(Tokenizer):
    """The tokenizer of the scripts. `request_id`: whose text it is asked for."""

    def __init__(self, faults: Faults) -> None:
        vars(self).update(vars(TOKENIZER))
        self.faults = faults
        self.request_id = ""

    def decode_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        self.faults.meet(Place.TEXT, self.request_id)
        return super().decode_bytes(token_ids, skip_special_tokens=skip_special_tokens)


class FaultyProcessor(OutputProcessor):
    """A real one with a tokenizer that may fail."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.tokenizer = FaultyTokenizer(faults)
        super().__init__(self.tokenizer)

    def process(self, news: RequestNews) -> Processed | None:
        self.tokenizer.request_id = news.request.request_id
        self.faults.meet(Place.OUTPUT, news.request.request_id)
        return super().process(news)


class FaultyHook:
    """Raises as often as it is to."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def on_step(self, stats: StepStats) -> None:
        self._meet()

    def on_output(self, request: Request, output: EngineOutput, gap: float | None) -> None:
        self._meet()

    def _meet(self) -> None:
        if self.faults.num_hook_calls:
            self.faults.num_hook_calls -= 1
            raise MemoryError("broken")
