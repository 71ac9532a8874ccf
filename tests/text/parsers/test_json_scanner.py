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


def follow(text: str, *, strict: bool = True) -> tuple[tuple[int, str], bool, bool]:
    """Character by character: ((how far, as JSON), complete, broken)."""
    scanner = JsonScanner(strict=strict)
    taken, parts = 0, []
    for char in text:
        count, valid = scanner.push(char)
        taken += count
        parts.append(valid)
        if scanner.complete or scanner.broken:
            break
    return (taken, "".join(parts)), scanner.complete, scanner.broken


@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_a_value_ends_where_it_ends(value: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner = JsonScanner()
    assert scanner.push(text + " x") == (len(text), text)
    assert scanner.complete and not scanner.broken
    assert follow(text + " x") == ((len(text), text), True, False)


@settings(max_examples=500)
@given(text=st.text(alphabet='{}[]",:\\u0019aeE+-.tfn \n', max_size=8))
def test_valid_is_what_json_takes(text: str) -> None:
    """Against the library, strictly: a blank behind ends a number."""
    (taken, _), complete, _ = follow(text + " ")
    try:
        json.loads(text)
    except ValueError:
        assert not (complete and not text[taken:].strip(" \n"))
    else:
        assert complete and not text[taken:].strip(" \n")


@settings(max_examples=300)
@given(text=st.text(alphabet='{}[]",:\\u0019aeE+-.tfn \n', max_size=10), strict=st.booleans())
def test_any_cut_stops_at_the_same_place(text: str, strict: bool) -> None:
    scanner = JsonScanner(strict=strict)
    assert (scanner.push(text), scanner.complete, scanner.broken) == follow(text, strict=strict)


@given(value=VALUES, controls=st.text(alphabet="\n\t\r\x00\x1f", min_size=1), indent=st.sampled_from([None, 1]))
def test_control_characters_in_strings_are_escaped(value: object, controls: str, indent: int | None) -> None:
    """Bug: a line break that the model had not escaped ended the value. All else stays as it was written."""
    value = {"a\x01": value, "b": [controls, f"{controls}c{controls}"]}
    written = json.dumps(value, ensure_ascii=False, indent=indent)
    for escaped, char in ((r"\n", "\n"), (r"\t", "\t"), (r"\r", "\r"), (r"\u0000", "\0"), (r"\u001f", "\x1f")):
        written = written.replace(escaped, char) if rf"\{escaped}" not in written else written
    scanner = JsonScanner()
    end, valid = scanner.push(written + " x")
    assert (end, scanner.complete, json.loads(valid)) == (len(written), True, value)
    assert follow(written + " x", strict=False) == ((end, valid), True, False)


def test_control_characters_are_no_escapes_nor_structure() -> None:
    for text, valid in (('["\\\n"]', 3), ('["\\u0\n"]', 5), ('["a"\x00]', 4), ("[1\x1f]", 2)):
        scanner = JsonScanner()
        assert scanner.push(text) == (valid, text[:valid]) and scanner.broken


@pytest.mark.parametrize(
    ("text", "valid"),
    [("{'a'", 1), ("[1,]", 3), ("[01]", 2), ("[NaN]", 1), ('["\n"]', 2), ('["\\x"]', 3), ('{"a" 1}', 5), ("[1.]", 3)],
)
def test_a_fault_is_found_at_its_place(text: str, valid: int) -> None:
    scanner = JsonScanner(strict=True)
    assert scanner.push(text) == (valid, text[:valid])
    assert scanner.broken and not scanner.complete


def test_deep_nesting_needs_no_recursion() -> None:
    scanner = JsonScanner()
    assert scanner.push("[" * 100_000) == (100_000, "[" * 100_000)
    assert not scanner.broken
    scanner.push("]" * 100_000)
    assert scanner.complete
