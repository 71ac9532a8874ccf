"""Reasoning and answer: the same however the text is cut, and nothing shown that may become a tag."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.outputs import Thinking
from miniserve.text.reasoning import Phase, ReasoningSplitter, answer_in, find_thinking, thinking_behind

THINK = Thinking("<think>", "</think>")
INSIDE = Thinking("<think>", "</think>", inside=True)
FORMS = {"none": None, "from the start": THINK, "inside": INSIDE}
# Whole tags, parts of them, near misses and white space: whatever a cut can fall into.
PARTS = st.sampled_from(["<think>", "</think>", "<thi", "</thi", "nk>", "<", "</", ">", " ", "\n", "\u00a0", "a", "é"])
TEXTS = st.lists(PARTS, max_size=10).map("".join)


def split(thinking: Thinking | None, pushes: list[str], *, is_cut: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(thinking)
    pairs = [*(splitter.push(text) for text in pushes), splitter.flush(is_cut=is_cut)]
    return "".join(reasoning for reasoning, _ in pairs), "".join(content for _, content in pairs)


def rule(thinking: Thinking | None, text: str) -> tuple[str, str]:
    """What the whole text says, plainly."""
    if thinking is None:
        return "", text
    inner = text if thinking.inside else text.lstrip()
    if not thinking.inside and not inner.startswith(thinking.start):
        return "", text
    reasoning, _, content = inner.removeprefix("" if thinking.inside else thinking.start).partition(thinking.end)
    return reasoning.strip(), content.lstrip()


@settings(max_examples=1000)
@given(thinking=st.sampled_from(list(FORMS.values())), text=TEXTS, data=st.data())
def test_any_cuts_follow_the_rule(thinking: Thinking | None, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pushes = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert split(thinking, pushes) == rule(thinking, text)


@pytest.mark.parametrize("form", FORMS)
def test_two_cuts_at_every_place(form: str) -> None:
    text = " <think>\n a <b </thin c\n </think>\n\n <think>d</think> "
    expected = rule(FORMS[form], text)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert split(FORMS[form], [text[:first], text[first:second], text[second:]]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>why</think>because", ("why", "because")),
        (" \n<think>\nwhy\n\nnot\n</think>\n\nbecause \n", ("why\n\nnot", "because \n")),
        ("<think></think>because", ("", "because")),
        ("<think> \n </think> \n ", ("", "")),
        ("<think>why", ("why", "")),
        ("<think>why  ", ("why", "")),
        ("<think>why </thi", ("why </thi", "")),
        ("<think>1 < 2 </ 3</think>4", ("1 < 2 </ 3", "4")),
        ("<think>why<think>so</think>because", ("why<think>so", "because")),
        ("<think>a</think>b</think><think>c", ("a", "b</think><think>c")),
        ("<think><</think>", ("<", "")),
        ("<think></</think></think>", ("</", "</think>")),
        ("because", ("", "because")),
        (" \nbecause", ("", " \nbecause")),
        (" \n", ("", " \n")),
        ("<thi", ("", "<thi")),
        ("  <thi", ("", "  <thi")),
        ("<thick", ("", "<thick")),
        ("because <think>why</think>", ("", "because <think>why</think>")),
        ("</think>because", ("", "</think>because")),
        ("", ("", "")),
    ],
)
def test_from_the_start(text: str, expected: tuple[str, str]) -> None:
    assert split(THINK, [text]) == expected
    assert split(THINK, list(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\nwhy\n</think>\n\nbecause", ("why", "because")),
        ("</think>because", ("", "because")),
        ("why", ("why", "")),
        ("why </think", ("why </think", "")),
        ("", ("", "")),
    ],
)
def test_inside(text: str, expected: tuple[str, str]) -> None:
    assert split(INSIDE, [text]) == expected
    assert split(INSIDE, list(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>why </thi", ("why", "")),
        ("<think>why <", ("why", "")),
        ("<think>why </thi ", ("why </thi", "")),
        ("<think>", ("", "")),
        ("<think>why</think>because </thi", ("why", "because </thi")),
        ("  <thi", ("", "")),
        ("<", ("", "")),
        ("  ", ("", "  ")),
        ("  <thick", ("", "  <thick")),
        ("because </thi", ("", "because </thi")),
    ],
)
def test_a_cut_in_a_tag_leaves_none_of_it(text: str, expected: tuple[str, str]) -> None:
    for pushes in ([text], list(text)):
        assert split(THINK, pushes, is_cut=True) == expected


@pytest.mark.parametrize(
    ("inside", "begun", "text", "expected"),
    [
        (False, "<thi", "nk>\nwhy</think>because", ("why", "because")),
        (False, "<thi", "ck", ("", "ck")),
        (False, "<thi", "", ("", "")),
        (True, "</", "think>\nbecause", ("", "because")),
        (True, "</", "b> why</think>because", ("b> why", "because")),
        (True, "</", "</think>because", ("", "because")),
        (True, "</think", "", ("", "")),
    ],
)
def test_a_tag_that_the_prompt_begins(inside: bool, begun: str, text: str, expected: tuple[str, str]) -> None:
    thinking = Thinking("<think>", "</think>", inside=inside, begun=begun)
    for pushes in ([text], list(text)):
        assert split(thinking, pushes) == expected


@pytest.mark.parametrize(
    ("text", "inside", "begun"),
    [
        ("", False, ""),
        ("\n", False, ""),
        ("\n<think", False, "<think"),
        ("<think>", True, ""),
        ("<think>why </", True, "</"),
    ],
)
def test_how_reasoning_goes_on(text: str, inside: bool, begun: str) -> None:
    assert thinking_behind(text, THINK) == Thinking("<think>", "</think>", inside=inside, begun=begun)


@pytest.mark.parametrize("text", ["so", "a <think>", "<think>why</think>", "<think>why</think>so <think>", "</think>"])
def test_an_answer_that_has_begun(text: str) -> None:
    """Bug: a start tag anywhere in it opened the reasoning, and no structure was kept."""
    assert thinking_behind(text, THINK) is None


def test_nothing_is_looked_for() -> None:
    assert split(None, ["<thi", "nk>why</think> because"]) == ("", "<think>why</think> because")


def test_what_is_held_back() -> None:
    """White space, and what may become a tag; all else is shown at once."""
    splitter = ReasoningSplitter(THINK)
    pushes = ["  <th", "ink>", "\n", "a ", "b<", "/", "x", " \n", "</think", ">", " ", "c ", "<think>", ""]
    shown = [splitter.push(text) for text in pushes]
    reasoning = ["", "", "", "a", " b", "", "</x", "", "", "", "", "", "", ""]
    content = ["", "", "", "", "", "", "", "", "", "", "", "c ", "<think>", ""]
    assert shown == list(zip(reasoning, content, strict=True))


def test_phases() -> None:
    splitter = ReasoningSplitter(THINK)
    phases = [splitter.phase]
    for text in (" ", "<thi", "nk>", "why", "</think>", "<think>"):
        splitter.push(text)
        phases.append(splitter.phase)
    assert phases == [Phase.START] * 3 + [Phase.REASONING] * 2 + [Phase.CONTENT] * 2
    assert ReasoningSplitter(None).phase is Phase.CONTENT
    assert ReasoningSplitter(INSIDE).phase is Phase.REASONING


def test_the_answer_is_awaited_until_it_begins() -> None:
    splitter = ReasoningSplitter(THINK)
    awaits = [splitter.awaits_answer]
    for text in ("<think>", "why</thi", "nk>", "\n", " \n", "so", "\n"):
        splitter.push(text)
        awaits.append(splitter.awaits_answer)
    assert awaits == [False] * 3 + [True] * 3 + [False] * 2
    assert not ReasoningSplitter(None).awaits_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>why</think>\n so ", "so "),
        (" so</think> ", " so</think> "),
        ("<think>why", ""),
        ("<th", "<th"),
        ("", ""),
    ],
)
def test_the_answer_in_a_whole_text(text: str, answer: str) -> None:
    assert answer_in(text, THINK) == answer
    assert answer_in(text, None) == text


def test_a_flush_ends_the_start() -> None:
    splitter = ReasoningSplitter(THINK)
    assert splitter.push(" <th") == ("", "")
    assert splitter.flush() == ("", " <th")
    assert (splitter.phase, splitter.flush()) == (Phase.CONTENT, ("", ""))


def test_other_tags() -> None:
    thinking = Thinking("[THINK]", "[/THINK]")
    assert split(thinking, list("[THINK]why [/[/THINK]because")) == ("why [/", "because")


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", "<think>"),
        ("{{ content.split('</think>')[-1] }}", "<think>"),
        ("{{ '<|assistant|><think>\\n' }}", "<think>"),
        ("Put your thoughts between [THINK] and [/THINK].", "[THINK]"),
        ("{{ '<seed:think>' }}", "<seed:think>"),
        ("{{ '</thought>' }}", "<thought>"),
        ("◁think▷", "◁think▷"),
        ("{{ messages[0].content }} think", None),
        ("", None),
        (None, None),
    ],
)
def test_templates(template: str | None, start: str | None) -> None:
    thinking = find_thinking(template)
    assert (thinking and thinking.start) == start
    assert thinking is None or not thinking.inside
