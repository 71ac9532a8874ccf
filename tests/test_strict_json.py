"""JSON and nothing beyond it: what is read, what a Python caller may send, and how a fault is named."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.errors import InvalidParameterError
from miniserve.strict_json import check_json, read_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NaN", "NaN is no number of JSON"),
        ("[-Infinity]", "-Infinity is no number"),
        ('{"a": 1e400}', "1e400 is too large for a number"),
        ("9" * 5000, "an integer of thousands of digits"),
        ("[" * 100_000, "nests too deep"),
        ("{'a': 1}", "column 2"),
        ("", "column 1"),
    ],
    ids=lambda value: value[:12],
)
def test_what_is_no_json(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_json(text)


def test_what_is_json() -> None:
    assert read_json('{"NaN": [1e300, -0.5, 12, "Infinity", null, true]}') == {
        "NaN": [1e300, -0.5, 12, "Infinity", None, True]
    }


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "é", [], (1, [2]), {"a": {"b": [None]}}, 10**400], ids=type)
def test_values_of_json(value: Any) -> None:
    check_json(value, "it", "field")


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (float("nan"), "it is nan"),
        ({"a": [1, float("inf")]}, r"it\.a\[1\] is inf"),
        ({"a": b"x"}, r"it\.a is of the type bytes, which JSON does not have"),
        ([{5: 1}], r"it\[0\] has the key 5;"),
        ({"\udc80": 1}, r"it has the key '\\udc80';"),
        (["\udc80"], r"it\[0\] has half a surrogate pair"),
        (10**5000, "it is an integer of 16610 bits, which is too large"),
        ({"x" * 9999: object()}, r"it\.x{70,}\.\.\.x{70,} is of the type object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_none(value: Any, fault: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{fault}") as caught:
        check_json(value, "it", "field")
    assert caught.value.param == "field" and len(str(caught.value)) < 400


def test_depth_is_bounded() -> None:
    """Also where a value is part of itself, twice."""
    endless: dict[str, Any] = {}
    endless |= {"a": endless, "b": endless}
    with pytest.raises(InvalidParameterError, match="it nests more than 200 deep"):
        check_json(endless, "it", "field")
    check_json([[[]]], "it", "field", max_depth=3)
    with pytest.raises(InvalidParameterError, match="nests more than 2 deep"):
        check_json([[[]]], "it", "field", max_depth=2)
