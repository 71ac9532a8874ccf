from __future__ import annotations

from collections.abc import Iterator

import pytest

from miniserve.config import ServerConfig
from tests.api.driver import CHAT, COMPLETIONS, HELLO, Api

KEYED = (
    ("POST", CHAT, HELLO),
    ("POST", COMPLETIONS, {"prompt": "a"}),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/alias", None),
)
OPEN = ("/health", "/stats", "/metrics", "/version", "/docs", "/openapi.json")


@pytest.fixture
def keyed() -> Iterator[Api]:
    config = ServerConfig(api_key=("secret-1", "secret-é"), allowed_origins=("http://page.example",))
    with Api(config=config) as running:
        yield running


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Bearer secret-", "Bearer secret-11", "Basic secret-1", "secret-1"],
)
def test_without_the_key_nothing_is_served(keyed: Api, header: str) -> None:
    for method, path, body in KEYED:
        answer = keyed.call(method, path, body, headers=[("authorization", header)])
        assert answer.brief() == (401, "authentication_error", "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_the_key_is_asked_for_before_the_body_is_read(keyed: Api) -> None:
    exchange = keyed.exchange("POST", COMPLETIONS, parts=[b"x" * 1000])

    async def scenario() -> int:
        return (await exchange.start().finish()).status

    assert keyed.run(scenario()) == 401 and exchange.received == 0


@pytest.mark.parametrize("key", ["secret-1", "secret-é".encode().decode("latin-1")])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens(keyed: Api, scheme: str, key: str) -> None:
    for method, path, body in KEYED:
        assert keyed.call(method, path, body, headers=[("authorization", f"{scheme} {key}")]).status == 200


def test_the_rest_stays_open(keyed: Api) -> None:
    for path in OPEN:
        assert keyed.call("GET", path).status == 200


def test_a_key_that_nobody_asked_for_is_ignored(api: Api) -> None:
    assert api.post(CHAT, HELLO, headers=[("authorization", "Bearer sk-anything")]).status == 200


def test_a_browser_asks_first_without_the_key(keyed: Api) -> None:
    """The preflight, which has no key by design, was answered with 401."""
    asks = [("origin", "http://page.example"), ("access-control-request-method", "POST")]
    headers = [*asks, ("access-control-request-headers", "authorization,content-type,x-stainless-os")]
    answer = keyed.call("OPTIONS", CHAT, headers=headers)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://page.example"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]


def test_another_origin_gets_no_permission(keyed: Api) -> None:
    asks = [("origin", "http://evil.example"), ("access-control-request-method", "POST")]
    assert "access-control-allow-origin" not in keyed.call("OPTIONS", CHAT, headers=asks).headers


def test_errors_can_be_read_by_the_page_too(keyed: Api) -> None:
    answer = keyed.post(CHAT, HELLO, headers=[("origin", "http://page.example")])
    assert answer.status == 401 and answer.headers["access-control-allow-origin"] == "http://page.example"


def test_without_origins_there_is_no_cors(api: Api) -> None:
    asks = [("origin", "http://page.example"), ("access-control-request-method", "POST")]
    answer = api.call("OPTIONS", CHAT, headers=asks)
    assert answer.status == 405 and "access-control-allow-origin" not in answer.headers
