"""The joined stream equals the decode of the whole, however the tokens are cut into pushes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miniserve.text.detokenizer import IncrementalDetokenizer
from miniserve.text.tokenizer import Tokenizer
from tests.text.conftest import ANY_TEXT

SHARED_FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
REPLACEMENT = "\ufffd"


def stream(tokenizer: Tokenizer, pushes: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
    """The text of each push, and of the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.flush()]


@SHARED_FIXTURES
@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_pushes(pair: Any, data: st.DataObject, skip: bool) -> None:
    # A few ids beyond the vocabulary too: models pad theirs.
    token_id = st.integers(0, pair.ours.vocab_size + 3)
    pushes = data.draw(st.lists(st.lists(token_id, max_size=5), max_size=12))
    whole = pair.ours.decode([token_id for ids in pushes for token_id in ids], skip_special_tokens=skip)
    assert "".join(stream(pair.ours, pushes, skip_special_tokens=skip)) == whole


@SHARED_FIXTURES
@given(ids=st.lists(st.integers(3, 258), max_size=30))
def test_any_bytes_one_by_one(byte_fallback: Any, ids: list[int]) -> None:
    """Byte tokens only: mostly broken UTF-8, cut everywhere."""
    assert "".join(stream(byte_fallback.ours, [[i] for i in ids])) == byte_fallback.ours.decode(ids)


@SHARED_FIXTURES
@given(text=ANY_TEXT)
def test_valid_text_streams_without_replacement(byte_level: Any, byte_fallback: Any, text: str) -> None:
    """Bug: non-ASCII answers had U+FFFD only when streamed, where a character was cut between two tokens."""
    ids = byte_level.ours.encode(text, add_special_tokens=False)
    assert "".join(stream(byte_level.ours, [[i] for i in ids], skip_special_tokens=False)) == text
    ids = byte_fallback.ours.encode(text, add_special_tokens=False)
    expected = " " + text.replace("▁", " ") if text else ""
    assert "".join(stream(byte_fallback.ours, [[i] for i in ids], skip_special_tokens=False)) == expected


def test_character_comes_whole_with_its_last_token(byte_level: Any) -> None:
    ids = byte_level.ours.encode("𠀀", add_special_tokens=False)
    assert len(ids) == 4  # one byte each
    assert stream(byte_level.ours, [[i] for i in ids]) == ["", "", "", "𠀀", ""]


def test_nothing_is_held_back_without_need(byte_level: Any) -> None:
    ids = byte_level.ours.encode("The capital of France", add_special_tokens=False)
    assert stream(byte_level.ours, [[i] for i in ids]) == ["The", " capital", " of", " France", ""]


def test_half_a_character_at_the_end_is_one_replacement(pair: Any) -> None:
    ids = pair.ours.encode("x𠀀", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(pair.ours)
    assert detokenizer.push(ids).strip() == "x"
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_half_a_character_before_other_text(byte_level: Any) -> None:
    half = byte_level.ours.encode("𠀀", add_special_tokens=False)[:2]
    rest = byte_level.ours.encode(" ok", add_special_tokens=False)
    assert stream(byte_level.ours, [half, rest]) == ["", REPLACEMENT + " ok", ""]


def test_prompt_that_ends_in_half_a_character(byte_level: Any) -> None:
    """Bug: after a prompt that ends in half a character, the first token brought the whole prompt again."""
    ids = byte_level.ours.encode("long prompt 𠀀", add_special_tokens=False)
    generated = [ids[-1], *byte_level.ours.encode(" new", add_special_tokens=False)]
    assert "".join(stream(byte_level.ours, [[i] for i in generated])) == REPLACEMENT + " new"


@pytest.mark.parametrize("skip", [True, False])
def test_special_token_inside_a_character(byte_level: Any, skip: bool) -> None:
    """A skipped token leaves no trace: the character around it is whole. A shown one breaks it."""
    emoji = byte_level.ours.encode("𠀀", add_special_tokens=False)
    ids = [*emoji[:2], byte_level.ours.eos_token_id, *emoji[2:]]
    joined = "".join(stream(byte_level.ours, [[i] for i in ids], skip_special_tokens=skip))
    assert joined == byte_level.ours.decode(ids, skip_special_tokens=skip)
    assert joined == ("𠀀" if skip else f"{REPLACEMENT}<|im_end|>{REPLACEMENT}{REPLACEMENT}")


def test_literal_replacement_character_is_text(byte_level: Any) -> None:
    """Bug: detokenizers that take U+FFFD for "not complete yet" hold back a text that really contains it."""
    ids = byte_level.ours.encode("a\ufffdb", add_special_tokens=False)
    texts = stream(byte_level.ours, [[i] for i in ids])
    assert "".join(texts) == "a\ufffdb"
    assert texts[-1] == ""  # nothing waited for the flush


def test_sentencepiece_spaces_survive(byte_fallback: Any) -> None:
    """Bug: decoding token by token lost the spaces, for each piece was decoded as the start of a text."""
    ids = byte_fallback.ours.encode("Daenerys is the Khaleesi", add_special_tokens=False)
    assert "".join(stream(byte_fallback.ours, [[i] for i in ids])) == " Daenerys is the Khaleesi"


def test_shown_special_tokens_break_no_character(byte_level: Any) -> None:
    """Shown though special tokens are skipped: only those named, in their place."""
    ours = byte_level.ours
    start, end = ours.special_id("<|im_start|>"), ours.eos_token_id
    text, half = ours.encode("ok", add_special_tokens=False), ours.encode("𠀀", add_special_tokens=False)
    ids = [end, start, *text, end, *half[:2], end, *half[2:], *half[:1], start]
    detokenizer = IncrementalDetokenizer(ours, shown_ids=frozenset({start}))
    joined = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert joined == f"<|im_start|>ok𠀀{REPLACEMENT}<|im_start|>"
    assert IncrementalDetokenizer(ours, shown_ids=frozenset({start})).push(ids) == joined


def test_shown_ids_take_nothing_away(byte_level: Any) -> None:
    """Where all special tokens are shown, naming some changes nothing."""
    ours = byte_level.ours
    detokenizer = IncrementalDetokenizer(ours, skip_special_tokens=False, shown_ids=frozenset({ours.eos_token_id}))
    assert detokenizer.push([ours.special_id("<|im_start|>"), ours.eos_token_id]) == "<|im_start|><|im_end|>"
