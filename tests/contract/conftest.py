"""The servers that tests share: a real model, and one that its prompts direct; of the latter also one with a template
that knows tools and reasoning, and one with every guard on.

Each must end with exit code 0 on SIGTERM: at once, not after the grace period, whatever the tests did to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chat_templates import THINKING_WITH_TOOLS
from tests.contract.calls import Server
from tests.contract.process import ServerProcess

SCRIPTED = ("-m", "tests.contract.scripted_server")
# In fp32 an answer does not depend on what else is in its batch.
REAL_FLAGS = ("--model", "smollm2", "--dtype", "fp32", "--threads", "2", "--max-model-len", "1024", "--no-access-log")
SCRIPTED_FLAGS = ("--max-model-len", "4096", "--max-num-batched-tokens", "2048", "--no-access-log")


ORIGIN = "https://app.example"
GUARDED_FLAGS = (
    *("--api-key", "first", "--api-key", "second", "--allowed-origins", ORIGIN, "--root-path", "/proxy"),
    *("--served-model-name", "org/model", "--served-model-name", "alias", "--max-body-bytes", "2048"),
    *("--max-num-seqs", "2", "--max-queued-requests", "2", "--num-kv-blocks", "50"),
)
STOP_SECONDS = 25  # less than the grace period of 30 s


def check_end(server: Server) -> None:
    """With its clients' connections still open."""
    assert server.process.stop(STOP_SECONDS) == 0, server.process.log[-20:]


@pytest.fixture(scope="session")
def real() -> Iterator[Server]:
    with ServerProcess(*REAL_FLAGS) as process, Server(process, "smollm2") as server:
        yield server
        check_end(server)


@pytest.fixture(scope="session")
def scripted() -> Iterator[Server]:
    with ServerProcess(*SCRIPTED_FLAGS, command=SCRIPTED) as process, Server(process, "scripted") as server:
        yield server
        check_end(server)


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(THINKING_WITH_TOOLS)
    flags = (*SCRIPTED_FLAGS, "--chat-template", str(template), "--scheduling-policy", "priority")
    with ServerProcess(*flags, command=SCRIPTED) as process, Server(process, "scripted") as server:
        yield server
        check_end(server)


@pytest.fixture(scope="session")
def guarded() -> Iterator[Server]:
    with ServerProcess(*GUARDED_FLAGS, command=SCRIPTED) as process, Server(process, "org/model", "first") as server:
        server.http.headers["Authorization"] = "Bearer first"
        yield server
        check_end(server)


@pytest.fixture(params=["scripted", "real"])
def server(request: pytest.FixtureRequest) -> Server:
    """Either, for what holds for both."""
    chosen: Server = request.getfixturevalue(request.param)
    return chosen
