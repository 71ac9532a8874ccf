"""Text as it comes, for parsers that are written as if all of it were there. Owns the text that is not taken yet.

A parser is a generator: where it needs more text than has come, it yields, and goes on once there is more. What it
takes depends on the text alone, never on how it was cut, and nothing is read twice: each character is taken once, and
only the beginning of a word that is looked for is looked at again. Does not know what the text means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from miniserve.text.parsers.json_scanner import JsonScanner

T = TypeVar("T")
Wait = Generator[None, None, T]  # gives T, once enough text has come
_SPACE = re.compile(r"[ \t\n\r]*")


class Malformed(Exception):  # noqa: N818 - no error of the user: a model has not written what a parser looked for
    """The text does not go on as it would have to."""


class Reader:
    """A cursor in text that is still growing."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ended = False
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        """More text has come."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def keep(self, beginning: str) -> None:
        """Remember `beginning` and what is taken from now on, in case it turns out to be plain text."""
        self._kept = [beginning]

    def kept(self) -> str:
        """What was remembered; nothing is any more."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def peek(self) -> Wait[str]:
        """The next character, without taking it; "" at the end of the text."""
        while self._position == len(self._text) and not self._ended:
            yield
        return self._text[self._position : self._position + 1]

    def take_if(self, *words: str) -> Wait[str]:
        """Take and return that of `words` which comes next; "" if none does. None is the beginning of another."""
        while True:
            for word in words:
                if self._text.startswith(word, self._position):
                    return self._take(len(word))
            left = len(self._text) - self._position
            if self._ended or not any(
                left < len(word) and word.startswith(self._text[self._position :]) for word in words
            ):
                return ""
            yield

    def take_end(self, word: str) -> Wait[None]:
        """Take `word` if it comes next, or so much of it as stands at the end of the text."""
        if not (yield from self.take_if(word)) and word.startswith(self._text[self._position :]):
            self._take(len(self._text) - self._position)

    def expect(self, *words: str) -> Wait[str]:
        """As `take_if`, where one of `words` has to come.

        Raises:
            Malformed: none does.
        """
        word = yield from self.take_if(*words)
        if not word:
            raise Malformed
        return word

    def take_run(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Take and return as many characters as `pattern`, which is one class of characters repeated, matches."""
        parts: list[str] = []
        while (yield from self.peek()):
            match = pattern.match(self._text, self._position)
            assert match is not None, "the pattern matches the empty string"
            parts.append(self._take(match.end() - match.start()))
            if self._position < len(self._text):
                break
        return "".join(parts)

    def take_space(self) -> Wait[str]:
        """Take and return the white space that comes next."""
        return self.take_run(_SPACE)

    def take_until(self, words: tuple[str, ...], sink: Callable[[str], None]) -> Wait[str]:
        """Hand the text before the first of `words` to `sink` as soon as it is certain; then take and return the word.

        At the end of the text "".
        """
        word = yield from self.take_before(words, sink)
        if not word and self._position < len(self._text):
            sink(self._take(len(self._text) - self._position))
        return word

    def take_before(self, words: tuple[str, ...], sink: Callable[[str], None]) -> Wait[str]:
        """As `take_until`, but the beginning of a word with which the text ends is left there."""
        while True:
            start, word = self._find(words)
            if start > self._position:
                sink(self._take(start - self._position))
            if word or self._ended:
                return self._take(len(word))
            yield

    def _find(self, words: tuple[str, ...]) -> tuple[int, str]:
        """Where the first of `words` is, and which; or where the text ends with what may become one, and ""."""
        found = re.compile("|".join(map(re.escape, words))).search(self._text, self._position)
        if found:
            return found.start(), found[0]
        end = len(self._text)
        for start in range(max(self._position, end - max(map(len, words)) + 1), end):
            if any(word.startswith(self._text[start:]) for word in words):
                return start, ""
        return end, ""

    def take_json(self, sink: Callable[[str], None], *, strict: bool = False) -> Wait[None]:
        """Take one JSON value, handing its text to `sink` as it comes.

        Control characters in its strings are escaped in what is handed over; where `strict`, they are a fault.

        Raises:
            Malformed: it is not valid JSON, or the text ends in it. What was valid has been handed over.
        """
        scanner = JsonScanner(strict=strict)
        while not scanner.complete:
            yield from self.peek()
            end, valid = scanner.push(self._text, self._position)
            if end > self._position:
                self._take(end - self._position)
                sink(valid)
            elif not scanner.complete:
                raise Malformed

    def _take(self, count: int) -> str:
        taken = self._text[self._position : self._position + count]
        self._position += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken
