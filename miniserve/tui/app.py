"""The screen and the conversation: one question after the other, and what happens when a server does not answer.

Owns what is asked and remembered, and which keys do what. Does not know HTTP, nor how a server is started.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static
from textual.worker import Worker

from miniserve.tui.client import ChatClient
from miniserve.tui.errors import ChatError, NotYetError
from miniserve.tui.meter import Meter
from miniserve.tui.settings import Settings
from miniserve.tui.spawned_server import SpawnedServer
from miniserve.tui.widgets import Answer, Prompt

RETRY_SECONDS = (0.5, 1, 2)  # the last one for ever


class ChatApp(App[None]):
    """One conversation on one screen. At most one piece of work goes on: connecting, or an answer."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send"),
        Binding("escape", "stop", "Stop", priority=True),
        Binding("ctrl+t", "toggle_reasoning", "Reasoning", priority=True),
        Binding("ctrl+r", "restart", "New conversation", priority=True),
        Binding("ctrl+c", "quit", "Quit", priority=True),
        Binding("pageup", "page(-1)", priority=True, show=False),
        Binding("pagedown", "page(1)", priority=True, show=False),
    ]
    CSS = """
    #title { background: $panel; padding: 0 1; }
    .question, .problem { margin: 1 0; padding: 0 1; border-left: thick $primary; }
    .problem { border-left: thick $error; }
    .-without-reasoning .reasoning { display: none; }
    TextArea { height: auto; max-height: 100%; }
    #progress { color: $warning; padding: 0 1; max-height: 4; }
    """

    def __init__(self, settings: Settings, server: SpawnedServer | None = None) -> None:
        super().__init__()
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self._base_url = settings.base_url
        self._client = ChatClient(settings)
        self._server = server
        self._model: str | None = None
        self._messages: list[dict[str, str]] = []
        self._work: Worker[Any] | None = None
        self._title = Static(self._base_url, id="title", markup=False)
        self._chat = VerticalScroll(can_focus=False)
        self._progress = Static(id="progress", markup=False)
        self._prompt = Prompt(self.action_send)

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield from (self._title, self._chat, self._progress, self._prompt, Footer())

    async def on_mount(self) -> None:
        """Connect at once: a problem is better seen before the first question is written."""
        self.event_loop = asyncio.get_running_loop()
        self._prompt.focus()
        await self.action_restart()

    def action_send(self) -> None:
        """Ask what the prompt holds."""
        text = self._prompt.text.strip()
        if self._work is not None and not self._work.is_finished:
            self.notify("One thing at a time: escape stops what is going on.")
        elif text:
            self._prompt.clear()
            self._work = self.run_worker(self._turn(text, self._messages))

    def action_stop(self) -> None:
        """End what is going on; on the server too, because its connection closes."""
        if self._work is not None:
            self._work.cancel()

    async def action_restart(self) -> None:
        """Begin a new conversation."""
        self.action_stop()
        self._messages = []
        await self._chat.remove_children()
        self.refresh_bindings()
        self._chat.anchor()
        self._work = self.run_worker(self._persist(self._connect))

    def action_toggle_reasoning(self) -> None:
        """Hide the reasoning of all answers, or show it again."""
        self._chat.toggle_class("-without-reasoning")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether a key is of use now."""
        return action != "toggle_reasoning" or any(answer.has_reasoning for answer in self._chat.query(Answer))

    def action_page(self, direction: int) -> None:
        """Scroll the conversation, whatever has the focus."""
        self._chat.scroll_relative(y=direction * max(self._chat.size.height - 1, 1))

    async def _persist(self, job: Callable[[], Awaitable[None]]) -> bool:
        """Do `job`, again and again while the server cannot be reached; whether it was done."""
        try:
            for attempt in itertools.count():
                try:
                    await job()
                    return True
                except NotYetError as error:
                    seconds = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                    problem = f"no answer from {self._base_url}: {error}"
                    self._progress.update(f"{problem}; trying again in {seconds:g} s, escape stops")
                    await asyncio.sleep(seconds)
        except ChatError as error:
            await self._chat.mount(Static(str(error), markup=False, classes="problem"))
        finally:
            self._progress.update("")
        return False

    async def _connect(self) -> None:
        server, started = self._server, time.monotonic()
        if server is not None and server.exit_code is not None:
            self._model = None
            server.start()
        while server is not None and self._model is None and not await self._client.is_healthy():
            if server.exit_code is not None:
                raise ChatError(server.obituary())
            seconds = time.monotonic() - started
            dots = "." * (int(seconds) % 4)
            self._progress.update(f"the server is loading, {seconds:.0f} s{dots}\n{server.last_lines(1)}")
            await asyncio.sleep(0.25)
        self._model = self._model or await self._client.model_name()
        self._title.update(f"{self._model} · {self._base_url}")

    async def _turn(self, text: str, messages: list[dict[str, str]]) -> None:
        answer = Answer()
        await self._chat.mount(Static(text, markup=False, classes="question"), answer)
        self._chat.anchor()
        asked = [*messages, {"role": "user", "content": text}]
        answered = True
        try:
            answered = await self._persist(lambda: self._read(answer, asked))
        except asyncio.CancelledError:
            answer.note("stopped")
            raise
        finally:
            if answered and answer.meter.text:
                messages += [asked[-1], {"role": "assistant", "content": answer.meter.text}]
            elif self.screen_stack and not self._prompt.text:  # no screen is left when the app ends
                self._prompt.insert(text)  # a question without an answer waits for another enter

    async def _read(self, answer: Answer, asked: Sequence[dict[str, str]]) -> None:
        await self._connect()
        answer.meter = Meter()
        try:
            async with aclosing(self._client.stream(str(self._model), asked)) as reads:
                async for events in reads:
                    self._progress.update("")  # what went wrong before is over
                    await answer.add(events)
        except NotYetError:
            if answer.meter.has_begun:  # a second try would repeat it
                raise ChatError("the server broke off the answer; enter asks again") from None
            raise
