"""What the deployment's files are checked against: a scripted server, its metrics and its log."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.process import ServerProcess

SCRIPTED = ("-m", "tests.contract.scripted_server")


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-model-len", "4096", command=SCRIPTED) as process:
        yield process


@pytest.fixture(scope="session")
def exposed(server: ServerProcess) -> dict[str, set[str]]:
    """The labels of each metric that /metrics shows after a first request."""
    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/completions", json={"prompt": "Hi"}).raise_for_status()
        text = http.get("/metrics").text
    labels: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    return labels


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _installed("prometheus")


@pytest.fixture(scope="session")
def promtool() -> str:
    return _installed("promtool")


def _installed(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return program
