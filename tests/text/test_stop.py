"""Stop strings: the same answer however the text is cut, and nothing shown that may become a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.text.stop import StopMatcher

# Few letters: many overlaps and many near misses.
WORDS = st.text(alphabet="ab", min_size=1, max_size=5)
STOPS = st.lists(WORDS, max_size=4).map(tuple)
PUSHES = st.lists(st.text(alphabet="abc", max_size=4), max_size=12)


def run(stops: tuple[str, ...], pushes: list[str]) -> tuple[list[str], str | None]:
    """Texts shown push by push, the flush at the end, and the stop string that matched."""
    matcher = StopMatcher(stops)
    shown: list[str] = []
    for text in pushes:
        visible, stop = matcher.push(text)
        shown.append(visible)
        if stop is not None:
            return [*shown, matcher.flush()], stop
    return [*shown, matcher.flush()], None


def find(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The rule, plainly: the match that ends first, then the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, negative_length, stop = min(ends)
    return text[: end + negative_length], stop


@settings(max_examples=1000)
@given(stops=STOPS, pushes=PUSHES)
def test_any_pushes_equal_a_find_on_the_whole(stops: tuple[str, ...], pushes: list[str]) -> None:
    shown, stop = run(stops, pushes)
    assert ("".join(shown), stop) == find(stops, "".join(pushes))


@settings(max_examples=500)
@given(stops=STOPS, pushes=PUSHES)
def test_held_back_is_exactly_what_may_become_a_stop(stops: tuple[str, ...], pushes: list[str]) -> None:
    matcher = StopMatcher(stops)
    text, shown = "", ""
    for piece in pushes:
        text += piece
        visible, stop = matcher.push(piece)
        if stop is not None:
            return
        shown += visible
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        assert shown == text[: len(text) - held]


def test_alphabet() -> None:
    """Bug: with stop "DEFGHIJ" the tokens "DEF", "G", "HI" were streamed before the match was known."""
    shown, stop = run(("DEFGHIJ",), ["ABC", "DEF", "G", "HI", "J", "KLM"])
    assert (shown, stop) == (["ABC", "", "", "", "", ""], "DEFGHIJ")


def test_stop_over_many_tokens() -> None:
    """Bug: a stop string of several tokens never matched."""
    letters = ["A"] + [f" {letter}" for letter in "BCDEFGHIJKLMNOPQRS"]
    shown, stop = run(("O P Q",), letters)
    assert ("".join(shown), stop) == ("A B C D E F G H I J K L M N ", "O P Q")


@pytest.mark.parametrize("cut", range(5))
def test_overlapping_beginnings(cut: int) -> None:
    """Bug: after a near miss the matcher went on behind it, and missed "aab" in "aaab"."""
    shown, stop = run(("aab",), ["aaab"[:cut], "aaab"[cut:]])
    assert ("".join(shown), stop) == ("a", "aab")


def test_near_miss_is_delivered() -> None:
    shown, stop = run(("DEFGHIJ",), ["ABC", "DEF", "X", " end"])
    assert (shown, stop) == (["ABC", "", "DEFX", " end", ""], None)


def test_flush_delivers_what_was_held_back() -> None:
    assert run(("END",), ["text E", "N"]) == (["text ", "", "EN"], None)


def test_stop_inside_one_push() -> None:
    """What stands before the stop string is delivered, nothing behind it, also not by the flush."""
    assert run(("\n\n",), ["one\n\ntwo\n"]) == (["one", ""], "\n\n")


@pytest.mark.parametrize(
    ("stops", "text", "expected", "stop"),
    [
        (
            ("User:", "User"),
            "hi User: x",
            "hi ",
            "User",
        ),  # one a prefix of the other: the shorter is complete first
        (("b", "aab"), "xaab", "x", "aab"),  # complete at the same character: the longest
        (("abcd", "bc"), "abcd", "a", "bc"),  # does not wait for a longer one that began earlier
        (("y", "x"), "a x y", "a ", "x"),  # by place in the text, not in the list
        (("é", "👩‍👧"), "a👩‍👧é", "a", "👩‍👧"),
    ],
)
def test_which_match_wins(stops: tuple[str, ...], text: str, expected: str, stop: str) -> None:
    for pushes in ([text], list(text)):
        shown, matched = run(stops, pushes)
        assert ("".join(shown), matched) == (expected, stop)


def test_no_stops_holds_nothing_back() -> None:
    assert run((), ["a", "b"]) == (["a", "b", ""], None)


@pytest.mark.timeout(20)
def test_cost_is_linear() -> None:
    """A text that nearly matches all the time: going back on each character would take minutes."""
    stops = tuple("a" * length + "b" for length in range(496, 512))
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push("a")[0] for _ in range(50_000))
    assert len(shown) == 50_000 - 511


def test_pushing_after_a_match_is_a_mistake() -> None:
    matcher = StopMatcher(("x",))
    matcher.push("x")
    with pytest.raises(AssertionError):
        matcher.push("y")


# The stop string in the text


@settings(max_examples=500)
@given(stops=STOPS, pushes=PUSHES)
def test_include_shows_the_stop_string_and_holds_nothing_back(stops: tuple[str, ...], pushes: list[str]) -> None:
    matcher = StopMatcher(stops, include=True)
    shown, stop = "", None
    for text in pushes:
        visible, stop = matcher.push(text)
        shown += visible
        if stop is not None:
            break
        assert visible == text
    expected, expected_stop = find(stops, "".join(pushes))
    assert (shown, stop) == (expected + (expected_stop or ""), expected_stop)
    assert matcher.flush() == ""


# Stop strings that come too early


@settings(max_examples=1000)
@given(stops=STOPS, pushes=PUSHES, num_early=st.integers(0, 12), include=st.booleans())
def test_early_stops_do_not_count(stops: tuple[str, ...], pushes: list[str], num_early: int, include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    shown, stop = "", None
    for index, text in enumerate(pushes):
        visible, stop = matcher.push(text, may_stop=index >= num_early)
        shown += visible
        if stop is not None:
            break
    shown += matcher.flush()
    text, early = "".join(pushes), len("".join(pushes[:num_early]))
    # The rule, plainly: of the matches that end behind the early text, the one that ends first, then the longest.
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(early + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if not ends:
        assert (shown, stop) == (text, None)
    else:
        end, negative_length, expected = min(ends)
        assert (shown, stop) == (text[: end if include else end + negative_length], expected)


def test_stop_that_begins_early_and_completes_later_counts() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("an END, E", may_stop=False) == ("an END, ", None)
    assert matcher.push("ND") == ("", "END")


def test_early_match_may_begin_the_next() -> None:
    """After "aa" that did not count, one more "a" completes it again."""
    matcher = StopMatcher(("aa",))
    assert matcher.push("aa", may_stop=False) == ("a", None)
    assert matcher.push("a") == ("", "aa")
