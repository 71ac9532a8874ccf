"""Reasoning through the whole engine: what is shown as what, counted as what, and stopped by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.core.scheduler import RequestNews
from miniserve.engine.engine import Engine
from miniserve.engine.output_processor import OutputProcessor
from miniserve.outputs import EngineOutput, FinishReason, OutputFormat, Thinking
from miniserve.text.tokenizer import Tokenizer
from tests.engine.scripted import EOS, TOKENIZER, make_choices, make_engine, make_request, make_tokenizer, token

THINK = Thinking("<think>", "</think>")
INSIDE = Thinking("<think>", "</think>", inside=True)
TAGS = make_tokenizer("<think>", "</think>")  # one token each; with TOKENIZER they are one a character
TOKENIZERS = pytest.mark.parametrize("tokenizer", [TAGS, TOKENIZER], ids=["one token", "many tokens"])


def encode(text: str, tokenizer: Tokenizer = TAGS) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def ask(engine: Engine, request_id: str = "a", thinking: Thinking | None = THINK, **sampling: Any) -> None:
    sampling = {"max_tokens": 28, **sampling}
    engine.add(make_request(request_id, output_format=OutputFormat(thinking=thinking), **sampling))


def run(engine: Engine) -> dict[str, list[EngineOutput]]:
    """The outputs of each request until there is no work."""
    outputs: dict[str, list[EngineOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def whole(outputs: Sequence[EngineOutput]) -> EngineOutput:
    return reduce(EngineOutput.merge, outputs)


def answer(
    line: Sequence[int], tokenizer: Tokenizer = TAGS, thinking: Thinking | None = THINK, **sampling: Any
) -> EngineOutput:
    """All that one request says, as one output."""
    engine = make_engine({"a": line}, tokenizer=tokenizer)
    ask(engine, thinking=thinking, **sampling)
    return whole(run(engine)["a"])


def test_reasoning_comes_first_and_streams() -> None:
    engine = make_engine({"a": [*encode("<think>\nHello world</think>\n\nso"), EOS]}, tokenizer=TAGS)
    ask(engine)
    outputs = run(engine)["a"]
    assert [(output.reasoning, output.text) for output in outputs] == [
        ("", ""),
        ("", ""),
        ("Hello", ""),
        (" world", ""),
        ("", ""),
        ("", ""),
        ("", ""),
        ("", "s"),
        ("", "o"),
        ("", ""),
    ]
    assert [output.usage.reasoning_tokens for output in outputs] == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5]
    assert outputs[-1].usage.completion_tokens == 10


@TOKENIZERS
def test_the_tags_count_and_are_not_shown(tokenizer: Tokenizer) -> None:
    """However many tokens they are, and the white space before them."""
    reasoning = encode(" <think>ab</think>", tokenizer)
    output = answer([*reasoning, *encode("\ncd", tokenizer), EOS], tokenizer)
    assert (output.reasoning, output.text, output.finish_reason) == ("ab", "cd", FinishReason.STOP)
    assert output.usage.reasoning_tokens == len(reasoning)


@TOKENIZERS
def test_a_prompt_that_opens_the_reasoning(tokenizer: Tokenizer) -> None:
    reasoning = encode("ab</think>", tokenizer)
    output = answer([*reasoning, *encode("cd", tokenizer), EOS], tokenizer, INSIDE)
    assert (output.reasoning, output.text, output.usage.reasoning_tokens) == ("ab", "cd", len(reasoning))


@TOKENIZERS
@pytest.mark.parametrize("text", ["ab", " ab", "ab<think>c</think>", "</think>a", "<thick"])
def test_an_answer_without_reasoning(tokenizer: Tokenizer, text: str) -> None:
    output = answer([*encode(text, tokenizer), EOS], tokenizer)
    assert (output.reasoning, output.text, output.usage.reasoning_tokens) == ("", text, 0)


def test_nobody_looks_for_reasoning() -> None:
    output = answer([*encode("<think>a</think>b"), EOS], thinking=None)
    assert (output.reasoning, output.text, output.usage.reasoning_tokens) == ("", "<think>a</think>b", 0)


def test_tags_that_are_special_tokens() -> None:
    """Special tokens leave no text, but for those that mark the parts."""
    tokenizer = make_tokenizer(special=("[THINK]", "[/THINK]", "[X]"))
    shown = frozenset(token_id for tag in ("[THINK]", "[/THINK]") if (token_id := tokenizer.special_id(tag)))
    engine = make_engine({"a": [*encode("[THINK]a[X]b[/THINK]c[X]d", tokenizer), EOS]}, tokenizer=tokenizer)
    engine.add(make_request("a", output_format=OutputFormat(Thinking("[THINK]", "[/THINK]"), shown)))
    output = whole(run(engine)["a"])
    assert (output.reasoning, output.text, output.usage.reasoning_tokens) == ("ab", "cd", 5)


# Stops


@TOKENIZERS
def test_stop_strings_are_for_the_answer(tokenizer: Tokenizer) -> None:
    output = answer([*encode("<think>a.b</think>c.d", tokenizer), EOS], tokenizer, stop=(".",))
    assert (output.reasoning, output.text) == ("a.b", "c")
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, ".")


@TOKENIZERS
@pytest.mark.parametrize("stop", ["</think>", "nk>c", "bc", "\nc", "<think>", "b\n"])
def test_no_stop_string_reaches_beyond_the_answer(tokenizer: Tokenizer, stop: str) -> None:
    output = answer([*encode("<think>ab</think>\ncd", tokenizer), EOS], tokenizer, stop=(stop,))
    assert (output.reasoning, output.text, output.stop_reason) == ("ab", "cd", None)


def test_a_stop_string_in_text_that_was_held_back() -> None:
    """What looked like a tag until the end is part of the answer, and so are its stop strings."""
    output = answer([*encode("x"), EOS], stop=("i",))
    assert output.text == "x"
    output = answer([*encode("<thi", TOKENIZER), EOS], TOKENIZER, stop=("h",))
    assert (output.text, output.stop_reason) == ("<t", "h")


def test_min_tokens_count_the_reasoning() -> None:
    """Five tokens are enough for the second stop string only."""
    output = answer([*encode("<think></think>.a.b"), EOS], stop=(".",), min_tokens=5)
    assert (output.text, output.stop_reason) == (".a", ".")


def test_the_end_token_ends_the_reasoning_too() -> None:
    output = answer([*encode("<think>a "), EOS])
    assert (output.reasoning, output.text, output.finish_reason) == ("a", "", FinishReason.STOP)
    assert (output.usage.completion_tokens, output.usage.reasoning_tokens) == (4, 3)


@pytest.mark.parametrize(("text", "expected"), [("<think>a", ("a!", "")), ("<think>a</think>b", ("a", "b!"))])
def test_a_stop_token_is_shown_where_it_came(text: str, expected: tuple[str, str]) -> None:
    output = answer(encode(text + "!"), stop_token_ids=(token("!"),), include_stop_str_in_output=True)
    assert (output.reasoning, output.text) == expected
    assert output.stop_reason == token("!")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>ab c", ("ab c", "")),
        ("<think>a  ", ("a", "")),
        ("  <thi", ("", "")),
        ("<think>a </t", ("a", "")),
        ("<think>a </th\u00e9", ("a </th\u00e9", "")),
        ("<think>1 <", ("1", "")),
        ("<think>a</think", ("a", "")),
        ("<think>a</think>b </t", ("a", "b </t")),
    ],
)
def test_length_in_the_reasoning(text: str, expected: tuple[str, str]) -> None:
    """Bug: half of a tag of many tokens was shown."""
    line = encode(text, TOKENIZER)
    output = answer(line, TOKENIZER, max_tokens=len(line))
    assert (output.reasoning, output.text, output.finish_reason) == (*expected, FinishReason.LENGTH)
    end = text.find("</think>")
    assert output.usage.reasoning_tokens == (0 if not expected[0] else len(line) if end < 0 else end + len("</think>"))


def test_half_of_an_end_tag_is_reasoning_where_the_model_ended_it() -> None:
    output = answer([*encode("<think>a </t", TOKENIZER), EOS], TOKENIZER)
    assert (output.reasoning, output.text, output.finish_reason) == ("a </t", "", FinishReason.STOP)


def test_half_a_character_of_an_end_tag_is_cut_off_with_it() -> None:
    thinking = Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7", inside=True)
    line = encode("a\u25c1/think\u25b7", TOKENIZER)
    for length in range(1, len(line) + 1):
        output = answer(line, TOKENIZER, thinking, max_tokens=length)
        assert (output.reasoning, output.text, output.finish_reason) == ("a", "", FinishReason.LENGTH)


def test_half_a_character_of_a_start_tag_is_cut_off_with_it() -> None:
    thinking = Thinking("\u25c1think\u25b7", "\u25c1/think\u25b7")
    line = encode("\u25c1think\u25b7", TOKENIZER)
    for length in range(1, len(line) + 1):
        output = answer(line, TOKENIZER, thinking, max_tokens=length)
        assert (output.reasoning, output.text, output.finish_reason) == ("", "", FinishReason.LENGTH)


def test_half_a_character_before_the_end_tag() -> None:
    half = encode("é")[:1]
    output = answer([*encode("<think>a"), *half, *encode("</think>b"), EOS])
    assert (output.reasoning, output.text) == ("a\ufffd", "b")


# Aborts, errors, preemption, choices


@pytest.mark.parametrize("text", ["  <thi", "<think>a  ", "<think>a</thi"])
def test_abort_and_error_drop_what_was_held_back(text: str) -> None:
    line = encode(text, TOKENIZER)
    for end in (FinishReason.ABORT, FinishReason.ERROR):
        request = make_request("a", output_format=OutputFormat(thinking=THINK))
        processor = OutputProcessor(TOKENIZER)
        processor.add({request.request_id: processor.state(request)})
        request.token_ids += line
        processed = processor.process(RequestNews(request, tuple(line)))
        assert processed is not None and processed.output.reasoning == text[7:8]
        last = processor.abort(request) if end is FinishReason.ABORT else processor.fail(request, "it broke")
        assert (last.reasoning, last.text, last.finish_reason) == ("", "", end)
        assert last.usage.reasoning_tokens == (len(line) if "<think>" in text else 0)


def test_preemption_in_the_reasoning() -> None:
    """Ten blocks of four for two requests of 3 + 26 tokens."""
    line = encode("<think>abcdefghijklmnopqrs</think>tuvwx")
    engine = make_engine({"a": line, "b": line}, num_blocks=11, tokenizer=TAGS)
    for request_id in ("a", "b"):
        ask(engine, request_id, max_tokens=26)
    while engine.scheduler.num_preemptions == 0:
        assert all(output.text == "" for output in engine.step())  # guard: it does happen in the reasoning
    outputs = run(engine)
    for request_id in ("a", "b"):
        last = outputs[request_id][-1]
        assert last.usage.reasoning_tokens == 21 and last.usage.completion_tokens == 26
        assert whole(outputs[request_id]).text == "tuvwx"


def test_each_choice_reasons_for_itself() -> None:
    engine = make_engine({"a": [*encode("<think>a</think>b"), EOS], "a-1": [*encode("cd"), EOS]}, tokenizer=TAGS)
    first, fork = make_choices("a", 2)
    for choice in (first, fork):
        choice.output_format = OutputFormat(thinking=THINK)
    engine.add(first, [fork])
    outputs = {request_id: whole(parts) for request_id, parts in run(engine).items()}
    assert [(outputs[name].reasoning, outputs[name].text) for name in ("a", "a-1")] == [("a", "b"), ("", "cd")]
    assert [outputs[name].usage.reasoning_tokens for name in ("a", "a-1")] == [3, 0]


# However the text is cut into tokens, and the tokens into outputs


TEXT = " <think>a\n</</think> b.c"
EVERY_CUT = make_tokenizer(
    *dict.fromkeys(TEXT[start:end] for start in range(len(TEXT)) for end in range(start + 2, len(TEXT) + 1))
)


@settings(max_examples=150, deadline=None)
@given(cuts=st.sets(st.integers(1, len(TEXT) - 1)), stop=st.booleans())
def test_any_tokens_say_the_same(cuts: set[int], stop: bool) -> None:
    pieces = [TEXT[start:end] for start, end in pairwise([0, *sorted(cuts), len(TEXT)])]
    line = [token_id for piece in pieces for token_id in encode(piece, EVERY_CUT)]
    assert len(line) == len(pieces)
    output = answer([*line, EOS], EVERY_CUT, stop=(".",) if stop else ())
    assert (output.reasoning, output.text) == ("a\n</", "b" if stop else "b.c")
    end = TEXT.index("</think>") + len("</think>")
    assert output.usage.reasoning_tokens == len({cut for cut in cuts if cut < end}) + 1


@TOKENIZERS
@pytest.mark.parametrize("text", ["<think>a b</think> c.", "ab <think>c", "  <think>a", "\n"])
def test_many_tokens_in_one_step(tokenizer: Tokenizer, text: str) -> None:
    """As one at a time, which is what a step of several tokens has to equal."""
    line = [*encode(text, tokenizer), EOS]
    request = make_request("a", output_format=OutputFormat(thinking=THINK))
    processor = OutputProcessor(tokenizer)
    processor.add({request.request_id: processor.state(request)})
    request.token_ids += line
    request.finish_reason = FinishReason.STOP
    processed = processor.process(RequestNews(request, tuple(line)))
    assert processed is not None
    assert replace(processed.output, timing=None) == replace(answer(line, tokenizer), timing=None)
