"""A JSON value followed as it comes: valid and ended exactly where json says so, however it is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.text.parsers.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def follow(text: str) -> tuple[int, bool, bool]:
    """Character by character: (how far, complete, broken)."""
    scanner = JsonScanner()
    taken = 0
    for char in text:
        taken += scanner.push(char)
        if scanner.complete or scanner.broken:
            break
    return taken, scanner.complete, scanner.broken


@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_a_value_ends_where_it_ends(value: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner = JsonScanner()
    assert scanner.push(text + " x") == len(text)
    assert scanner.complete and not scanner.broken
    assert follow(text + " x") == (len(text), True, False)


@settings(max_examples=500)
@given(text=st.text(alphabet='{}[]",:\\u0019aeE+-.tfn \n', max_size=8))
def test_valid_is_what_json_takes(text: str) -> None:
    """Against the library, strictly: a blank behind ends a number."""
    taken, complete, _ = follow(text + " ")
    try:
        json.loads(text)
    except ValueError:
        assert not (complete and not text[taken:].strip(" \n"))
    else:
        assert complete and not text[taken:].strip(" \n")


@settings(max_examples=300)
@given(text=st.text(alphabet='{}[]",:\\u0019aeE+-.tfn \n', max_size=10))
def test_any_cut_stops_at_the_same_place(text: str) -> None:
    scanner = JsonScanner()
    assert (scanner.push(text), scanner.complete, scanner.broken) == follow(text)


@pytest.mark.parametrize(
    ("text", "valid"),
    [("{'a'", 1), ("[1,]", 3), ("[01]", 2), ("[NaN]", 1), ('["\n"]', 2), ('["\\x"]', 3), ('{"a" 1}', 5), ("[1.]", 3)],
)
def test_a_fault_is_found_at_its_place(text: str, valid: int) -> None:
    scanner = JsonScanner()
    assert scanner.push(text) == valid
    assert scanner.broken and not scanner.complete


def test_deep_nesting_needs_no_recursion() -> None:
    scanner = JsonScanner()
    assert scanner.push("[" * 100_000) == 100_000
    assert not scanner.broken
    scanner.push("]" * 100_000)
    assert scanner.complete
