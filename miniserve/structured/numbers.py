"""Which numbers of a JSON schema a grammar keeps to: llguidance reads them as doubles, and cuts them to 64 bits.

Knows schemas; neither grammars nor a vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from miniserve.errors import shown
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.sources import schemas_of

MAX_EXACT = 2**53  # beyond, not every integer is a double
_MAX_INT64 = 2**63 - 1  # rounded up to 2**63, and cut to itself again
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LITERALS = ("const", "enum")
_ANNOTATIONS = ("default", "example", "examples")  # values like those, which nothing is held to
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def inexact_number(asked: StructuredOutput) -> str:
    """Why a number in a schema would become another one; empty if all are kept. JSON within a grammar counts too."""
    try:
        numbers = (number for schema in schemas_of(asked) for number in _numbers(schema))
        keyword, value = next((number for number in numbers if not _is_kept(number[1])), ("", 0))
    except RecursionError:
        return "it is nested too deeply"
    if not keyword:
        return ""
    return (
        f"{keyword} has {shown(value)}, and numbers are kept exactly from {-MAX_EXACT} to {MAX_EXACT} only; use one of "
        "these, or leave it out"
    )


def _is_kept(number: float) -> bool:
    """Beyond what is exact, those integers are kept that are doubles by chance."""
    return abs(number) <= MAX_EXACT or number == _MAX_INT64 or (abs(number) < _MAX_INT64 and float(number) == number)


def _numbers(root: Any) -> Iterator[tuple[str, float]]:
    """With their keywords: all that an answer is held to."""
    waiting = [(root, False)]
    while waiting:
        value, has_names = waiting.pop()  # a property may have the name of a keyword
        if isinstance(value, list):
            waiting += ((item, False) for item in value)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                if has_names:
                    waiting.append((part, False))
                elif key in _BOUNDS and _is_number(part):
                    yield key, part
                elif key in _LITERALS:
                    yield from ((key, number) for number in _numbers_within(part))
                elif key not in _ANNOTATIONS:
                    waiting.append((part, key in _NAMED))


def _numbers_within(literal: Any) -> Iterator[float]:
    waiting = [literal]
    while waiting:
        value = waiting.pop()
        if _is_number(value):
            yield value
        else:
            waiting += _parts(value)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
