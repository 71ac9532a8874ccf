"""What the parsers of all syntaxes share: text around calls, numbers of calls, and calls that go wrong.

The rules, the same for every syntax and however the text is cut:

- White space before and after a call is not shown. But texts with calls between them stay apart: by the white space
  before the first of these if it has a line break, else by a line break.
- A call starts when its name is known and its arguments begin; those that came before the name follow at once.
- What goes wrong before that was no call: it is text, exactly as the model wrote it, and what follows is read on from
  the place of the fault. So is what the end of the text cuts off there.
- What goes wrong later, or is cut off, ends the arguments there, whole or not. The rest of the call is dropped.
- A call without arguments, or with null, has `{}`. What else is in its object is skipped.

Does not know any syntax beyond the JSON object that most of them have in common.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import groupby

from miniserve.text.parsers.base import ArgumentsDelta, CallStart, Delta, TextDelta, Tool, ToolParser
from miniserve.text.parsers.json_scanner import JSON_SPACE, JsonScanner
from miniserve.text.parsers.reader import Malformed, Reader, Wait

# Characters and escapes of a JSON string that are whole: an escaped surrogate only with its other half.
_WHOLE = re.compile(
    r"(?:[^\\\"]|\\[^u]|\\u(?:[0-9a-cefA-CEF]...|[dD][0-7]..)|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*", re.DOTALL
)
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_OTHER_MEMBERS = ("id", "type")  # that models add to a call


class Outcome(Enum):
    """What became of a call that seemed to begin."""

    TEXT = auto()  # it was none
    WHOLE = auto()
    BROKEN = auto()  # it went wrong, or was cut off, after its start


class CallParser(ToolParser):
    """Drives `_read`, the generator that knows the syntax, and collects what it finds.

    Args:
        known_only: an object that names a function not among `tools`, or has members that no call has, is text.
    """

    def __init__(self, tools: Sequence[Tool], max_calls: int | None, *, known_only: bool = False) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._max_calls = max_calls
        self._known_only = known_only
        self._reader = Reader()
        self._deltas: list[Delta] = []
        self._space: list[str] = []  # shown once text follows, not before a call
        self._after_call = False
        self._gap = ""  # between text that was shown and text behind calls
        self._has_text = False  # some was shown
        self._num_calls = 0  # the dropped ones too
        self._broke_off = False
        self._callee = ""  # of the call that is being read, once known
        self._started = False
        self._argued = False  # its arguments are whole
        self._early: list[str] = []  # arguments before the name
        self._reading = self._read()

    @property
    def broke_off(self) -> bool:
        """As `ToolParser.broke_off`."""
        return self._broke_off

    def push(self, text: str) -> list[Delta]:
        """As `ToolParser.push`."""
        self._reader.add(text)
        return self._advance()

    def flush(self, *, is_cut: bool = False) -> list[Delta]:
        """As `ToolParser.flush`; the same, cut or not."""
        self._reader.end()
        deltas = self._advance()
        return _merged([*deltas, *(TextDelta(space) for space in self._space)])

    def _advance(self) -> list[Delta]:
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return _merged(deltas)

    @abstractmethod
    def _read(self) -> Wait[None]:
        """Read the whole text, as if it were there."""

    # What a syntax finds

    def _show(self, text: str) -> None:
        """Text outside of calls."""
        if self._after_call:
            text = text.lstrip(JSON_SPACE)
            self._after_call = not text
        visible = text.rstrip(JSON_SPACE)
        if visible:
            self._deltas += [TextDelta(part) for part in (self._gap, *self._space, visible) if part]
            self._space.clear()
            self._gap, self._has_text = "", True
        if len(visible) < len(text):
            self._space.append(text[len(visible) :])

    def _call(self, beginning: str, content: Wait[None]) -> Wait[Outcome]:
        """Read one call: `content`, after `beginning`, which has been taken already."""
        self._reader.keep(beginning)
        self._callee, self._started, self._argued = "", False, False
        self._early.clear()
        try:
            yield from content
            if not self._callee:
                raise Malformed
            if not self._argued:
                self._argue("{}")
        except Malformed:
            if self._started:
                self._broke_off |= not (self._argued or self._dropped)
                return Outcome.BROKEN
            self._show(self._reader.kept())
            return Outcome.TEXT
        return Outcome.WHOLE

    def _name(self, name: str) -> None:
        """The call's name is known."""
        if self._callee or not name or (self._known_only and name not in self._tools):
            raise Malformed
        self._callee = name
        early, self._early = self._early, []
        for text in early:
            self._argue(text)

    def _argue(self, text: str) -> None:
        """More of the call's arguments: with the first the call starts."""
        if not self._callee:
            self._early.append(text)
            return
        if not self._started:
            self._start()
        if not self._dropped:
            self._deltas.append(ArgumentsDelta(self._num_calls - 1, text))

    def _start(self) -> None:
        self._started = True
        self._num_calls += 1
        self._reader.kept()
        if self._has_text and not self._gap:
            before = "".join(self._space)
            self._gap = before if "\n" in before else "\n"
        self._space.clear()
        self._after_call = True
        if not self._dropped:
            self._deltas.append(CallStart(self._num_calls - 1, self._callee))

    @property
    def _dropped(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls

    # {"name": ..., "arguments": ...}

    def _object(self) -> Wait[None]:
        """A call as a JSON object. Keys in any order; `parameters` is another name for `arguments`."""
        reader = self._reader
        yield from reader.take_space()
        yield from reader.expect("{")
        while True:
            yield from reader.take_space()
            key = yield from self._string()
            yield from reader.take_space()
            yield from reader.expect(":")
            yield from reader.take_space()
            yield from self._member(key)
            yield from reader.take_space()
            if (yield from reader.expect(",", "}")) == "}":
                return

    def _member(self, key: str) -> Wait[None]:
        match key:
            case "name":
                self._name((yield from self._string()))
            case "arguments" | "parameters" if not self._argued:
                yield from self._arguments()
            case _:
                if self._known_only and not self._started and key not in _OTHER_MEMBERS:
                    raise Malformed
                yield from self._reader.take_json(drop)

    def _arguments(self) -> Wait[None]:
        """An object, null for an empty one, or a string with the text of either."""
        char = yield from self._reader.peek()
        if char == "{":
            yield from self._reader.take_json(self._argue)
        elif char == '"':
            arguments = _ObjectInString(self._argue)
            yield from self._reader.take_json(arguments.push)
            arguments.end()
        else:
            yield from self._reader.expect("null")
            self._argue("{}")
        self._argued = True

    def _string(self) -> Wait[str]:
        if (yield from self._reader.peek()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self._reader.take_json(parts.append, strict=True)
        return _decoded("".join(parts))


class _ObjectInString:
    """A JSON object out of a JSON string, as it comes; an empty string or one with null is an empty object.

    Args:
        emit: gets the object's text.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._opened = False
        self._raw = ""  # taken, not decoded yet
        self._scanner = JsonScanner()
        self._kind = ""  # "{" or "n", once known
        self._broken = False

    def push(self, raw: str) -> None:
        """More of the string, its quotes included."""
        raw = self._raw + (raw if self._opened else raw[1:])
        self._opened = True
        match = _WHOLE.match(raw)
        assert match is not None
        self._raw = raw[match.end() :]
        self._follow(json.loads(f'"{match[0]}"'))
        if len(self._raw) >= _LONGEST_ESCAPE:
            # Half a surrogate pair: no text follows it.
            self._broken, self._raw = True, ""

    def _follow(self, text: str) -> None:
        if not self._kind:
            text = text.lstrip(JSON_SPACE)
            self._kind = text[:1]
            self._broken |= self._kind not in ("", "{", "n")
        end, valid = self._scanner.push(text)
        if self._kind == "{" and end and not self._broken:
            self._emit(valid)
        self._broken |= bool(text[end:].strip(JSON_SPACE))

    def end(self) -> None:
        """The string has ended.

        Raises:
            Malformed: with something else in it.
        """
        if self._broken or self._raw != '"' or (self._kind and not self._scanner.complete):
            raise Malformed
        if self._kind != "{":
            self._emit("{}")


def _decoded(literal: str) -> str:
    """A JSON string's value, which has to be encodable."""
    text: str = json.loads(literal)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Malformed from error
    return text


def drop(_: str) -> None:
    """Takes text that nobody sees."""


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of the same kind as one: between the arguments of two calls there is a `CallStart`."""
    result: list[Delta] = []
    for _, run in groupby(deltas, type):
        first, *others = run
        if isinstance(first, CallStart) or not others:
            result += [first, *others]
        else:
            parts = [first.text, *(delta.text for delta in others if not isinstance(delta, CallStart))]
            result.append(replace(first, text="".join(parts)))
    return result
