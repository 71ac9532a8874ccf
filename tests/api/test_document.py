from __future__ import annotations

from pathlib import Path
from typing import Any

from miniserve.api import document
from tests.api.driver import Api

PAGE = Path(__file__).parents[2] / "docs" / "API.md"


def test_the_committed_page_is_current() -> None:
    """If this fails: python -m miniserve.api.document > docs/API.md"""
    assert PAGE.read_text() == document.render() + "\n"


def test_the_page_has_every_field_with_its_bounds() -> None:
    page = document.render()
    for line in (
        "| `temperature` | number in [0, 2] |",
        "| `n` | integer in [1, 128] |",
        "| `top_p` | number in (0, 1] |",
        "| `seed` | integer in [-2^63, 2^63 - 1] |",
        "| `functions` | `[]` |",
        "| `tools` | list of object (0 to 128) |",
        "| `reasoning_effort` | ",
        "| `POST /v1/chat/completions` |",
        "| queue full (`--max-queued-requests`) | 429 | `rate_limit_error` | `queue_full` |",
    ):
        assert line in page


def test_the_openapi_document_describes_bodies_answers_and_errors(api: Api) -> None:
    openapi = api.call("GET", "/openapi.json").json()
    schemas = openapi["components"]["schemas"]
    for path, operations in openapi["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            for reference in _references(operation):
                assert reference in schemas
    assert all(reference in schemas for reference in _references(schemas))
    chat = openapi["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} == chat["responses"].keys()
    assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert chat["requestBody"]["required"]
    properties = schemas["ChatCompletionRequest"]["properties"]
    assert properties["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    assert properties["functions"]["enum"] == [None, []]


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"].removeprefix("#/components/schemas/")] if isinstance(value.get("$ref"), str) else []
        return own + [name for item in value.values() for name in _references(item)]
    if isinstance(value, list):
        return [name for item in value for name in _references(item)]
    return []
