from __future__ import annotations

import re

import pytest

from tests.api.driver import COMPLETIONS, MODEL, Api


@pytest.mark.parametrize("request_id", ["a", "A-z_0.9", "x" * 128])
def test_the_clients_request_id_comes_back(api: Api, request_id: str) -> None:
    for answer in (
        api.post(COMPLETIONS, {"prompt": "a"}, headers=[("x-request-id", request_id)]),
        api.post(COMPLETIONS, {"prompt": "a", "stream": True}, headers=[("x-request-id", request_id)]),
        api.call("GET", "/nope", headers=[("x-request-id", request_id)]),
    ):
        assert answer.headers["x-request-id"] == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", "é", "a\tb", "<script>", "a\n"])
def test_another_request_id_is_replaced(api: Api, request_id: str) -> None:
    ids = {api.call("GET", "/version", headers=[("x-request-id", request_id)]).headers["x-request-id"] for _ in "ab"}
    assert len(ids) == 2 and request_id not in ids and all(len(new) == 32 for new in ids)


def test_requests_are_counted_by_route_and_status(api: Api) -> None:
    def count(method: str, route: str, status: int) -> float:
        labels = f'method="{method}",model_name="{MODEL}",route="{route}",status="{status}"'
        return api.metric(f"miniserve_http_requests_total{{{labels}}}")

    for _ in range(3):
        api.complete()
    api.complete(stream=True)
    api.complete("")
    api.call("GET", "/v1/models/alias")
    api.call("GET", "/v1/models/org/other")
    for path in ("/a", "/b", "/wp-admin.php"):
        api.call("GET", path)
    api.call("DELETE", COMPLETIONS)
    api.call("BREW", "/health")
    assert count("POST", COMPLETIONS, 200) == 4
    assert count("POST", COMPLETIONS, 400) == 1
    assert count("GET", "/v1/models/{model_id:path}", 200) == 1
    assert count("GET", "/v1/models/{model_id:path}", 404) == 1
    # However many addresses and methods somebody tries, the number of time series is bounded.
    assert count("GET", "unmatched", 404) == 3
    assert count("DELETE", COMPLETIONS, 405) == 1
    assert count("other", "/health", 405) == 1


def test_the_request_id_is_in_the_answers_id(api: Api) -> None:
    """Bug: the id in the log could not be found by the request id that a client or a proxy knows."""
    sent = [api.post(COMPLETIONS, {"prompt": "a"}, headers=[("x-request-id", "trace-1")]).json()["id"] for _ in "ab"]
    assert len(set(sent)) == 2 and all(call_id.startswith("cmpl-trace-1-") for call_id in sent)
    answer = api.chat()
    assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"


def test_head_is_get_for_probes(api: Api) -> None:
    for path in ("/health", "/v1/models"):
        assert api.call("HEAD", path).status == 200
    assert api.call("HEAD", "/nope").status == 404


def test_the_page_of_the_api_needs_no_other_host(api: Api) -> None:
    page = api.call("GET", "/docs")
    assert page.status == 200 and b"https://" not in page.body and b"http://" not in page.body
    [script] = re.findall(rb'src="([^"]+)"', page.body)
    assert api.call("GET", script.decode()).status == 200
