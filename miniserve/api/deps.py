"""What the routes depend on: the engine, the API key, the body in a worker thread.

All of it hangs on `app.state`, set by `create_app`; there are no globals.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends
from starlette.requests import Request

from miniserve.api.body import read_body
from miniserve.config import ServerConfig
from miniserve.engine.async_engine import AsyncEngine
from miniserve.errors import AuthenticationError, ModelNotFoundError
from miniserve.platform import give_back_memory

T = TypeVar("T")

# Tokenising holds the interpreter only in part; more threads than this would take it from the engine.
_NUM_WORKERS = 4
_LARGE_BODY_BYTES = 2**18  # to process one takes up to a few hundred times as much, of which the allocator keeps most


@dataclass(frozen=True, slots=True)
class Server:
    """What is the same for all calls.

    Attributes:
        model_names: the first is the model's name, the others are aliases.
        key_digests: SHA-256 of each API key; none: everybody may call.
        started: when the server started, in seconds since the epoch.
        workers: threads for work that would hold up the event loop.
    """

    engine: AsyncEngine
    config: ServerConfig
    model_names: tuple[str, ...]
    key_digests: tuple[bytes, ...]
    started: int
    workers: ThreadPoolExecutor

    @classmethod
    def create(cls, engine: AsyncEngine, config: ServerConfig, model_names: tuple[str, ...], started: int) -> Server:
        """The server's state, with its worker threads (which start with the first call)."""
        digests = tuple(hashlib.sha256(key.encode()).digest() for key in config.api_key)
        workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="miniserve-input")
        return cls(engine, config, model_names, digests, started, workers)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with.

        Raises:
            ModelNotFoundError: it is not served here.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            names = ", ".join(self.model_names)
            raise ModelNotFoundError(f"the model {asked[:100]!r} is not served here; there is {names}", param="model")
        return asked

    async def process_body(self, request: Request, process: Callable[[bytes], T]) -> T:
        """Read the body and `process` it in a worker thread."""
        body = await read_body(request, self.config.max_body_bytes)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.workers, process, body)
        finally:
            if len(body) > _LARGE_BODY_BYTES:
                del body
                with suppress(RuntimeError):  # at the end the workers are gone, and so is the memory soon
                    loop.run_in_executor(self.workers, give_back_memory)


async def get_server(request: Request) -> Server:
    """The server's state."""
    server: Server = request.app.state.server
    return server


async def get_engine(request: Request) -> AsyncEngine:
    """The engine, in whatever state it is."""
    engine: AsyncEngine = request.app.state.engine
    return engine


async def require_key(request: Request) -> None:
    """Let pass who sends one of the API keys, or everybody where there are none.

    Raises:
        AuthenticationError: no key, or a wrong one.
    """
    server: Server = request.app.state.server
    if not server.key_digests:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    digest = hashlib.sha256(key.strip().encode("latin-1")).digest()  # headers are decoded as latin-1
    # Every key is compared in constant time, and none is left out: how long it takes says nothing.
    matches = [hmac.compare_digest(digest, known) for known in server.key_digests]
    if scheme.lower() != "bearer" or not any(matches):
        cause = "this API key is not known" if key else "an API key is required"
        raise AuthenticationError(f"{cause}; send the header 'Authorization: Bearer <key>'")


ServerDep = Annotated[Server, Depends(get_server)]
EngineDep = Annotated[AsyncEngine, Depends(get_engine)]
