"""JSON as its standard has it: Python's reader takes NaN, Infinity and 1e999 too, and its values may be of any class.

Owns how such a fault is named. Does not know what a value is for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from miniserve.errors import InvalidParameterError, shown

MAX_DEPTH = 200  # of lists and objects in each other, as in the body of a request
_MAX_INTEGER_BITS = 2**13  # Python prints no integer of more than 4300 digits
_MAX_PATH = 160


def read_json(text: str) -> Any:
    """The value that `text` spells.

    Raises:
        ValueError: it spells none; says why, in words.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    except ValueError as error:
        if isinstance(error, (json.JSONDecodeError, _NotFiniteError)):
            raise
        raise ValueError("it has an integer of thousands of digits") from None


def check_json(value: Any, where: str, param: str, *, max_depth: int = MAX_DEPTH) -> None:
    """Refuse what JSON cannot spell. What came over HTTP has passed already; a caller in Python may send anything.

    Args:
        where: what errors call it.
        param: the field of the request.

    Raises:
        InvalidParameterError: of `param`; the message names the part at fault.
    """
    waiting = [(value, where, 0)]
    while waiting:
        part, path, depth = waiting.pop()
        if depth >= max_depth:
            raise InvalidParameterError(f"{where} nests more than {max_depth} deep; make it flatter", param=param)
        if (fault := _fault(part)) is not None:
            raise InvalidParameterError(f"{_cut(path)} {fault}", param=param)
        waiting += ((child, name, depth + 1) for child, name in _children(part, path))


class _NotFiniteError(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _NotFiniteError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _NotFiniteError(f"{digits[:40]} is too large for a number")
    return number


def _fault(value: Any) -> str | None:
    if value is None or isinstance(value, (bool, list, tuple)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"is {value}, which is no number of JSON"
    if isinstance(value, int):
        return None if value.bit_length() <= _MAX_INTEGER_BITS else f"is {shown(value)}, which is too large"
    if isinstance(value, str):
        return None if _is_unicode(value) else "has half a surrogate pair, which is not valid Unicode"
    if isinstance(value, dict):
        wrong = next((key for key in value if not isinstance(key, str) or not _is_unicode(key)), "")
        return None if wrong == "" else f"has the key {ascii(wrong)[:100]}; keys of JSON are strings of valid Unicode"
    return f"is of the type {type(value).__name__}, which JSON does not have"


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _children(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, Mapping):
        yield from ((child, f"{path}.{key}") for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((child, f"{path}[{index}]") for index, child in enumerate(value))


def _cut(path: str) -> str:
    return path if len(path) <= _MAX_PATH else f"{path[: _MAX_PATH // 2]}...{path[-_MAX_PATH // 2 :]}"
