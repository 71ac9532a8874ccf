"""Servers that the demos talk to; their model is a script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.process import ServerProcess

SCRIPTED = ("-m", "tests.contract.scripted_server")


@pytest.fixture(scope="session")
def servers() -> Iterator[tuple[str, str]]:
    """The URLs, without /v1, of a roomy server and of one whose KV pool is soon full. Both start at the same time."""
    roomy = ServerProcess("--max-model-len", "4096", "--no-access-log", command=SCRIPTED)
    tiny = ServerProcess("--num-kv-blocks", "16", "--no-access-log", command=SCRIPTED)
    try:
        with roomy, tiny:
            yield roomy.url, tiny.url
    finally:  # where the first did not start, the second was not entered
        tiny.stop()


@pytest.fixture(scope="session")
def server(servers: tuple[str, str]) -> str:
    """The roomy one."""
    return servers[0]


@pytest.fixture(scope="session")
def tiny_server(servers: tuple[str, str]) -> str:
    """The one that preempts."""
    return servers[1]
