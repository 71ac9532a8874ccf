"""The two parts of the chat's screen that are more than text: an answer as it comes, and where the user writes.

Owns how they look from inside and take keys. Does not know the conversation, nor the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from textual.containers import Vertical
from textual.events import Key
from textual.reactive import reactive
from textual.widgets import Markdown, Static, TextArea

from miniserve.tui.meter import Meter


class Answer(Vertical):
    """An answer as it comes: the reasoning, if the model does that aloud, the text, and the numbers."""

    DEFAULT_CSS = """
    Answer { height: auto; }
    Answer .reasoning { display: none; opacity: 60%; margin: 0 2 1 2; padding: 0 1; border-left: solid $foreground; }
    Answer.-reasoned .reasoning { display: block; }
    Answer .reasoning > MarkdownBlock:last-child { margin-bottom: 0; }
    Answer .numbers { color: $text-muted; padding: 0 2; }
    """
    has_reasoning = reactive(False, bindings=True, toggle_class="-reasoned")

    def __init__(self) -> None:
        self.meter = Meter()
        self._reasoning = Markdown(open_links=False, classes="reasoning")
        self._text = Markdown(open_links=False)
        self._numbers = Static(markup=False, classes="numbers")
        super().__init__(self._reasoning, self._text, self._numbers)

    async def add(self, events: Sequence[bytes]) -> None:
        """Show what has just come, up to where it went wrong."""
        num_reasoning, num_text = len(self.meter.reasoning), len(self.meter.text)
        try:
            for event in events:
                self.meter.add(event)
        finally:
            self._show_numbers()
            self.has_reasoning = bool(self.meter.reasoning)
            news = ((self._reasoning, self.meter.reasoning[num_reasoning:]), (self._text, self.meter.text[num_text:]))
            appended = [markdown.append(text) for markdown, text in news if text]
            # Shielded: an answer that is stopped here must still show all that came.
            await asyncio.shield(asyncio.gather(*appended))

    def note(self, text: str) -> None:
        """Tell how it ended, beside the numbers."""
        self.meter.notes.append(text)
        self._show_numbers()

    def on_resize(self) -> None:
        """The width tells how many numbers there is room for."""
        if self.meter.has_begun or self.meter.notes:
            self._show_numbers()

    def _show_numbers(self) -> None:
        self._numbers.update(self.meter.line(self._numbers.content_size.width))


class Prompt(TextArea):
    """Where the user writes. Enter is taken here and not by the app, where it would overtake letters on their way."""

    def __init__(self, send: Callable[[], None]) -> None:
        super().__init__(placeholder="Ask something")
        self._send = send

    def on_key(self, event: Key) -> None:
        """Send instead of breaking the line."""
        if event.key == "enter":
            event.stop().prevent_default()
            self._send()
