"""What lies around the answers: connections, headers, limits, keys, browsers, proxies, unknown addresses."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from tests.contract.calls import CHAT, COMPLETIONS, WAIT_SECONDS, Server, check_error, check_error_object
from tests.contract.conftest import ORIGIN

SOCKET_SECONDS = 30.0


def connect(server: Server) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=SOCKET_SECONDS)


def exchange(server: Server, data: bytes) -> bytes:
    """Send bytes, and read until the server closes."""
    with connect(server) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):  # it may have answered and closed before all was sent
            connection.sendall(data)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
    return received


# Connections


def test_an_idle_connection_is_kept(scripted: Server) -> None:
    """Bug kind: a pooled client that was idle for 6 s got a reset."""
    address = urlsplit(scripted.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=WAIT_SECONDS)
    body = json.dumps({"prompt": "Hi"})
    kept = None
    try:
        for idle_seconds in (6, 0):
            connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200 and response.read()
            assert connection.sock is not None and kept in (None, connection.sock)
            kept = connection.sock
            time.sleep(idle_seconds)
    finally:
        connection.close()


def test_requests_follow_each_other_on_a_connection(scripted: Server) -> None:
    """Pipelined, the answers come in order."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    requests = ""
    for number, closing in ((1, ""), (2, ""), (3, "Connection: close\r\n")):
        body = json.dumps({"prompt": f"number {number}"})
        requests += f"{head}{closing}Content-Length: {len(body)}\r\n\r\n{body}"
    received = exchange(scripted, requests.encode()).decode()
    assert received.count("HTTP/1.1 200") == 3
    assert received.index("number 1") < received.index("number 2") < received.index("number 3")


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"nonsense\r\n\r\n", b"\x00" * 1000]
)
def test_what_is_no_http(scripted: Server, garbage: bytes) -> None:
    received = exchange(scripted, garbage)
    assert received == b"" or received.startswith(b"HTTP/1.1 4")
    assert scripted.http.get("/health").status_code == 200


FIRST_LINES = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "head",
    [
        FIRST_LINES + b"X-Long: " + b"a" * 70_000 + b"\r\n\r\n",
        FIRST_LINES + b"X-Many: a\r\n" * 20_000 + b"\r\n",
        b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 3_000_000,
        FIRST_LINES + b"X-Endless: " + b"a" * 3_000_000,
        FIRST_LINES + b"X-Endless" + b"a" * 3_000_000,
    ],
    ids=["one header", "many headers", "address", "endless address", "endless value", "endless name"],
)
def test_headers_are_bounded(scripted: Server, head: bytes) -> None:
    """Bug kind: a header that never ends was kept in memory as long as it came."""
    fine = scripted.http.get("/health", headers={"X-Long": "a" * 30_000})
    assert fine.status_code == 200
    received = exchange(scripted, head)
    assert scripted.http.get("/health").status_code == 200
    if not received and len(head) > 2**20:
        return  # closed while we were sending: the answer may be lost
    assert received.startswith(b"HTTP/1.1 4"), received[:200]
    lines, _, body = received.partition(b"\r\n\r\n")
    assert b"application/json" in lines.lower()
    check_error_object(json.loads(body)["error"], 400)


def test_a_client_that_sends_half_a_body(scripted: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        with connect(scripted) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head.encode() + b'{"prompt": "')
    assert scripted.complete("Hi").text == "Hi"


# Request ids


@pytest.mark.parametrize("path", ["/health", COMPLETIONS, "/nowhere"])
def test_a_request_id_is_echoed(scripted: Server, path: str) -> None:
    for request_id in ("a", "A-b_c.9", "x" * 128):
        response = scripted.http.post(path, json={"prompt": "Hi"}, headers={"X-Request-Id": request_id})
        assert response.headers.get_list("x-request-id") == [request_id]


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", "a\tb", "ä", "<script>", "a;b", "x" * 20_000])
def test_a_strange_request_id_is_replaced(scripted: Server, request_id: str) -> None:
    headers = {b"X-Request-Id": request_id.encode()}
    given = [scripted.http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert given[0] != given[1] and request_id not in given and all(0 < len(value) <= 128 for value in given)


# Addresses


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("POST", "/v1/nothing"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1"),
        ("GET", "/..%2f..%2fetc/passwd"),
    ],
)
def test_unknown_addresses(scripted: Server, method: str, path: str) -> None:
    response = scripted.http.request(method, path)
    assert response.status_code == 404 and "detail" not in response.json()
    check_error(response, 404, response.json()["error"]["code"])


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("PUT", COMPLETIONS), ("POST", "/health"), ("DELETE", "/v1/models")]
)
def test_wrong_methods(scripted: Server, method: str, path: str) -> None:
    response = scripted.http.request(method, path)
    assert response.headers["allow"]
    check_error(response, 405, response.json()["error"]["code"])


# Keys


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer third", "Bearer firs", "Bearer firstt", "Basic first", "first"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models", "/v1/models/org/model", "/tokenize", "/detokenize"])
def test_without_a_key(guarded: Server, header: str | None, path: str) -> None:
    """Refused before the body is looked at."""
    headers = {} if header is None else {"Authorization": header}
    method = "GET" if "models" in path else "POST"
    response = httpx.request(method, guarded.url + path, headers=headers, timeout=WAIT_SECONDS)
    message = check_error(response, 401, "invalid_api_key")
    assert "Bearer" in response.headers["www-authenticate"]
    assert "second" not in message and "third" not in message


def test_a_key_that_is_not_ascii(guarded: Server) -> None:
    response = httpx.get(guarded.url + "/v1/models", headers={b"Authorization": "Bearer schlüssel".encode()})
    check_error(response, 401, "invalid_api_key")


@pytest.mark.parametrize("key", ["first", "second"])
def test_with_a_key(guarded: Server, key: str) -> None:
    with OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
        assert client.completions.create(model="alias", prompt="Hi").choices[0].text == "Hi"
    with OpenAI(base_url=f"{guarded.url}/v1", api_key=key + "x", max_retries=0) as client:
        with pytest.raises(AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/stats", "/version", "/openapi.json", "/docs"])
def test_what_stays_open(guarded: Server, path: str) -> None:
    assert httpx.get(guarded.url + path, timeout=WAIT_SECONDS).status_code == 200


# Browsers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models"])
def test_a_preflight_needs_no_key(guarded: Server, path: str) -> None:
    """Bug kind: 401 for OPTIONS, so that no browser could call."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    response = httpx.options(guarded.url + path, headers={"Origin": ORIGIN, **asked})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    response = httpx.options(guarded.url + path, headers={"Origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in response.headers


def test_answers_to_a_browser(guarded: Server, scripted: Server) -> None:
    """Errors too: else a page cannot read them."""
    answer = guarded.http.post(COMPLETIONS, json={"prompt": "Hi"}, headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    error = httpx.post(guarded.url + COMPLETIONS, json={"prompt": "Hi"}, headers={"Origin": ORIGIN})
    assert error.status_code == 401 and error.headers["access-control-allow-origin"] == ORIGIN
    error = guarded.http.post(COMPLETIONS, json={"prompt": "<<raise 0>>"}, headers={"Origin": ORIGIN})
    assert error.status_code == 500 and error.headers["access-control-allow-origin"] == ORIGIN
    other = scripted.http.post(COMPLETIONS, json={"prompt": "Hi"}, headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in other.headers


# Proxies and names


def test_root_path(guarded: Server) -> None:
    """The proxy strips it; the document and its page must have it."""
    assert guarded.http.get("/v1/models").status_code == 200
    assert {"url": "/proxy"} in guarded.http.get("/openapi.json").json()["servers"]
    assert "/proxy/openapi.json" in guarded.http.get("/docs").text


def test_served_names(guarded: Server) -> None:
    assert [card["id"] for card in guarded.http.get("/v1/models").json()["data"]] == ["org/model", "alias"]
    for name in ("org/model", "alias"):
        assert guarded.http.get(f"/v1/models/{name}").json()["id"] == name
        assert guarded.openai.models.retrieve(name).id == name
        assert guarded.complete("Hi", model=name).model == name
        assert guarded.complete_stream("Hi", model=name).model == name
    assert guarded.complete("Hi").model == "org/model"
    for name in ("org", "model", "scripted", "org/model/", "org//model"):
        check_error(guarded.http.get(f"/v1/models/{name}"), 404, "model_not_found")
        check_error(guarded.post(COMPLETIONS, prompt="Hi", model=name), 404, "model_not_found", "model")


# Large bodies


def test_a_body_that_is_too_large(guarded: Server) -> None:
    """With its length declared and without; the connection's next request is not what is left of it."""
    for size in (2049, 100_000, 5_000_000):
        body = json.dumps({"prompt": "Hi", "user": "x" * size}).encode()
        headers = {"Content-Type": "application/json"}
        for content in (body, (body[at : at + 50_000] for at in range(0, len(body), 50_000))):
            check_error(guarded.http.post(COMPLETIONS, content=content, headers=headers), 413, "request_too_large")
        assert guarded.complete("Hi").text == "Hi"
    fits = json.dumps({"prompt": "Hi", "user": "x" * 1900})
    assert guarded.post_raw(COMPLETIONS, fits).status_code == 200


def test_a_body_that_is_too_large_by_default(scripted: Server) -> None:
    body = b'{"prompt": "Hi", "user": "' + b"x" * (33 * 2**20) + b'"}'
    check_error(scripted.post_raw(COMPLETIONS, body), 413, "request_too_large")
    assert scripted.complete("Hi").text == "Hi"
