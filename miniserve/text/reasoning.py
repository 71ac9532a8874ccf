"""Where reasoning ends and the answer begins. Owns the known tags, and the text that may still become one.

A model that reasons does so first, between two tags; only text that opens with the start tag, or whose prompt ended in
it, has reasoning. Everything behind the end tag is the answer, whatever tags it may spell. Does not know tokens.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto

from miniserve.outputs import Thinking

# One row a spelling: a template that mentions either tag is that of a model which reasons so.
_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("◁think▷", "◁/think▷"),
)


def find_thinking(template: str | None) -> Thinking | None:
    """How the model of a chat template marks its reasoning; None if the template knows of none."""
    if template is None:
        return None
    return next((Thinking(start, end) for start, end in _TAGS if start in template or end in template), None)


class Phase(Enum):
    """What the text has come to."""

    START = auto()  # only white space so far, or the beginning of the start tag: reasoning may begin
    REASONING = auto()
    CONTENT = auto()  # the answer, up to the end


class ReasoningSplitter:
    """Splits the text of one request; joined, its results do not depend on how the text is cut into pushes.

    Neither part has the white space at the tags: around the reasoning, and before the answer behind it. Without a start
    tag at the beginning everything is the answer, white space and later tags included; without an end tag everything is
    reasoning. What the prompt has of a tag counts, but is never shown.

    Args:
        thinking: None where no reasoning is looked for.

    Attributes:
        phase: what the text has come to.
        has_reasoning: whether reasoning has begun; it may have ended.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        self._start, self._end = ("", "") if thinking is None else (thinking.start, thinking.end)
        if thinking is None:
            self.phase = Phase.CONTENT
        else:
            self.phase = Phase.REASONING if thinking.inside else Phase.START
        self.has_reasoning = self.phase is Phase.REASONING
        self._held = "" if thinking is None else thinking.begun  # may become a tag
        self._num_hidden = len(self._held)  # at the beginning: characters of the prompt
        self._spaces = ""  # white space behind reasoning that was shown
        self._has_shown = False  # some reasoning was shown
        self._drops_spaces = False  # white space behind the end tag

    @property
    def held(self) -> str:
        """What may become a tag, or a part of one."""
        return self._held

    @property
    def awaits_answer(self) -> bool:
        """Whether the reasoning has ended and nothing has followed yet but white space, which is dropped."""
        return self._drops_spaces

    def push(self, text: str) -> tuple[str, str]:
        """Add text; returns what of the reasoning and of the answer may be shown now."""
        if self.phase is Phase.CONTENT:
            return "", self._content(text)
        seen, self._held = self._held + text, ""
        return self._begin(seen) if self.phase is Phase.START else self._reason(seen)

    def flush(self, *, is_cut: bool = False) -> tuple[str, str]:
        """End the text: what was held back became no tag.

        `is_cut`: it would have gone on. Then the beginning of a tag is taken for one, and not shown.
        """
        held, self._held = self._held, ""
        if is_cut and held.strip():
            held = ""
        if self.phase is Phase.START:
            self.phase = Phase.CONTENT
            return "", self._shown(held)
        return self._reasoning(self._shown(held)), ""

    def _begin(self, seen: str) -> tuple[str, str]:
        text = seen.lstrip()
        if text.startswith(self._start):
            self.phase, self.has_reasoning, self._num_hidden = Phase.REASONING, True, 0
            return self._reason(text[len(self._start) :])
        if self._start.startswith(text):
            self._held = seen
            return "", ""
        self.phase = Phase.CONTENT
        return "", self._shown(seen)

    def _reason(self, seen: str) -> tuple[str, str]:
        reasoning, tag, content = seen.partition(self._end)
        if tag:
            reasoning = self._shown(reasoning)
            self.phase, self._drops_spaces, self._num_hidden = Phase.CONTENT, True, 0
            return self._reasoning(reasoning), self._content(content)
        shown = len(seen) - _overlap(seen, self._end)
        self._held = seen[shown:]
        return self._reasoning(self._shown(seen[:shown])), ""

    def _shown(self, text: str) -> str:
        """Without what the prompt has of it."""
        hidden = min(self._num_hidden, len(text))
        self._num_hidden -= hidden
        return text[hidden:]

    def _reasoning(self, text: str) -> str:
        """Without white space at its ends; what may be in its middle waits for more."""
        seen = self._spaces + text if self._has_shown else text.lstrip()
        shown = seen.rstrip()
        self._spaces = seen[len(shown) :]
        self._has_shown = self._has_shown or bool(shown)
        return shown

    def _content(self, text: str) -> str:
        if self._drops_spaces:
            text = text.lstrip()
            self._drops_spaces = not text
        return text


def thinking_behind(text: str, thinking: Thinking) -> Thinking | None:
    """How the reasoning goes on behind the beginning of an answer: `thinking`, inside or with a tag that has begun.

    None where the answer itself has begun, or comes next.
    """
    splitter = ReasoningSplitter(thinking)
    splitter.push(text)
    if splitter.phase is Phase.CONTENT:
        return None
    return replace(thinking, inside=splitter.phase is Phase.REASONING, begun=splitter.held.lstrip())


def answer_in(text: str, thinking: Thinking | None) -> str:
    """The answer in a text that has come whole: what follows the reasoning that it begins with, if it does."""
    splitter = ReasoningSplitter(thinking)
    return splitter.push(text)[1] + splitter.flush()[1]


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` with which `tag` begins, and no more than begins."""
    return next((length for length in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:length])), 0)
