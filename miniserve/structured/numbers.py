"""Which numbers of a JSON schema a grammar keeps to: llguidance reads them as doubles, and cuts them to 64 bits.

Knows schemas; neither grammars nor a vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import count
from typing import Any

from miniserve.errors import shown
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.references import objects
from miniserve.structured.sources import schemas_of

MAX_EXACT = 2**53  # beyond, not every integer is a double
_MAX_INT64 = 2**63 - 1  # rounded up to 2**63, and cut to itself again
_MAX_MULTIPLE = 2**32 // 10  # llguidance reads on digit by digit in 32 bits, and joins in as many, without a check
_MULTIPLES = f"at most {_MAX_MULTIPLE}, not counting the decimal point"
_JOINING = ("allOf", "anyOf", "oneOf", "$ref")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LITERALS = ("const", "enum")
_ANNOTATIONS = ("default", "example", "examples")  # values like those, which nothing is held to
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def inexact_number(asked: StructuredOutput) -> str:
    """Why a number in a schema would become another one; empty if all are kept. JSON within a grammar counts too.

    Raises:
        RecursionError: that nests too deep to be read.
    """
    numbers = (number for schema in schemas_of(asked) for number in _numbers(schema))
    keyword, value = next((number for number in numbers if not _is_kept(number[1])), ("", 0))
    if not keyword:
        return ""
    return (
        f"{keyword} has {shown(value)}, and numbers are kept exactly from {-MAX_EXACT} to {MAX_EXACT} only; use one of "
        "these, or leave it out"
    )


def lossy_multiple(asked: StructuredOutput) -> str:
    """Why a multipleOf would become another one, alone or joined to others; empty if all are kept.

    Raises:
        RecursionError: as `inexact_number`.
    """
    return next(filter(None, map(_lossy, schemas_of(asked))), "")


def _lossy(schema: Any) -> str:
    """Does not find out which values meet: all could, where anything is joined."""
    parts = list(objects(schema))
    found = (part["multipleOf"] for part in parts if _is_number(part.get("multipleOf")))
    multiples = sorted({value for value in found if 0 < value < math.inf})
    for value in multiples:
        if _common_multiple([value]) > _MAX_MULTIPLE:
            return f"multipleOf has {shown(value)}, which cannot be kept exactly: use one of {_MULTIPLES}"
    are_joined = any(keyword in part for part in parts for keyword in _JOINING)
    if not are_joined or not multiples or _common_multiple(multiples) <= _MAX_MULTIPLE:
        return ""
    names = ", ".join(map(shown, multiples[:3])) + (", ..." if len(multiples) > 3 else "")
    return (
        f"its multipleOf values, {names}, may be joined by allOf, anyOf or $ref, and their common multiple cannot be "
        f"kept exactly: use values with one of {_MULTIPLES}"
    )


def _common_multiple(values: Iterable[float]) -> int:
    """The least one, in units of the smallest digit; of the first values only, where that is too large already."""
    fractions = [Fraction(repr(value)) for value in values]
    unit = max(10 ** _num_decimals(fraction) for fraction in fractions)
    common = 1
    for fraction in fractions:
        common = math.lcm(common, int(fraction * unit))
        if common > _MAX_MULTIPLE:
            break
    return common


def _num_decimals(fraction: Fraction) -> int:
    """Digits behind the point: the denominator is made of twos and fives."""
    return next(digits for digits in count() if 10**digits % fraction.denominator == 0)


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
