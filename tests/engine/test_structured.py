"""Grammars through the whole engine: who is constrained when, what the matcher gets to see, and how it ends.

The grammars are lists of answers, and their masks are made on the spot; the real ones have tests of their own, and one
here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from miniserve.core.schedule import RunnerOutput, SchedulerOutput
from miniserve.engine.engine import ENGINE_FAILED, Engine
from miniserve.engine.output_processor import LEFT_GRAMMAR
from miniserve.outputs import EngineOutput, FinishReason, OutputFormat, Thinking
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.compiler import GrammarCompiler, GrammarError
from miniserve.structured.masks import MaskQuery, MaskWorker
from miniserve.text.parsers.base import Tool
from miniserve.text.parsers.hermes import HermesFormat
from miniserve.text.tokenizer import Tokenizer
from tests.engine.scripted import (
    EOS,
    TOKENIZER,
    ScriptedRunner,
    make_choices,
    make_engine,
    make_request,
    make_tokenizer,
    token,
)

THINK = Thinking("<think>", "</think>")
INSIDE = Thinking("<think>", "</think>", inside=True)
TAGS = make_tokenizer("<think>", "</think>", "k>\na", "k>b", "\n\n")


def encode(text: str, tokenizer: Tokenizer = TAGS) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


THINK_ID, END_ID = encode("<think></think>")
BREAK, TWO_BREAKS = encode("\n"), encode("\n\n")
BREAKS = (*BREAK, *TWO_BREAKS)  # what may come between reasoning and answer


# Fakes


@dataclass(eq=False)
class FakeMatcher:
    """Accepts one of `lines`, token by token. `end_id` is allowed where one is complete."""

    lines: Sequence[tuple[int, ...]]
    end_id: int | None = EOS
    taken: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    failure: Exception | None = None
    forces: bool = False  # tells of tokens that have to come

    def accept(self, token_ids: Iterable[int]) -> None:
        if self.failure is not None:
            raise self.failure
        for token_id in token_ids:
            if token_id not in self.following:
                raise GrammarError(f"token {token_id} is not allowed")
            self.taken.append(token_id)

    def try_accept(self, token_id: int) -> bool:
        if self.failure is not None:
            raise self.failure
        if is_allowed := token_id in self.following:
            self.taken.append(token_id)
        return is_allowed

    def accept_text(self, text: str) -> None:
        self.texts.append(text)
        self.accept(encode(text, TOKENIZER))

    def token_of(self, text: str) -> int | None:
        token_ids = encode(text)
        return token_ids[0] if len(token_ids) == 1 else None

    @property
    def following(self) -> set[int]:
        """What may come next."""
        taken = tuple(self.taken)
        rest = [line[len(taken) :] for line in self.lines if line[: len(taken)] == taken]
        ends = {self.end_id} if () in rest and self.end_id is not None else set()
        return {line[0] for line in rest if line} | ends

    @property
    def complete(self) -> bool:
        return self.following <= {self.end_id}

    def forced(self) -> tuple[int, ...]:
        """As `Matcher.forced`, up to an end."""
        if not self.forces:
            return ()
        ahead = FakeMatcher(self.lines, self.end_id, list(self.taken))
        while len(ahead.following) == 1 and ahead.following != {self.end_id}:
            ahead.taken += ahead.following
        return tuple(ahead.taken[len(self.taken) :])

    def allows(self, token_id: int) -> bool:
        return token_id in self.following

    def fill(self, row: Any) -> None:
        allow(row, self.following)


def allow(row: Any, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        row.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


class FakeGrammar:
    """Answers that are allowed; remembers its matchers. An answer that ended with <eos> is over."""

    def __init__(self, *answers: str, failure: Exception | None = None, forces: bool = False) -> None:
        lines = [tuple(encode(answer, TOKENIZER)) for answer in answers]
        self._lines = [*lines, *((*line, EOS) for line in lines)]
        self._failure = failure
        self._forces = forces
        self.matchers: list[FakeMatcher] = []

    def start(self) -> FakeMatcher:
        self.matchers.append(FakeMatcher(self._lines, failure=self._failure, forces=self._forces))
        return self.matchers[-1]


@dataclass
class FakeMasks:
    """Pending and done in one."""

    rows: Mapping[str, Any]
    errors: Mapping[str, str]
    num_taken: int = 0

    def result(self) -> FakeMasks:
        self.num_taken += 1
        return self


class FakeMaskWorker:
    """Fills the masks at once; `failing` names requests whose mask fails. Records who was asked for.

    `ahead`: as that of `MaskWorker`.
    """

    def __init__(self, failing: Sequence[str] = (), *, ahead: bool = True) -> None:
        self.ahead = ahead
        self.failing = failing
        self.queries: list[list[MaskQuery]] = []
        self.pending: list[FakeMasks] = []

    def start(self, queries: Sequence[MaskQuery]) -> FakeMasks:
        self.queries.append(list(queries))
        rows = {query.request_id: _row(query) for query in queries if query.request_id not in self.failing}
        errors = {query.request_id: "too complex" for query in queries if query.request_id in self.failing}
        self.pending.append(FakeMasks(rows, errors))
        return self.pending[-1]

    def close(self) -> None: ...


class NoMasks(FakeMaskWorker):
    """Lets every token through."""

    def start(self, queries: Sequence[MaskQuery]) -> FakeMasks:
        return FakeMasks({}, {})


def _row(query: MaskQuery) -> Any:
    row = np.zeros(-(-TAGS.num_token_ids // 32), np.int32)
    if not query.only_those:
        query.matcher.fill(row)
    allow(row, query.also_allowed)
    return row


# Runs


def make(script: Mapping[str, Sequence[int]], tokenizer: Tokenizer = TAGS, **options: Any) -> Engine:
    return make_engine(script, tokenizer=tokenizer, **{"masks": FakeMaskWorker(), **options})


def ask(
    engine: Engine, request_id: str, grammar: FakeGrammar | None, thinking: Thinking | None = None, **sampling: Any
) -> None:
    output_format = OutputFormat(thinking=thinking, grammar=grammar)
    engine.add(make_request(request_id, output_format=output_format, **sampling))


def run(engine: Engine) -> dict[str, EngineOutput]:
    """All that each request says, as one output."""
    outputs: dict[str, EngineOutput] = {}
    while engine.has_work:
        for output in engine.step():
            before = outputs.get(output.request_id)
            outputs[output.request_id] = output if before is None else before.merge(output)
    assert engine.scheduler.kv.pool.num_used == 0
    return outputs


def answer(
    line: Sequence[int],
    grammar: FakeGrammar,
    thinking: Thinking | None = None,
    *,
    tokenizer: Tokenizer = TAGS,
    masks: FakeMaskWorker | None = None,
    **sampling: Any,
) -> tuple[EngineOutput, FakeMaskWorker]:
    worker = masks or FakeMaskWorker()
    engine = make({"a": line}, tokenizer, masks=worker)
    ask(engine, "a", grammar, thinking, **sampling)
    return run(engine)["a"], worker


def taken(grammar: FakeGrammar) -> list[list[int]]:
    """What each of the matchers that were asked has taken."""
    return [matcher.taken for matcher in grammar.matchers if matcher.taken]


def also_allowed(worker: FakeMaskWorker) -> list[tuple[int, ...] | None]:
    """Of each step: what is allowed beside the grammar; None for a step that nobody is constrained in."""
    return [queries[0].also_allowed if queries else None for queries in worker.queries]


# How it begins and ends


def test_the_mask_decides_and_a_complete_grammar_ends() -> None:
    grammar = FakeGrammar("yes", "yea")
    output, worker = answer([*encode("yes"), *encode("no")], grammar)
    assert (output.text, output.finish_reason, output.stop_reason) == ("yes", FinishReason.STOP, None)
    assert taken(grammar) == [encode("yes")]
    assert also_allowed(worker) == [()] * 3
    output, _ = answer(encode("no"), FakeGrammar("yes"))
    assert output.text == "yes"


@pytest.mark.parametrize(
    ("max_tokens", "text", "reason"), [(2, "ye", FinishReason.LENGTH), (3, "yes", FinishReason.STOP)]
)
def test_the_last_allowed_token(max_tokens: int, text: str, reason: FinishReason) -> None:
    """Complete by the token that is the last anyway: that is an end, no cut."""
    engine = make({"a": encode("yes")})
    request = make_request("a", output_format=OutputFormat(grammar=FakeGrammar("yes")), max_tokens=max_tokens)
    engine.add(request)
    output = run(engine)["a"]
    assert (output.text, output.finish_reason, request.finish_reason) == (text, reason, reason)


def test_an_answer_that_may_go_on_ends_by_its_end_token() -> None:
    grammar = FakeGrammar("a", "ab")
    output, _ = answer([*encode("a"), EOS], grammar)
    assert (output.text, output.finish_reason) == ("a", FinishReason.STOP)
    assert taken(grammar) == [encode("a")]  # the end token is no part of the answer


def test_an_end_token_that_is_ignored_completes_the_grammar() -> None:
    """It is sampled only where the grammar may end, and then nothing follows."""
    grammar = FakeGrammar("a", "ab")
    output, _ = answer([*encode("a"), EOS, *encode("b")], grammar, ignore_eos=True)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("a", FinishReason.STOP, 2)
    assert taken(grammar) == [[*encode("a"), EOS]]


def test_a_stop_string_cuts_the_answer() -> None:
    output, _ = answer(encode("yes"), FakeGrammar("yes"), stop=("e",))
    assert (output.text, output.stop_reason) == ("y", "e")
    output, _ = answer(encode("yes"), FakeGrammar("yes"), stop=("s",))
    assert (output.text, output.stop_reason) == ("ye", "s")


def test_text_that_might_have_become_a_stop_string_is_shown_at_the_end() -> None:
    output, _ = answer(encode("yes"), FakeGrammar("yes"), stop=("sir",))
    assert (output.text, output.finish_reason, output.stop_reason) == ("yes", FinishReason.STOP, None)


def test_a_stop_token_is_no_part_of_the_answer() -> None:
    grammar = FakeGrammar("a!b")
    output, _ = answer(encode("a!b"), grammar, stop_token_ids=(token("!"),), include_stop_str_in_output=True)
    assert (output.text, output.stop_reason) == ("a!", token("!"))
    assert taken(grammar) == [encode("a")]


# Reasoning first


def test_the_grammar_begins_after_the_reasoning() -> None:
    grammar = FakeGrammar("yes")
    output, worker = answer(encode("<think>no</think>no"), grammar, THINK)
    assert (output.reasoning, output.text, output.finish_reason) == ("no", "yes", FinishReason.STOP)
    assert taken(grammar) == [encode("yes")]
    assert also_allowed(worker) == [(THINK_ID,), None, None, None, BREAKS, (), ()]
    assert output.usage.reasoning_tokens == 4


def test_the_model_may_answer_at_once() -> None:
    grammar = FakeGrammar("<thick")
    output, worker = answer(encode("<thick", TOKENIZER), grammar, THINK)
    assert (output.reasoning, output.text) == ("", "<thick")
    following = [encode(char, TOKENIZER) for char in "thi"]
    assert also_allowed(worker)[:5] == [(THINK_ID,), *map(tuple, following), tuple(encode("n"))]
    assert taken(grammar) == [encode("<thick", TOKENIZER)]


def test_a_start_tag_after_the_beginning_is_masked() -> None:
    output, _ = answer([*encode("y"), THINK_ID, *encode("s")], FakeGrammar("yes"), THINK)
    assert (output.reasoning, output.text) == ("", "yes")


def test_a_start_tag_of_many_tokens_is_let_through() -> None:
    """Bug: the model was kept from its reasoning without a word. Once begun, nothing but the tag may follow."""
    grammar = FakeGrammar("yes")
    line = encode("<t!ink>no</think>yes", TOKENIZER)
    output, worker = answer(line, grammar, THINK, tokenizer=TOKENIZER, max_tokens=28)
    assert (output.reasoning, output.text, output.finish_reason) == ("no", "yes", FinishReason.STOP)
    assert also_allowed(worker)[:8] == [(token,) for token in encode("<think>", TOKENIZER)] + [None]
    assert [query.only_those for [query] in worker.queries[:7]] == [False] + [True] * 6
    assert taken(grammar) == [encode("yes")] and output.usage.reasoning_tokens == len("<think>no</think>")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("<thick", ("", "<thick")),
        ("<think>no</think><thick", ("no", "<thick")),
        ("<think>no</think><think>", ("no", "<think>")),
        ("\n<think>no</think><think>", ("no", "<think>")),
    ],
)
def test_an_answer_that_begins_like_the_start_tag(said: str, expected: tuple[str, str]) -> None:
    """The matcher follows both; where it turns out to be the tag, it begins anew behind the reasoning."""
    grammar = FakeGrammar("<thick", "<think>", "\n<think>no")
    output, _ = answer(encode(said, TOKENIZER), grammar, THINK, tokenizer=TOKENIZER, max_tokens=28)
    assert (output.reasoning, output.text, output.finish_reason) == (*expected, FinishReason.STOP)


@pytest.mark.parametrize("tokenizer", [TAGS, TOKENIZER], ids=["one token", "many tokens"])
def test_an_answer_that_is_the_beginning_of_the_start_tag(tokenizer: Tokenizer) -> None:
    for line in ([*encode("<", TOKENIZER), EOS], encode("<", TOKENIZER)):
        output, _ = answer(line, FakeGrammar("<", "no"), THINK, tokenizer=tokenizer, max_tokens=len(line))
        assert (output.reasoning, output.text, output.finish_reason) == ("", "<", FinishReason.STOP)


@pytest.mark.parametrize(("answers", "text"), [(("yes",), ""), (("",), ""), (("<thick",), ""), (("<thi",), "<thi")])
def test_a_start_tag_that_is_cut_off(answers: Sequence[str], text: str) -> None:
    """It is no answer unless the grammar has the whole of it as one."""
    output, _ = answer(encode("<thi", TOKENIZER), FakeGrammar(*answers), THINK, tokenizer=TOKENIZER, max_tokens=4)
    reason = FinishReason.STOP if text else FinishReason.LENGTH
    assert (output.reasoning, output.text, output.finish_reason) == ("", text, reason)


def test_half_a_start_tag_is_no_answer_whatever_the_mask_said() -> None:
    output, _ = answer(encode("<t.", TOKENIZER), FakeGrammar("yes", "."), THINK, tokenizer=TOKENIZER, masks=NoMasks())
    assert (output.text, output.finish_reason) == ("", FinishReason.ERROR)
    assert output.error is not None and output.error.startswith(LEFT_GRAMMAR)


def test_a_tag_of_characters_of_many_tokens() -> None:
    thinking = Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7")
    said = "\u25c1think\u25b7no\u25c1/think\u25b7yes"
    for grammar in (FakeGrammar("yes"), FakeGrammar(said[:4], "yes")):
        output, _ = answer(encode(said, TOKENIZER), grammar, thinking, tokenizer=TOKENIZER, max_tokens=28)
        assert (output.reasoning, output.text) == ("no", "yes")
    for length in range(1, 9):  # cut anywhere in the tag
        output, _ = answer(
            encode(said, TOKENIZER), FakeGrammar("", "yes"), thinking, tokenizer=TOKENIZER, max_tokens=length
        )
        assert (output.reasoning, output.text, output.finish_reason) == ("", "", FinishReason.LENGTH)


@pytest.mark.parametrize("tokenizer", [TAGS, TOKENIZER], ids=["one token", "many tokens"])
def test_inside_the_reasoning_nothing_is_masked_until_its_end(tokenizer: Tokenizer) -> None:
    grammar = FakeGrammar("yes")
    reasoning = encode("no\n</think>", tokenizer)
    output, worker = answer(reasoning, grammar, INSIDE, tokenizer=tokenizer)
    assert (output.reasoning, output.text) == ("no", "yes")
    assert also_allowed(worker)[: len(reasoning)] == [None] * len(reasoning)
    assert taken(grammar) == [encode("yes")]


@pytest.mark.parametrize(
    ("written", "may_follow"),
    [((), BREAKS), (BREAK, tuple(BREAK)), (TWO_BREAKS, ()), (BREAK * 2, ())],
    ids=["none", "one", "two at once", "two"],
)
@pytest.mark.parametrize("thinking", [THINK, INSIDE], ids=["whole", "inside"])
def test_two_line_breaks_may_come_before_the_answer(
    thinking: Thinking, written: Sequence[int], may_follow: tuple[int, ...]
) -> None:
    """Bug: models that always write them behind their reasoning were kept from it. They are no part of the answer."""
    grammar, reasoning = FakeGrammar("yes"), encode("no</think>" if thinking.inside else "<think>no</think>")
    line = [*reasoning, *written, *encode("yes")]
    output, worker = answer(line, grammar, thinking)
    assert (output.reasoning, output.text, output.finish_reason) == ("no", "yes", FinishReason.STOP)
    assert taken(grammar) == [encode("yes")] and list(output.token_ids) == line
    assert also_allowed(worker)[-3:] == [may_follow, (), ()]


def test_more_line_breaks_are_the_grammars_matter() -> None:
    """A small model would write them for ever."""
    output, _ = answer([*encode("no</think>"), *BREAK, *TWO_BREAKS, *BREAK * 5], FakeGrammar("yes"), INSIDE)
    assert output.text == "yes"  # the second one was masked
    grammar = FakeGrammar("\nyes")
    output, worker = answer([*encode("no</think>"), *BREAK * 3, *encode("yes")], grammar, INSIDE)
    assert output.text == "yes" and taken(grammar) == [encode("\nyes")]
    assert also_allowed(worker)[-4:] == [(), (), (), ()]


def test_no_line_breaks_where_there_was_no_reasoning() -> None:
    output, worker = answer([*BREAK, *encode("yes")], FakeGrammar("yes"), THINK)
    assert output.text == "yes" and also_allowed(worker)[1:] == [(), ()]


def test_answer_in_the_token_that_ends_the_reasoning() -> None:
    grammar = FakeGrammar("abc")
    output, _ = answer([*encode("no</thin"), *encode("k>\na"), *encode("xx")], grammar, INSIDE)
    assert (output.reasoning, output.text, output.finish_reason) == ("no", "abc", FinishReason.STOP)
    assert grammar.matchers[0].texts == ["a"] and taken(grammar) == [encode("abc")]


def test_wrong_answer_in_the_token_that_ends_the_reasoning() -> None:
    output, _ = answer([*encode("no</thin"), *encode("k>b")], FakeGrammar("abc"), INSIDE)
    assert (output.finish_reason, output.text) == (FinishReason.ERROR, "")
    assert output.error is not None and output.error.startswith(f"{LEFT_GRAMMAR}: token ")


def test_an_answer_that_is_complete_with_the_end_of_the_reasoning() -> None:
    output, _ = answer([*encode("no</thin"), *encode("k>\na")], FakeGrammar("a"), INSIDE)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("a", FinishReason.STOP, 9)


@pytest.mark.parametrize(("thinking", "line"), [(THINK, "<think>no</think>"), (INSIDE, "no</think>")])
def test_a_grammar_of_nothing_ends_with_the_reasoning(thinking: Thinking, line: str) -> None:
    """It is complete from the start, and yet the model may reason."""
    output, _ = answer(encode(line + "yes"), FakeGrammar(""), thinking)
    assert (output.reasoning, output.text, output.finish_reason) == ("no", "", FinishReason.STOP)
    assert list(output.token_ids) == encode(line)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("thinking", [None, THINK])
def test_a_grammar_of_nothing_leaves_the_end_token_only(thinking: Thinking | None, ignore_eos: bool) -> None:
    output, _ = answer([EOS], FakeGrammar(""), thinking, ignore_eos=ignore_eos)
    assert (output.token_ids, output.text, output.finish_reason) == ((EOS,), "", FinishReason.STOP)


def test_length_in_the_reasoning() -> None:
    grammar = FakeGrammar("yes")
    output, _ = answer(encode("<think>no"), grammar, THINK, max_tokens=3)
    assert (output.reasoning, output.text, output.finish_reason) == ("no", "", FinishReason.LENGTH)
    assert taken(grammar) == []


# Many requests


def test_each_choice_has_a_matcher() -> None:
    grammar = FakeGrammar("ab", "cd")
    engine = make({"a": encode("ab"), "a-1": encode("cd")})
    first, fork = make_choices("a", 2)
    for choice in (first, fork):
        choice.output_format = OutputFormat(grammar=grammar)
    engine.add(first, [fork])
    outputs = run(engine)
    assert (outputs["a"].text, outputs["a-1"].text) == ("ab", "cd")
    assert taken(grammar) == [encode("ab"), encode("cd")]


def test_preemption_under_a_grammar() -> None:
    """Ten blocks of four for two requests of 3 + 26 tokens."""
    text = "abcdefghijklmnopqrstuvwxyz"
    grammar = FakeGrammar(text)
    engine = make({}, num_blocks=11)
    for request_id in ("a", "b"):
        ask(engine, request_id, grammar, max_tokens=None)
    outputs = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [outputs[request_id].text for request_id in ("a", "b")] == [text] * 2
    assert taken(grammar) == [encode(text)] * 2


def test_only_those_who_sample_are_asked_about() -> None:
    """In chunks of four tokens: two steps for the prompt of eight, and only the second samples."""
    worker = FakeMaskWorker()
    engine = make({}, masks=worker, max_num_batched_tokens=4)
    ask(engine, "a", FakeGrammar("yes"), prompt="x" * 8)
    run(engine)
    assert [len(queries) for queries in worker.queries] == [0, 1, 1, 1]


def test_neighbours_are_free() -> None:
    engine = make({"b": encode("no."), "c": encode("<think>d</think>.")})
    ask(engine, "a", FakeGrammar("yes"))
    ask(engine, "b", None, max_tokens=3)
    ask(engine, "c", None, THINK, max_tokens=4)
    outputs = run(engine)
    assert {request_id: output.text for request_id, output in outputs.items()} == {"a": "yes", "b": "no.", "c": "."}
    assert isinstance(engine.runner, ScriptedRunner)
    assert [set(masks) for masks in engine.runner.masks] == [{"a"}, {"a"}, {"a"}, set()]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 3, 5, 6, 7, None])
def test_tokens_that_have_to_come_need_no_steps(max_tokens: int | None, ahead: bool) -> None:
    """ "yes, " and "no, " leave two choices: the first letter, and what follows."""
    answers = [f"{first}, {rest}" for first in ("yes", "no") for rest in ("I do", "maybe")]
    outputs, steps = [], []
    for forces in (False, True):
        engine = make({"a": encode("yes, maybe")}, masks=FakeMaskWorker(ahead=ahead))
        ask(engine, "a", FakeGrammar(*answers, forces=forces), max_tokens=max_tokens)
        outputs.append(run(engine)["a"])
        assert isinstance(engine.runner, ScriptedRunner)
        steps.append(len(engine.runner.masks))
    one_by_one, together = outputs
    assert (together.text, together.token_ids) == (one_by_one.text, one_by_one.token_ids)
    assert (together.finish_reason, together.usage) == (one_by_one.finish_reason, one_by_one.usage)
    assert steps[0] == len(one_by_one.token_ids)
    assert max_tokens == 1 or steps[1] < steps[0]


@pytest.mark.parametrize("sampling", [{"stop": ("s",)}, {"logprobs": 1}, {"min_tokens": 2}])
def test_tokens_that_are_looked_at_one_by_one(sampling: dict[str, Any]) -> None:
    worker = FakeMaskWorker()
    engine = make({}, masks=worker)
    ask(engine, "a", FakeGrammar("yes", forces=True), **sampling)
    run(engine)
    assert not any(query.wants_forced for queries in worker.queries for query in queries)


def test_a_mask_comes_only_behind_a_token_that_is_refused() -> None:
    """Of requests that may try; of the others, before the first sample."""
    worker = FakeMaskWorker(ahead=False)
    engine = make({"a": encode("yesss"), "b": encode("yesss"), "c": encode("no.")}, masks=worker)
    grammar = FakeGrammar("yeah", "yesterday")
    ask(engine, "a", grammar, stop=("!",))  # one by one
    ask(engine, "b", grammar, stop=("!",), temperature=1.0, top_k=3)
    ask(engine, "c", None, max_tokens=3)
    outputs = run(engine)
    assert [outputs[request_id].text for request_id in "abc"] == ["yesterday", "yesterday", "no."]
    asked = [[query.request_id for query in queries] for queries in worker.queries]
    assert asked[:6] == [["b"], ["b"], ["b"], ["b"], ["a"], ["b"]]
    assert isinstance(engine.runner, ScriptedRunner)
    assert [set(masks) for masks in engine.runner.masks[:5]] == [{"b"}, {"b"}, {"b"}, {"b"}, {"a", "b"}]


LINES = ("yes", "no", "yeah", "<think>hm</think>no", "hm</think>\n\nyes", "<think>hm</think>\nyeah")


@pytest.mark.parametrize("thinking", [None, THINK, INSIDE])
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("sampling", [{}, {"logprobs": 1}, {"stop": ("a",)}, {"min_tokens": 5}])
def test_tried_or_masked_the_answer_is_the_same(line: str, thinking: Thinking | None, sampling: dict[str, Any]) -> None:
    tokens = [*encode(line), EOS]
    outputs = []
    for ahead in (True, False):
        worker = FakeMaskWorker(ahead=ahead)
        output, _ = answer(tokens, FakeGrammar("yes", "yeah", forces=True), thinking, masks=worker, **sampling)
        outputs.append(replace(output, timing=None))
    masked, tried = outputs
    assert tried == masked


def test_a_step_that_fails_behind_a_refused_token(caplog: pytest.LogCaptureFixture) -> None:
    """It is repeated with the masks that are there: no matcher is asked again that may have been given up."""
    worker = FakeMaskWorker(failing=["c"], ahead=False)
    engine = make({}, masks=worker)
    for request_id in "abc":
        ask(engine, request_id, FakeGrammar("yes"), stop=("!",))
    sample = engine.runner.sample
    num_calls = 0

    def failing(step: SchedulerOutput, logits: Any, masks: Mapping[str, Any]) -> RunnerOutput:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise RuntimeError("broken")
        return sample(step, logits, masks)

    engine.runner.sample = failing  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.CRITICAL):
        outputs = {output.request_id: output for output in engine.step()}
    assert (outputs["a"].token_ids, outputs["b"].token_ids) == ((token("y"),),) * 2
    assert outputs["c"].error == "too complex"
    assert [[query.request_id for query in queries] for queries in worker.queries] == [[], ["a", "b", "c"]]
    assert [output.text for output in run(engine).values()] == ["es", "es"]


def test_aborted_under_a_grammar() -> None:
    engine = make({})
    ask(engine, "a", FakeGrammar("yes"), stop=("es!",))
    engine.step()
    assert engine.step()[0].text == ""  # held back
    output = engine.abort("a")
    assert output is not None and (output.text, output.finish_reason) == ("", FinishReason.ABORT)
    assert not engine.has_work


# What goes wrong


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (GrammarError("it is too deep"), f"{LEFT_GRAMMAR}: it is too deep"),
        (RuntimeError("a secret of the library"), ENGINE_FAILED),
    ],
)
def test_a_matcher_that_fails_ends_its_request_only(failure: Exception, error: str) -> None:
    engine = make({"b": encode("ok.")})
    ask(engine, "a", FakeGrammar("yes", failure=failure))
    ask(engine, "b", None, max_tokens=3)
    ask(engine, "c", FakeGrammar("yes"))
    outputs = run(engine)
    assert (outputs["a"].finish_reason, outputs["a"].error) == (FinishReason.ERROR, error)
    assert outputs["a"].usage.completion_tokens == 1
    assert (outputs["b"].text, outputs["b"].finish_reason) == ("ok.", FinishReason.LENGTH)
    assert (outputs["c"].text, outputs["c"].finish_reason) == ("yes", FinishReason.STOP)


def test_a_mask_that_fails_ends_its_request_only() -> None:
    engine = make({"b": encode("ok.")}, masks=FakeMaskWorker(failing=["a"]))
    ask(engine, "a", FakeGrammar("yes"))
    ask(engine, "b", None, max_tokens=3)
    ask(engine, "c", FakeGrammar("yes"))
    outputs = run(engine)
    assert (outputs["a"].finish_reason, outputs["a"].error) == (FinishReason.ERROR, "too complex")
    assert outputs["a"].token_ids == ()
    assert (outputs["b"].text, outputs["c"].text) == ("ok.", "yes")


def test_a_failed_step_is_repeated_under_the_same_masks(caplog: pytest.LogCaptureFixture) -> None:
    worker = FakeMaskWorker(failing=["c"])
    engine = make({}, masks=worker)
    assert isinstance(engine.runner, ScriptedRunner)
    ask(engine, "a", FakeGrammar("yes"))
    ask(engine, "b", FakeGrammar("no"))
    ask(engine, "c", FakeGrammar("yes"))
    engine.runner.raising["b"] = RuntimeError("broken")
    with caplog.at_level(logging.CRITICAL):
        outputs = run(engine)
    assert (outputs["a"].text, outputs["a"].finish_reason) == ("yes", FinishReason.STOP)
    assert [outputs[request_id].error for request_id in ("b", "c")] == [ENGINE_FAILED, "too complex"]
    assert len(worker.queries) == 3 and all(pending.num_taken > 0 for pending in worker.pending)


def test_masks_are_computed_while_the_model_runs() -> None:
    """And waited for before anything touches the matchers again, even if the model fails."""
    worker = FakeMaskWorker()
    engine = make({}, masks=worker)
    ask(engine, "a", FakeGrammar("yes"))

    def execute(step: SchedulerOutput) -> Any:
        [pending] = worker.pending
        assert pending.num_taken == 0
        raise RuntimeError("broken")

    engine.runner.execute = execute  # type: ignore[method-assign]
    [output] = engine.step()
    assert output.error == ENGINE_FAILED and worker.pending[0].num_taken > 0


# The real thing


@pytest.mark.parametrize("ahead", [True, False])
def test_bare_json_after_reasoning(ahead: bool) -> None:
    compiler = GrammarCompiler(TAGS, num_token_ids=TAGS.num_token_ids, eos_token_ids=frozenset({EOS}))
    grammar = compiler.compile(StructuredOutput.json({"type": "object"}))
    engine = make({"a": [*encode('<think>hm</think>\n\n{"a": 1}'), EOS]}, masks=MaskWorker(ahead=ahead))
    engine.add(make_request("a", output_format=OutputFormat(thinking=THINK, grammar=grammar)))
    output = run(engine)["a"]
    engine.close()
    compiler.close()
    assert (output.reasoning, output.text, output.finish_reason) == ("hm", '{"a": 1}', FinishReason.STOP)


@pytest.mark.parametrize("ahead", [True, False])
def test_with_real_grammars(ahead: bool) -> None:
    compiler = GrammarCompiler(TAGS, num_token_ids=TAGS.num_token_ids, eos_token_ids=frozenset({EOS}))
    choice = compiler.compile(StructuredOutput.choice(["yes", "yesterday", "n\u00f6"]))
    masks = MaskWorker(ahead=ahead)
    engine = make({"a": [*encode("<think>hm</think>yes"), EOS], "b": encode("n")}, masks=masks)
    for request_id in ("a", "b"):
        engine.add(make_request(request_id, output_format=OutputFormat(thinking=THINK, grammar=choice)))
    outputs = run(engine)
    masks.close()
    assert (outputs["a"].reasoning, outputs["a"].text, outputs["a"].finish_reason) == ("hm", "yes", FinishReason.STOP)
    assert (outputs["b"].reasoning, outputs["b"].text, outputs["b"].finish_reason) == ("", "n\u00f6", FinishReason.STOP)


def in_pieces(text: str) -> Tokenizer:
    """A vocabulary of all that `text` can be cut into, but for the tag as one token."""
    parts = {text[start:end] for start in range(len(text)) for end in range(start + 2, len(text) + 1)}
    return make_tokenizer(*sorted(parts - {THINK.start}))


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TAG_AND_MORE = "\n<think>\na"
PIECES = in_pieces(TAG_AND_MORE)
GRAMMARS = {
    "text": StructuredOutput("grammar", HermesFormat().grammar([Tool("f")])),
    "json": StructuredOutput.json({"type": "object"}),
    "calls": StructuredOutput("grammar", HermesFormat().grammar([Tool("f")], required=True)),
    "like the tag": StructuredOutput("regex", r"\n<think>\n|\{\}|<th"),
}
ANSWERS = {"text": f"So:{CALL}", "json": "{}", "calls": CALL, "like the tag": "<th"}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(PIECES, num_token_ids=PIECES.num_token_ids, eos_token_ids=frozenset({EOS}))
    yield compiler
    compiler.close()


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", GRAMMARS)
def test_reasoning_is_what_it_is_without_a_grammar(name: str, ahead: bool, compiler: GrammarCompiler) -> None:
    """Bug: behind a line break, or spelled in several tokens, it was taken for the answer, or masked.

    In every cut of the tag and what is around it that may get through the mask: where the grammar has no text, the tag
    begins as the tokenizer would have it, and ends with no more than a line break.
    """
    grammar = compiler.compile(GRAMMARS[name])
    begun = TAG_AND_MORE[1:] if name == "json" else TAG_AND_MORE
    first, last = begun.index("<") + 1, begun.index(">") + 1
    lines = []
    for number in range(4 if name == "text" else 6):
        for cuts in combinations(range(1, len(begun)), number):
            passes = {first - 1, first} <= {0, *cuts} and {last, last + 1} & {*cuts}
            if name == "text" or passes:
                pieces = [begun[start:end] for start, end in pairwise([0, *cuts, len(begun)])]
                lines.append([token_id for piece in pieces for token_id in encode(piece, PIECES)])
    rest = [*encode(f"\n{CALL}</think>", TOKENIZER), *encode(ANSWERS[name], TOKENIZER), EOS]
    engine = make_engine(
        {str(number): [*line, *rest] for number, line in enumerate(lines)},
        num_blocks=10_000,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=256,
        tokenizer=PIECES,
        masks=MaskWorker(ahead=ahead),
    )
    for number in range(len(lines)):
        request = make_request(str(number), output_format=OutputFormat(thinking=THINK, grammar=grammar))
        request.sampling = replace(request.sampling, max_tokens=200)
        engine.add(request)
    outputs = run(engine).values()
    engine.close()
    said = {(output.reasoning, output.text, output.finish_reason) for output in outputs}
    assert said == {(f"a\n{CALL}", ANSWERS[name], FinishReason.STOP)} and len(lines) >= 32
