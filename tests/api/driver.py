"""Drives the application in-process, as a server would: whole answers, streams as they come, clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from miniserve.api.app import create_app
from miniserve.config import ServerConfig
from miniserve.text.chat_template import ChatTemplate
from tests.engine.scripted import TOKENIZER, Script, make_async_engine, make_input_processor

T = TypeVar("T")
MODEL = "org/scripted"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
WAIT_SECONDS = 20.0


@dataclass(slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; nothing else is in the body."""
        parsed = self.json()
        assert list(parsed) == ["error"] and set(parsed["error"]) == {"message", "type", "param", "code"}
        assert len(self.body) < 4096
        error: dict[str, Any] = parsed["error"]
        return error

    def brief(self) -> tuple[int, str, str | None]:
        """Status, type and code of an error."""
        return self.status, self.error["type"], self.error["code"]

    def events(self) -> list[Any]:
        """The objects of a stream that ended as it should."""
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    blocks = body.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], "the stream ends with [DONE], once"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


@dataclass(slots=True)
class Exchange:
    """One HTTP call that is under way."""

    app: Any
    scope: dict[str, Any]
    parts: list[bytes]
    messages: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    received: int = 0  # parts of the body that the application has asked for
    held: asyncio.Event | None = None  # `send` waits for it: a client that does not read
    task: asyncio.Task[None] | None = None

    def start(self) -> Self:
        self.task = asyncio.get_running_loop().create_task(self.app(self.scope, self._receive, self._send))
        return self

    async def _receive(self) -> dict[str, Any]:
        if self.received < len(self.parts):
            part = self.parts[self.received]
            self.received += 1
            return {"type": "http.request", "body": part, "more_body": self.received < len(self.parts)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.held is not None:
            waits = [asyncio.ensure_future(event.wait()) for event in (self.held, self.gone)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self.messages.append(message)
        self.changed.set()

    async def until(self, condition: Callable[[Exchange], bool]) -> None:
        """Wait until what came satisfies `condition`."""
        while not condition(self):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), WAIT_SECONDS)

    async def finish(self) -> Answer:
        """Wait for the end of the call."""
        assert self.task is not None
        await asyncio.wait_for(self.task, WAIT_SECONDS)
        return self.answer()

    def disconnect(self) -> None:
        self.gone.set()

    @property
    def started(self) -> bool:
        return bool(self.messages)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    def answer(self) -> Answer:
        start = self.messages[0]
        assert start["type"] == "http.response.start"
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, self.body)


class Api:
    """An application over a scripted engine, and the loop that runs it."""

    def __init__(
        self,
        script: Script = MappingProxyType({}),
        *,
        config: ServerConfig | None = None,
        model_names: tuple[str, ...] = (MODEL, "alias"),
        start: bool = True,
        template: str | None = None,
        **engine: Any,
    ) -> None:
        engine.setdefault("max_model_len", 256)
        engine.setdefault("num_blocks", 257)
        self.engine, self.model = make_async_engine(script, **engine)
        self._template = template
        self.app = create_app(self.engine, config or ServerConfig(api_key=()), model_names)
        self._start = start
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._lifespan = self.app.router.lifespan_context(self.app)
        if self._start:
            self.run(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.model.gate.set()
        if self._start:
            self.run(self._lifespan.__aexit__(None, None, None))
        self._runner.close()

    async def _begin(self) -> None:
        await self._lifespan.__aenter__()
        await self.engine.wait_ready()
        if self._template is not None:
            self._use(self._template)

    def _use(self, template: str) -> None:
        """Render conversations by it, from now on."""
        parts = self.engine.parts
        processor = make_input_processor(
            max_model_len=parts.resolved.max_model_len,
            kv_capacity_tokens=parts.engine.scheduler.kv.capacity_tokens,
            chat_template=ChatTemplate(template, TOKENIZER.special_tokens),
        )
        object.__setattr__(parts, "input_processor", processor)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def exchange(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        parts: Sequence[bytes] | None = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> Exchange:
        """A call, not started. `body` is sent as JSON; `parts` as they are."""
        sent = dict(headers)
        if parts is None:
            parts = [b"" if body is None else json.dumps(body).encode()]
        if method == "POST":
            sent.setdefault("content-type", "application/json")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 9),
            "root_path": "",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items() if value],
        }
        return Exchange(self.app, scope, list(parts))

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        async def whole() -> Answer:
            return await self.exchange(method, path, body, **options).start().finish()

        return self.run(whole())

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.call("POST", path, body, **options)

    def chat(self, **fields: Any) -> Answer:
        return self.post(CHAT, HELLO | fields)

    def complete(self, prompt: Any = "abc", **fields: Any) -> Answer:
        return self.post(COMPLETIONS, {"prompt": prompt} | fields)

    def metric(self, line: str) -> float:
        """A sample of /metrics; 0 where it is not there."""
        text = self.call("GET", "/metrics").body.decode()
        values = [float(sample.rpartition(" ")[2]) for sample in text.splitlines() if sample.startswith(line + " ")]
        return values[0] if values else 0.0

    async def idle(self) -> None:
        """Wait until the engine has nothing left."""
        for _ in range(2000):
            stats = self.engine.stats.snapshot()
            if stats["running"] == stats["waiting"] == stats["kv_blocks_used"] == 0:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"the engine still has work: {stats}")
