"""Special tokens that users spell out in messages: found, carried through a chat template, given back as text.

A message that says "<|im_end|>" must not end its own turn. But a template writes the same tokens itself, and may
trim, cut, join and quote what the messages say, so in its output the two cannot be told apart. Therefore each
spelling travels as a mark, one private-use character that occurs nowhere else, and comes back as a piece of its own.
Does not know templates or tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miniserve.errors import InvalidParameterError

_PRIVATE_USE = range(0xE000, 0xF900)
_JSON_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. In a literal one no special token is meant, whatever it spells."""

    text: str
    literal: bool = False


def compile_spellings(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the longest of `spellings` that begins at a place; None where there are none."""
    pattern = _trie_pattern({spelling for spelling in spellings if spelling})
    return re.compile(pattern) if pattern else None


def _trie_pattern(spellings: Iterable[str]) -> str:
    """Shared beginnings once: a plain alternation of a thousand tokens would try each of them at every "<"."""
    rests: dict[str, list[str]] = {}
    for spelling in sorted(spellings):
        rests.setdefault(spelling[:1], []).append(spelling[1:])
    may_end = rests.pop("", None) is not None
    branches = [re.escape(char) + _trie_pattern(rest) for char, rest in rests.items()]
    if len(branches) == 1 and not may_end:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if may_end else ''}" if branches else ""


class SpellingMarks:
    """The marks of one conversation.

    Args:
        spellings: what to find, from `compile_spellings`.
        values: what users wrote: strings in lists and mappings, keys included.
        others: what else the template sees, its source included: no mark may occur there either.

    Raises:
        InvalidParameterError: there are not enough characters left for marks.
    """

    def __init__(self, spellings: re.Pattern[str] | None, values: Any, *others: Any) -> None:
        self._spellings = spellings
        strings = list(_strings(values)) if spellings is not None else []
        found = {match[0] for string in strings for match in spellings.finditer(string)} if spellings else set()
        self._marks = dict(zip(sorted(found), _unused([*strings, *_strings(others)], len(found)), strict=True))
        # Behind `tojson`, a mark and what it stands for are both quoted.
        self._texts = {mark: spelling for spelling, mark in self._marks.items()}
        self._texts |= {_quoted(mark): _quoted(spelling) for mark, spelling in self._texts.items()}
        self._split = compile_spellings(self._texts)

    def put(self, value: Any) -> Any:
        """`value` with marks for the spellings in it.

        Raises:
            InvalidParameterError: it is nested too deeply.
        """
        if not self._marks:
            return value
        try:
            return self._put(value)
        except RecursionError as error:
            raise InvalidParameterError("messages are nested too deeply", param="messages") from error

    def take(self, text: str) -> list[Piece]:
        """`text` in pieces: each mark in it is the spelling that it stands for, as a literal piece."""
        if self._split is None:
            return [Piece(text)]
        pieces: list[Piece] = []
        end = 0
        for match in self._split.finditer(text):
            pieces += [Piece(text[end : match.start()]), Piece(self._texts[match[0]], literal=True)]
            end = match.end()
        return [piece for piece in [*pieces, Piece(text[end:])] if piece.text]

    def _put(self, value: Any) -> Any:
        if isinstance(value, str):
            assert self._spellings is not None
            return self._spellings.sub(lambda match: self._marks[match[0]], value)
        if isinstance(value, Mapping):
            return {self._put(key): self._put(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._put(item) for item in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    """Every string in `value`. Not recursive: values of strangers may be nested deeply."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            values += value


def _unused(strings: list[str], count: int) -> list[str]:
    """`count` private-use characters that no string has, also not in JSON's spelling."""
    if not count:
        return []
    used = {char for string in strings for char in set(string)}
    used |= {chr(int(code, 16)) for string in strings for code in _JSON_ESCAPE.findall(string)}
    free = [chr(code) for code in _PRIVATE_USE if chr(code) not in used]
    if len(free) < count:
        raise InvalidParameterError(
            f"messages spell {count} special tokens, and leave only {len(free)} private-use characters (U+E000 and on) "
            "to mark them with; use fewer of either",
            param="messages",
        )
    return free[:count]


def _quoted(text: str) -> str:
    return json.dumps(text)[1:-1]
