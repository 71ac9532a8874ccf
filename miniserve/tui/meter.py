"""What came of one answer: its text, its reasoning, and its numbers.

Owns how an event of the stream is read. Does not know where events come from, nor how a screen shows them.
"""

from __future__ import annotations

import json
import textwrap
import time
from dataclasses import dataclass, field
from typing import Any

from miniserve.tui.errors import ChatError


@dataclass(slots=True)
class Meter:
    """Text, times (in seconds) and counts of one answer. Counts deltas until the server tells the tokens."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    reasoning: str = ""
    text: str = ""
    num_deltas: int = 0
    usage: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Whether anything came that can be shown."""
        return self.first is not None

    def add(self, event: bytes) -> None:
        """Take in one event of the stream."""
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                raise ChatError(f"the server broke off: {chunk['error']['message']}")
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                self._add_delta(choice["delta"])
                self.notes += ["cut at the length limit"] if choice.get("finish_reason") == "length" else []
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ChatError(f"no chunk of a chat came, but {event[:200]!r}; is this an OpenAI API?") from None

    def _add_delta(self, delta: dict[str, Any]) -> None:
        # Servers give the reasoning one of two names, or both.
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        if reasoning or text:
            self.reasoning += reasoning
            self.text += text
            self.num_deltas += 1
            self.last = time.monotonic()
            self.first = self.first or self.last

    def line(self, width: int) -> str:
        """What is known, for below the answer: everything if two lines of `width` columns hold it, or else the gist."""
        about, tokens = ("", self.usage["completion_tokens"]) if self.usage else ("about ", self.num_deltas)
        parts = [f"{about}{tokens} tokens"] if self.usage or self.has_begun else []
        gist = list(parts)
        if self.first is not None:
            if self.last > self.first and tokens > 1:
                rate = f"{about}{(tokens - 1) / (self.last - self.first):.1f}"
                parts.append(f"{rate} tokens/s")
                gist.append(f"{rate}/s")
            parts.append(f"first token after {self.first - self.started:.2f} s")
        if self.usage:
            prompt = self.usage["prompt_tokens"]
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            parts.append(f"prompt {prompt} tokens, {cached} cached ({cached / max(prompt, 1):.0%})")
            gist.append(f"{cached} cached")
        everything = " · ".join(parts + self.notes)
        is_short = len(textwrap.wrap(everything, max(width, 1))) <= 2
        return everything if is_short else " · ".join(gist + self.notes)
