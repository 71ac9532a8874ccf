"""Driving the chat as a user does, and reading its screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Static, TextArea
from textual.widgets.markdown import MarkdownBlock

from miniserve.tui.app import ChatApp
from miniserve.tui.settings import Settings
from miniserve.tui.spawned_server import SpawnedServer
from miniserve.tui.widgets import Answer
from tests.tui.chat_server import DEADLINE

Scenario = Callable[["Screen"], Coroutine[Any, Any, None]]


class Screen:
    """What is on the screen of a running app."""

    def __init__(self, app: ChatApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Let the app go on until `condition` holds."""
        for _ in range(int(DEADLINE / 0.02)):
            if condition():
                return
            await self.pilot.pause(0.02)
        raise AssertionError(f"in vain: {what}; the screen says {self.everything()}")

    async def until_shown(self, text: str) -> None:
        await self.until(lambda: text in self.everything(), f"waited for {text!r}")

    async def until_idle(self) -> None:
        work = self.app._work
        await self.until(lambda: work is None or work.is_finished, "waited for the end of the work")

    async def ask(self, text: str) -> None:
        """Write and press enter, when nothing else goes on."""
        await self.until_idle()
        self.prompt.text = text
        await self.pilot.press("enter")

    @property
    def prompt(self) -> TextArea:
        return self.app.query_one(TextArea)

    @property
    def answers(self) -> list[Answer]:
        return list(self.app.query(Answer))

    def everything(self) -> str:
        """All text, from top to bottom."""
        parts = []
        for widget in self.app.screen.walk_children():
            if isinstance(widget, Static | MarkdownBlock):
                parts.append(str(widget.render()))
        return "\n".join(parts)


def play(scenario: Scenario, server: SpawnedServer | None = None, **settings: Any) -> ChatApp:
    """Run the app on a small screen through `scenario`, and end it."""
    app = ChatApp(Settings(**settings), server)

    async def run() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await scenario(Screen(app, pilot))

    asyncio.run(run())
    return app
