"""An application over an engine that says "Hello world"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.driver import Api
from tests.engine.scripted import EOS, tokens


@pytest.fixture
def api() -> Iterator[Api]:
    with Api(lambda _: [*tokens("Hello world"), EOS]) as running:
        yield running
