"""`uv run tui.py`: chat in the terminal with any OpenAI-compatible server, and see how fast it answers.

Owns the screen, the conversation, and with `--spawn` the life of a server started as a child. Speaks HTTP only: of
miniserve it knows no more than the command that serves, and `/health`.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import httpx
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Key
from textual.widgets import Footer, Markdown, Static, TextArea
from textual.worker import Worker

SERVE_COMMAND = (sys.executable, str(Path(__file__).with_name("main.py")), "serve")
STOP_SECONDS = 10.0  # for a child to end after SIGTERM, before SIGKILL
RETRY_SECONDS = (0.5, 1, 2)  # the last one for ever


class ChatError(Exception):
    """What the user must read; the message says what to do."""


class NotYetError(Exception):
    """The server cannot answer now."""


UNREACHABLE = (NotYetError, httpx.TransportError)  # worth another try


class Settings(argparse.Namespace):
    """What the flags asked. None leaves the choice to the server."""

    base_url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    system: str | None = None
    api_key: str | None = None
    spawn: bool = False
    serve_args: Sequence[str] = ()


class ChatClient:
    """The calls to the server. They raise ChatError, or one of UNREACHABLE."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._base = settings.base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        # A server on this machine is never behind the proxy that the environment may name.
        remote = httpx.URL(self._base).host not in ("127.0.0.1", "localhost", "::1")
        # Only connecting has a time limit: a long prompt on a slow machine takes its time.
        self._http = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=5), trust_env=remote)

    async def is_healthy(self) -> bool:
        """Whether a model is loaded."""
        with suppress(httpx.TransportError):
            return (await self._http.get(self._base.removesuffix("/v1") + "/health", timeout=5)).status_code == 200
        return False

    async def model_name(self) -> str:
        """The model that was asked for, or else the first one that the server lists."""
        if self._settings.model:
            return self._settings.model
        response = await self._http.get(f"{self._base}/models", timeout=10)
        await self._check(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"{self._base}/models lists no model; name one with --model") from None

    async def stream(self, model: str, messages: Sequence[dict[str, str]]) -> AsyncGenerator[list[bytes]]:
        """The answer's events, as many at once as came in. Closing the iterator ends the request on the server."""
        system = [{"role": "system", "content": self._settings.system}] if self._settings.system else []
        options = {name: getattr(self._settings, name) for name in ("max_tokens", "temperature")}
        body: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        body |= {"model": model, "messages": [*system, *messages]}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        rest, done = b"", False
        async with self._http.stream("POST", f"{self._base}/chat/completions", json=body) as response:
            await self._check(response)
            async for read in response.aiter_bytes():
                # Lines end at \n only: the JSON may hold characters that splitlines() takes for line ends.
                *lines, rest = (rest + read).split(b"\n")
                events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
                done = done or b"[DONE]" in events
                yield [event for event in events if event != b"[DONE]"]
        if not done:
            raise NotYetError("the stream ended before the answer did")

    async def _check(self, response: httpx.Response) -> None:
        status, body = response.status_code, b"" if response.status_code == 200 else await response.aread()
        if status == 200:
            return
        try:
            reason = str(json.loads(body)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            reason = body[:200].decode(errors="replace")
        kind = NotYetError if status in (429, 502, 503, 504) else ChatError
        raise kind(f"HTTP {status}: {reason}" + (" (see --api-key)" if status == 401 else ""))


class SpawnedServer:
    """A server as a child process. `log` is the file of its stdout and stderr."""

    def __init__(self, command: Sequence[str], settings: Settings) -> None:
        url = httpx.URL(settings.base_url)
        self._address = (url.host, url.port or {"http": 80, "https": 443}[url.scheme])
        self._command = [*command, "--host", url.host, "--port", str(self._address[1])]
        # In the environment, because other users can read a command line.
        self._environment = os.environ | ({"MINISERVE_API_KEY": settings.api_key} if settings.api_key else {})
        self._process: subprocess.Popen[bytes] | None = None
        self.log = Path(os.devnull)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, and return at once. Raises ChatError if something listens there already."""
        with suppress(OSError), socket.create_connection(self._address, timeout=1):
            raise ChatError(f"{self._address} is in use: leave --spawn out, or take another port in --base-url")
        # A dying parent that can stop nobody any more has the kernel send SIGTERM to the child (Linux only).
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        handle, name = tempfile.mkstemp(prefix="miniserve-serve-")
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=handle,
            start_new_session=True,  # the terminal's ctrl+c and hang-up are for us, who end it in order
            preexec_fn=(lambda: prctl(1, signal.SIGTERM)) if prctl else None,  # noqa: PLW1509 -- takes no lock
        )
        os.close(handle)
        self.log = Path(name).rename(Path(name).with_name(f"miniserve-serve-{self._process.pid}.log"))

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to all that it started if that does not help or nobody wants to wait."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def remove_log(self) -> None:
        """Nobody needs the log of a server that ended in order; that of another one is left to be read."""
        if self.exit_code in (0, -signal.SIGTERM):
            self.log.unlink(missing_ok=True)

    def last_lines(self, count: int) -> str:
        """The end of its log, as a terminal would show it: progress bars go back to the start of their line."""
        lines = self.log.read_bytes()[-8192:].decode(errors="replace").split("\n")
        return "\n".join([line.rstrip("\r").rpartition("\r")[2] for line in lines if line.strip()][-count:])

    def obituary(self) -> str:
        """How it ended."""
        return f"the server ended with code {self.exit_code}; its log {self.log} ends with:\n{self.last_lines(12)}"


@dataclass(slots=True)
class Meter:
    """Text, times (in seconds) and counts of one answer. Counts deltas until the server tells the tokens."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    text: str = ""
    num_deltas: int = 0
    usage: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def add(self, event: bytes) -> None:
        """Take in one event of the stream."""
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                raise ChatError(f"the server broke off: {chunk['error']['message']}")
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                self._add_text(choice["delta"].get("content") or "")
                self.notes += ["cut at the length limit"] if choice.get("finish_reason") == "length" else []
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ChatError(f"no chunk of a chat came, but {event[:200]!r}; is this an OpenAI API?") from None

    def _add_text(self, text: str) -> None:
        if text:
            self.text += text
            self.num_deltas += 1
            self.last = time.monotonic()
            self.first = self.first or self.last

    def line(self, width: int) -> str:
        """What is known, for below the answer: everything if two lines of `width` columns hold it, or else the gist."""
        about, tokens = ("", self.usage["completion_tokens"]) if self.usage else ("about ", self.num_deltas)
        parts = [f"{about}{tokens} tokens"]
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


class Answer(Vertical):
    """An answer as it comes, and its numbers."""

    def __init__(self) -> None:
        self.meter = Meter()
        self._markdown = Markdown(open_links=False)
        self._numbers = Static(markup=False, classes="numbers")
        super().__init__(self._markdown, self._numbers)

    async def add(self, events: Sequence[bytes]) -> None:
        """Show what has just come, up to where it went wrong."""
        shown = len(self.meter.text)
        try:
            for event in events:
                self.meter.add(event)
        finally:
            self._show_numbers()
            if news := self.meter.text[shown:]:
                # Shielded: an answer that is stopped here must still show all of its text.
                await asyncio.shield(self._markdown.append(news))

    def note(self, text: str) -> None:
        """Tell how it ended, beside the numbers."""
        self.meter.notes.append(text)
        self._show_numbers()

    def on_resize(self) -> None:
        """The width tells how many numbers there is room for."""
        if self.meter.text or self.meter.notes:
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


class ChatApp(App[None]):
    """One conversation on one screen. At most one piece of work goes on: connecting, or an answer."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send"),
        Binding("escape", "stop", "Stop", priority=True),
        Binding("ctrl+r", "restart", "New conversation", priority=True),
        Binding("ctrl+c", "quit", "Quit", priority=True),
        Binding("pageup", "page(-1)", priority=True, show=False),
        Binding("pagedown", "page(1)", priority=True, show=False),
    ]
    CSS = """
    #title { background: $panel; padding: 0 1; }
    .question, .problem { margin: 1 0; padding: 0 1; border-left: thick $primary; }
    .problem { border-left: thick $error; }
    Answer, TextArea { height: auto; max-height: 100%; }
    Answer { max-height: 999999; }
    .numbers { color: $text-muted; padding: 0 2; }
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
        self._chat.anchor()
        self._work = self.run_worker(self._persist(self._connect))

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
                except UNREACHABLE as error:
                    seconds = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                    problem = f"no answer from {self._base_url}: {str(error) or type(error).__name__}"
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
        except UNREACHABLE:
            if answer.meter.text:  # a second try would repeat it
                raise ChatError("the server broke off the answer; enter asks again") from None
            raise


def split_flags(text: str) -> list[str]:
    """The flags in `text`, taken apart as a shell does."""
    try:
        return shlex.split(text)
    except ValueError:
        message = f"{text[:80]!r} has an open quote, or ends in a backslash; close the quote, or take it out"
        raise argparse.ArgumentTypeError(message) from None


def parse_args(arguments: Sequence[str] | None = None) -> Settings:
    """The flags, checked."""
    parser = argparse.ArgumentParser(prog="tui.py", description="Chat with an OpenAI-compatible server.")
    parser.add_argument("--base-url", help=f"default: {Settings.base_url}")
    parser.add_argument("--model", help="its name on the server; default: the first that the server lists")
    parser.add_argument("--max-tokens", type=int, help="longest answer; default: the server's")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the server's")
    parser.add_argument("--system", help="system message of every conversation")
    parser.add_argument("--api-key", help="default: $MINISERVE_API_KEY")
    parser.add_argument("--spawn", action="store_true", help="start `main.py serve`, and stop it at the end")
    parser.add_argument("--serve-args", type=split_flags, help="flags for it; write --serve-args='...'")
    # Attributes of Settings win over defaults of the parser.
    settings = parser.parse_args(arguments, Settings(api_key=os.environ.get("MINISERVE_API_KEY")))
    if not re.fullmatch(r"https?://([^/:\s]+|\[[\da-fA-F:]+\])(:\d{1,4}|:[1-5]\d{4})?(/\S*)?", settings.base_url):
        parser.error(f"--base-url must be like {Settings.base_url}, got {settings.base_url!r}")
    if settings.temperature is not None and not 0 <= settings.temperature <= 2:
        parser.error(f"--temperature must be in [0, 2], got {settings.temperature}")
    if settings.serve_args and not settings.spawn:
        parser.error("--serve-args are for the server of --spawn; give both")
    if placed := [flag for flag in settings.serve_args if flag.partition("=")[0] in ("--host", "--port", "--uds")]:
        parser.error(f"--serve-args: {placed[0]} is what --base-url says; use that")
    return settings


def end_on_signals(app: ChatApp) -> None:
    """A signal ends the app as ctrl+c does; the program itself where no app runs, or at the second one."""

    def handle(number: int, frame: FrameType | None) -> None:
        loop, app.event_loop = app.event_loop, None
        if loop is None or loop.is_closed():
            raise SystemExit(128 + number)
        loop.call_soon_threadsafe(lambda: app.exit(return_code=128 + number))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


def main(arguments: Sequence[str] | None = None) -> int:
    """Chat until the user leaves; the exit code."""
    settings = parse_args(arguments)
    server = SpawnedServer((*SERVE_COMMAND, *settings.serve_args), settings) if settings.spawn else None
    app = ChatApp(settings, server)
    end_on_signals(app)
    try:
        if server is not None:
            server.start()
        app.run()
        if server is not None and server.exit_code is not None:
            raise ChatError(server.obituary())  # the screen is gone, and with it what it showed
    except ChatError as error:
        print(f"tui.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        if server is not None:
            server.stop()
    if server is not None:
        server.remove_log()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
