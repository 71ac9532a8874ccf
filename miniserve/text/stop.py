"""Stop strings in a stream of text. Owns the text that may still become a stop string.

Only generated text is pushed: a stop string in the prompt does not matter. Does not know tokens or requests.

The rule is that of somebody who reads the text character by character and stops as soon as any stop string
is complete: of all matches the one that ends first wins, of those that end together the longest. So the
result does not depend on how the text is cut into pushes, and a request never runs on to see whether a
longer stop string would match too.
"""

from __future__ import annotations


class StopMatcher:
    """Finds the first of `stops`, and holds back exactly the text that may still become one.

    Each stop string is followed with the Knuth-Morris-Pratt automaton: all pushes together cost time linear
    in the text, times the number of stop strings.

    Args:
        stops: non-empty strings.
        include: the stop string is part of what may be shown. Then nothing needs to be held back.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = stops
        self._include = include
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._matched = [0] * len(stops)  # how much of each stop string the text ends with
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add generated text; returns the text that may be shown, and the stop string that ended it.

        Without `may_stop`, a stop string that `text` completes does not count; one that begins in it and is complete
        later does. After a match nothing may be pushed any more: what follows the stop string is dropped.
        """
        assert not self._stopped, "text pushed after a stop string"
        if not self._stops:
            return text, None
        seen = self._held + text
        for end in range(len(self._held) + 1, len(seen) + 1):
            stop = self._advance(seen[end - 1])
            if stop is not None and may_stop:
                self._held, self._stopped = "", True
                return seen[: end if self._include else end - len(stop)], stop
        shown = len(seen) - (0 if self._include else max(self._matched, default=0))
        self._held = seen[shown:]
        return seen[:shown], None

    def flush(self) -> str:
        """End the text without a match; returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Follow each stop string by one character; returns the longest that is complete now."""
        complete: str | None = None
        for index, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = fallbacks[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                # If this match does not count, the next one may begin with what it ends with.
                matched = fallbacks[-1]
                if complete is None or len(stop) > len(complete):
                    complete = stop
            self._matched[index] = matched
        return complete


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper suffix that is also a prefix of `stop`."""
    fallbacks = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = fallbacks[length - 1]
        if stop[index] == stop[length]:
            length += 1
        fallbacks[index] = length
    return fallbacks
