"""How a wrong value is shown in an error."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.errors import shown
from miniserve.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        ({"a": 1}, "an object"),
        ([1], "an array"),
        ((1,), "an array"),
        (5, "5"),
        (1, "1"),
        (0.5, "0.5"),
        ("it's", '"it\'s"'),
        (2**300, "an integer of 301 bits"),
        ("a" * 1000, f"'{'a' * 99}..."),
        (b"a", "bytes"),
        (SamplingParams(), "SamplingParams"),
    ],
)
def test_in_the_words_of_json(value: Any, text: str) -> None:
    """Bug: answers over HTTP spoke Python, such as None and dict."""
    assert shown(value) == text
