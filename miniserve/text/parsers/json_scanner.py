"""One JSON value, followed character by character as it comes. Owns the syntax of JSON (RFC 8259), strictly, but for
one fault that it mends: control characters in strings, line breaks above all, which models forget to escape.

Says how far the value reaches and whether it is still valid; keeps no text and builds no value, so that it takes
constant work per character and memory for the nesting only. Does not know what the value is for.
"""

from __future__ import annotations

import json
import re

JSON_SPACE = " \t\n\r"

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # what a string may hold as it is
_DIGITS = "0123456789"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# What may come next in a number: (characters, state after it).
_NUMBER = {
    "sign": (("0", "zero"), ("123456789", "whole")),
    "zero": ((".", "point"), ("eE", "e")),
    "whole": ((_DIGITS, "whole"), (".", "point"), ("eE", "e")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), ("eE", "e")),
    "e": ((_DIGITS, "exponent"), ("+-", "e sign")),
    "e sign": ((_DIGITS, "exponent"),),
    "exponent": ((_DIGITS, "exponent"),),
}
_WHOLE_NUMBER = frozenset({"zero", "whole", "fraction", "exponent"})


class JsonScanner:
    """Follows one value; white space before it is part of it.

    Args:
        strict: control characters in strings are a fault too.

    Attributes:
        complete: the value has ended. A number alone ends where something follows it.
        broken: what came next cannot be part of any value.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.complete = False
        self.broken = False
        self._state = "value"
        self._closers: list[str] = []  # of the objects and arrays around
        self._in_key = False
        self._rest = ""  # of a literal
        self._digits = 0  # still missing of \uXXXX
        self._at_control = False  # that is what comes next, in a string

    def push(self, text: str, start: int = 0) -> tuple[int, str]:
        """Follow `text` from `start`.

        Returns:
            Where it stopped: at the end of text or value, or at the fault; and what it followed, as valid JSON.
        """
        parts: list[str] = []
        position = start
        while True:
            end = self._follow(text, position)
            parts.append(text[position:end])
            if not self._at_control:
                return end, "".join(parts)
            self._at_control = False
            parts.append(json.dumps(text[end])[1:-1])
            position = end + 1

    def _follow(self, text: str, position: int) -> int:
        while position < len(text) and not (self.complete or self.broken or self._at_control):
            position = self._step(text, position)
        return position

    def _step(self, text: str, position: int) -> int:
        """Follow at least one character (or, of strings and white space, a run), or find the value ended or broken."""
        match self._state:
            case "string":
                return self._string(text, position)
            case "escape":
                return self._escape(text[position], position)
            case "literal":
                return self._literal(text[position], position)
            case state if state in _NUMBER:
                return self._number(text[position], position)
        end = _skip(_SPACE, text, position)
        return self._structure(text[end], end) if end < len(text) else end

    def _structure(self, char: str, position: int) -> int:
        """Between strings, numbers and literals."""
        match self._state:
            case "value or end" | "key or end" | "next" if char == self._closers[-1]:
                self._closers.pop()
                self._end_value()
            case "next" if char == ",":
                self._state = "key" if self._closers[-1] == "}" else "value"
            case "colon" if char == ":":
                self._state = "value"
            case "key" | "key or end" if char == '"':
                self._state, self._in_key = "string", True
            case "value" | "value or end" if self._begin_value(char):
                pass
            case _:
                self.broken = True
                return position
        return position + 1

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._state, self._in_key = "string", False
        elif char == "{":
            self._closers.append("}")
            self._state = "key or end"
        elif char == "[":
            self._closers.append("]")
            self._state = "value or end"
        elif char in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[char]
        elif char == "-":
            self._state = "sign"
        elif char in _DIGITS:
            self._state = "zero" if char == "0" else "whole"
        else:
            return False
        return True

    def _end_value(self) -> None:
        self._state = "next"
        self.complete = not self._closers

    def _string(self, text: str, position: int) -> int:
        end = _skip(_PLAIN, text, position)
        if end == len(text):
            return end
        if text[end] == "\\":
            self._state = "escape"
        elif text[end] != '"':
            self.broken, self._at_control = self._strict, not self._strict
            return end
        elif self._in_key:
            self._state = "colon"
        else:
            self._end_value()
        return end + 1

    def _escape(self, char: str, position: int) -> int:
        if self._digits:
            self._digits -= 1
            self.broken = char not in "0123456789abcdefABCDEF"
        elif char == "u":
            self._digits = 4
        else:
            self.broken = char not in '"\\/bfnrt'
        if not self._digits:
            self._state = "string"
        return position if self.broken else position + 1

    def _literal(self, char: str, position: int) -> int:
        if char != self._rest[0]:
            self.broken = True
            return position
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return position + 1

    def _number(self, char: str, position: int) -> int:
        for chars, state in _NUMBER[self._state]:
            if char in chars:
                self._state = state
                return position + 1
        if self._state in _WHOLE_NUMBER:
            self._end_value()
        else:
            self.broken = True
        return position


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Where a run that may be empty ends."""
    match = pattern.match(text, position)
    assert match is not None
    return match.end()
