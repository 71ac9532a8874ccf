"""/openapi.json is true: whatever it allows or forbids, no answer is a 5xx, and each is as it says."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance, unsupported_method

from tests.contract.calls import WAIT_SECONDS, Server

MAX_EXAMPLES = 25
EXCLUDED = [positive_data_acceptance, negative_data_rejection, unsupported_method]


@pytest.fixture(scope="module")
def api_schema(scripted: Server) -> Any:
    return schemathesis.openapi.from_url(scripted.url + "/openapi.json")


POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{model_id}", "/health", "/stats", "/metrics", "/version")
OPERATIONS = [
    *(("POST", path, mode) for path in POSTS for mode in GenerationMode),
    *(("GET", path, GenerationMode.POSITIVE) for path in GETS),  # hardly anything in them can be wrong
]


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS, ids=str)
def test_the_document_is_true(api_schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    """Limits such as the vocabulary are in no schema, and what it forbids may be harmless: a 4xx or 200 passes."""

    @settings(
        max_examples=MAX_EXAMPLES if method == "POST" else 5,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(api_schema[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(excluded_checks=EXCLUDED, timeout=WAIT_SECONDS)

    check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", ["Hi", "<<raise 0>>", "<<say abc>><<raise 2>>", "x" * 5000])
def test_answers_are_as_the_document_says(api_schema: Any, stream: bool, content: str) -> None:
    """What chance seldom finds: streams, with an error in them, and faults of ours."""
    common = {"stream": stream, "n": 2, "max_tokens": 5}
    bodies = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": content}],
            "logprobs": True,
            "top_logprobs": 1,
        },
        "/v1/completions": {"prompt": content, "logprobs": 1, "echo": True},
    }
    for path, body in bodies.items():
        case = api_schema[path]["POST"].Case(body={**common, **body}, media_type="application/json")
        response = case.call(timeout=WAIT_SECONDS)
        case.validate_response(response, excluded_checks=[*EXCLUDED, not_a_server_error])
        assert response.status_code in (200, 400, 500)


def test_the_document_has_every_endpoint(scripted: Server) -> None:
    document = scripted.http.get("/openapi.json").json()
    operations = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert {
        *(("post", path) for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")),
        *(("get", path) for path in ("/v1/models", "/health", "/stats", "/metrics", "/version")),
    } <= operations
    assert any(method == "get" and path.startswith("/v1/models/{") for method, path in operations)
