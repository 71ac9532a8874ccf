"""A fault at any call of any part of the engine: at most one request pays for it, all others get the right answer.

One mixed batch runs without a fault, and then again and again, with an exception at the first call of a function, at
the second, and so on, until there is no such call any more. So no step of a request is left out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from miniserve.core.request import Request
from miniserve.engine.constrained import ConstrainedSampling
from miniserve.engine.engine import ENGINE_FAILED, Engine
from miniserve.engine.output_processor import OutputProcessor, RequestState
from miniserve.engine.output_text import OutputText
from miniserve.errors import InternalError
from miniserve.outputs import EngineOutput, FinishReason, OutputFormat, Thinking
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.compiler import Grammar, GrammarCompiler, Matcher
from miniserve.structured.masks import MaskQuery, MaskWorker
from miniserve.text.detokenizer import IncrementalDetokenizer
from miniserve.text.reasoning import ReasoningSplitter
from miniserve.text.stop import StopMatcher
from miniserve.text.tokenizer import Tokenizer
from tests.engine.scripted import EOS, ScriptedRunner, make_choices, make_engine, make_request, make_tokenizer

THINK = make_tokenizer("<think>", "</think>")
NUM_BLOCKS = 13  # of four tokens: some are preempted
MOST_CALLS = 500

# Where it strikes, and how many requests it may cost: none where the step can be repeated.
POINTS: list[tuple[type, str, int]] = [
    (ScriptedRunner, "execute", 0),
    (ScriptedRunner, "sample", 0),
    (ConstrainedSampling, "sample", 0),
    (OutputText, "__init__", 2),  # the choices of a prompt are let in together
    (OutputText, "push", 1),
    (OutputText, "mask_query", 1),
    (OutputProcessor, "process", 1),
    (RequestState, "take_tokens", 1),
    (IncrementalDetokenizer, "push", 1),
    (IncrementalDetokenizer, "flush", 1),
    (ReasoningSplitter, "push", 1),
    (ReasoningSplitter, "flush", 1),
    (StopMatcher, "push", 1),
    (StopMatcher, "flush", 1),
    (Tokenizer, "decode_bytes", 1),
    (Grammar, "start", 1),
    (Matcher, "accept", 1),
    (Matcher, "forced", 1),
    (Matcher, "allows", 1),
    (Matcher, "fill", 1),
    (MaskQuery, "forced", 1),
    (MaskQuery, "allows", 1),
    (MaskWorker, "start", 3),  # of no use to any of those with a grammar
    (MaskWorker, "compute", 3),
    (threading.Thread, "start", 3),
]


@dataclass
class Fault:
    """Raises `error` at call number `at` of `owner.name`."""

    owner: type
    name: str
    at: int
    error: Exception
    num_calls: int = 0

    @property
    def struck(self) -> bool:
        return self.num_calls >= self.at

    def inject(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(self.owner, self.name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.at:
                raise self.error
            return original(*args, **kwargs)

        monkeypatch.setattr(self.owner, self.name, call)


@dataclass(frozen=True)
class Result:
    """Of one request: what the client got, and how it ended."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    reason: FinishReason | None = None
    error: str | None = None


@pytest.fixture(scope="module")
def grammars() -> dict[str, Grammar]:
    compiler = GrammarCompiler(THINK, num_token_ids=THINK.num_token_ids, eos_token_ids=frozenset({EOS}))
    asked = {
        "json": StructuredOutput.json({"type": "object", "properties": {"a": {"type": "integer"}}}),
        "words": StructuredOutput("choice", '["yes", "yeah"]'),
    }
    return {name: compiler.compile(each) for name, each in asked.items()}


def batch(grammars: dict[str, Grammar]) -> list[list[Request]]:
    """Plain, with stop strings, with two choices, with grammars, with reasoning, with logprobs."""
    constrained = OutputFormat(grammar=grammars["json"])
    forced = OutputFormat(grammar=grammars["words"])
    thinking = OutputFormat(grammar=grammars["words"], thinking=Thinking("<think>", "</think>"))
    return [
        [make_request("plain", "plain", max_tokens=7)],
        [make_request("stop", "ends", stop=("STOP",))],
        make_choices("two", 2, "twice", max_tokens=5),
        [make_request("json", "j", constrained, max_tokens=12, temperature=1.0, top_p=0.9)],
        [make_request("forced", "f", forced)],
        [make_request("thinking", "t", thinking, max_tokens=16, stop=("ah",))],
        [make_request("logprobs", "l", logprobs=2, prompt_logprobs=1, max_tokens=4)],
    ]


LINES = {
    "plain": "pl\u00e4in.",
    "stop": "see STOP here",
    "two": "one",
    "two-1": "two",
    "json": '{"a": 12}',
    "forced": "yes",
    "thinking": "<think>hm</think>yeah",
    "logprobs": "log",
}


def make(ahead: bool) -> Engine:
    script = {name: [*THINK.encode(line, add_special_tokens=False), EOS] for name, line in LINES.items()}
    masks = MaskWorker(2, ahead=ahead)
    return make_engine(script, tokenizer=THINK, masks=masks, num_blocks=NUM_BLOCKS, max_num_batched_tokens=9)


def run(engine: Engine, prompts: list[list[Request]]) -> dict[str, Result]:
    """The results of all; a request that was not let in has failed."""
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for each in prompts for request in each}
    results: dict[str, Result] = {}
    for request, *forks in prompts:
        try:
            engine.add(request, forks)
        except InternalError:
            results |= {
                each.request_id: Result(reason=FinishReason.ERROR, error=ENGINE_FAILED) for each in (request, *forks)
            }
    for _ in range(MOST_CALLS):
        if not engine.has_work:
            break
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert not engine.has_work
    return {name: results.get(name) or joined(outputs[name]) for name in outputs}


def joined(outputs: list[EngineOutput]) -> Result:
    assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return Result(
        "".join(output.reasoning + "|" + output.text for output in outputs).replace("|", ""),
        tuple(token_id for output in outputs for token_id in output.token_ids),
        outputs[-1].finish_reason,
        outputs[-1].error,
    )


def check_unharmed(engine: Engine, grammars: dict[str, Grammar]) -> None:
    """Nothing is held for anybody, and the next one is served."""
    assert engine.scheduler.kv.pool.num_used == 0
    assert engine.output_processor._states == {}
    again = run(engine, [[make_request("forced", "f", OutputFormat(grammar=grammars["words"]))]])
    assert again["forced"].text == "yes"


@pytest.mark.parametrize(
    ("ahead", "error"),
    [(True, RuntimeError("a secret")), (False, MemoryError())],
    ids=["masks beside the model", "masks behind it"],
)
@pytest.mark.parametrize(
    ("owner", "name", "most"), POINTS, ids=[f"{owner.__name__}.{name}" for owner, name, _ in POINTS]
)
def test_one_fault_costs_one_request_at_most(
    owner: type,
    name: str,
    most: int,
    error: Exception,
    ahead: bool,
    grammars: dict[str, Grammar],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    golden = run(make(ahead), batch(grammars))
    assert all(result.error is None for result in golden.values())
    for at in range(1, MOST_CALLS):
        fault = Fault(owner, name, at, error)
        engine = make(ahead)
        with monkeypatch.context() as patched:
            fault.inject(patched)
            found = run(engine, batch(grammars))
        if not fault.struck:
            assert at > 1 or (name == "allows" and ahead), f"{owner.__name__}.{name} is never called"
            return
        victims = [request_id for request_id in golden if found[request_id] != golden[request_id]]
        assert len(victims) <= most, f"call {at} harmed {victims}"
        for request_id in victims:
            check_victim(found[request_id], golden[request_id])
        check_unharmed(engine, grammars)
    raise AssertionError(f"{owner.__name__}.{name} is called more than {MOST_CALLS} times")


def check_victim(found: Result, golden: Result) -> None:
    """It is told, in general words, and what it got before was right."""
    assert found.reason is FinishReason.ERROR and found.error in (ENGINE_FAILED, "its grammar failed")
    assert golden.text.startswith(found.text)
    assert found.token_ids == golden.token_ids[: len(found.token_ids)]


@pytest.mark.parametrize("victim", list(LINES))
@pytest.mark.parametrize("name", ["execute", "sample"])
def test_a_request_that_can_never_be_computed(
    name: str,
    victim: str,
    grammars: dict[str, Grammar],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From each of its steps on, alone or among others."""
    caplog.set_level(logging.CRITICAL + 1)
    golden = run(make(False), batch(grammars))
    original: Callable[..., Any] = getattr(ScriptedRunner, name)
    for end in range(1, 40):
        struck = False

        def call(runner: ScriptedRunner, step: Any, *args: Any, end: int = end) -> Any:
            nonlocal struck
            if any(item.request_id == victim and item.end >= end for item in step.scheduled):
                struck = True
                raise RuntimeError("a secret")
            return original(runner, step, *args)

        engine = make(False)
        with monkeypatch.context() as patched:
            patched.setattr(ScriptedRunner, name, call)
            found = run(engine, batch(grammars))
        if not struck:
            return
        assert [request_id for request_id in golden if found[request_id] != golden[request_id]] == [victim]
        check_victim(found[victim], golden[victim])
        check_unharmed(engine, grammars)
