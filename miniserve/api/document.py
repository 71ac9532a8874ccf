"""Writes docs/API.md from the routes, the schemas and the tables of fields: `python -m miniserve.api.document`.

What is written there is what the code does; a test says that the committed file is current.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel

from miniserve import errors
from miniserve.api.app import ROUTERS
from miniserve.api.openapi import REQUESTS
from miniserve.api.schemas.chat import ChatCompletionRequest
from miniserve.api.schemas.common import SamplingFields
from miniserve.api.schemas.completions import CompletionRequest
from miniserve.api.schemas.fields import IGNORED, Refused, harmless_text
from miniserve.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest

_INTRO = """\
# The HTTP API

OpenAI's API for text. This page is generated from the code: `python -m miniserve.api.document > docs/API.md`. The
running server has the same as `/openapi.json`, and as `/docs` to try it in a browser.

- A field that is null is as good as absent. Numbers must be numbers and integers integers: `"0.5"` and `true` are
  refused.
- A field that would change the answer and is not implemented is refused by name, with 400 `unsupported_parameter`.
- A body is JSON of at most `--max-body-bytes` (default 32 MiB), sent as `Content-Type: application/json`.
- With `--api-key`, `/v1/*`, `/tokenize` and `/detokenize` want `Authorization: Bearer <key>`; the rest stays open.
- Every answer to what is HTTP at all has an `X-Request-Id`: the client's, if it has 1 to 128 characters of
  `A-Za-z0-9._-`, else a new one. The `id` of a completion, and the log line of its end, contain it.
- A token that is not whole UTF-8 is spelled `\\xf0\\x9f` in chat logprobs and in `/tokenize`, and `bytes:\\xf0\\x9f` in
  the logprobs of completions. Logprobs are of the model's own distribution, before penalties and temperature, and
  have an entry for each counted token, the end token included.
- `--allowed-origins` lets browsers in (CORS).
"""

_ANSWERS = """\
## Reasoning, tool calls, structured answers

How a model reasons and calls is found in its chat template, and said at start; there is nothing to switch on.

- **Reasoning**, the text between the model's tags, is `message.reasoning_content` and, the same, `message.reasoning`; a
  message of the history may have it under either name. Both are absent where there is none. Stop strings and grammars
  do not apply to it. `usage.completion_tokens_details.reasoning_tokens` counts it, its tags included. Where the length
  limit cuts an answer off, what may be the beginning of a tag is not shown: a `<` that is there by chance neither.
- **Tool calls** are `message.tool_calls`; `content` is null where there is no text beside them. `finish_reason` is
  `tool_calls` only where the arguments of all are whole: it is `length` or `stop` where the answer, or a call in it,
  broke off. What a model writes is a call only if it can be read as one: all else stays text. With `tool_choice`
  required or a function, only calls that are valid against the schema can be written; so it is with auto for tools that
  are `strict`.
- **Structured answers** can only be what was asked for, but for the end where `max_tokens` cuts them off. A schema that
  cannot be compiled, or has a keyword that cannot be kept, is a 400. `strict` in a `json_schema` changes nothing.
- **Ids**: with `return_token_ids`, chat answers have `prompt_token_ids` (in a stream, the first chunk has them) and
  `token_ids` in each choice; completions have both in each choice. The chunks of a stream share the ids out.
- **Prompt logprobs** stand where the ids of the prompt stand: null for the first token, then an object for each that
  maps token ids to `logprob`, `rank` (1 is the most probable) and `decoded_token`.
"""

_STREAMS = """\
## Streams

With `"stream": true` the answer is `text/event-stream`: lines `data: {...}`, the last one `data: [DONE]`. All chunks
have the same `id`, `created` and `model`. A chat choice begins with a chunk that has the role; every choice ends with
one chunk that has nothing but its `finish_reason`. The joined text, logprobs and usage are those of the plain answer.
Reasoning comes first, as `delta.reasoning_content` and `delta.reasoning`. A tool call begins with a chunk that has its
index, id and name; others with the same index have more and more of the arguments.

An error before the first token is an ordinary HTTP error, unless the first token takes longer than a second: then the
headers go out before it, so that clients and proxies see a live stream. A later one is `data: {"error": {...}}`
before `[DONE]`.
A client that closes the connection, of a stream or of a plain request, ends the request within one step. So does one
that only closes its sending side (`SHUT_WR`, `nc -N`): on the wire it is the same.
A client may read slowly: it holds up nobody, and what it has not taken comes in fewer, larger chunks. Who takes
nothing for `--timeout-unread` seconds counts as gone (over TCP, on Linux).
While the server shuts down, every answer carries `Connection: close`, where its headers are not out yet.
"""

_ERROR_CASES: tuple[tuple[str, type[errors.MiniserveError]], ...] = (
    ("malformed body, bad value", errors.InvalidParameterError),
    ("field not implemented", errors.UnsupportedParameterError),
    ("prompt, or prompt and max_tokens, over the context", errors.ContextLengthError),
    ("no API key, or a wrong one", errors.AuthenticationError),
    ("unknown model", errors.ModelNotFoundError),
    ("body too large", errors.RequestTooLargeError),
    ("queue full (`--max-queued-requests`)", errors.QueueFullError),
    ("our fault; the message has the request id", errors.InternalError),
    ("engine loading, shutting down, dead, or stuck in a step", errors.EngineUnavailableError),
)
_TITLES: dict[type[BaseModel], str] = {
    ChatCompletionRequest: "POST /v1/chat/completions",
    CompletionRequest: "POST /v1/completions",
    TokenizeRequest: "POST /tokenize",
    DetokenizeRequest: "POST /detokenize",
}


def render() -> str:
    """The whole page."""
    parts = [_INTRO, "\n".join(_endpoints()), "\n".join(_common_fields())]
    parts += ["\n".join(_request(model, title)) for model, title in _TITLES.items()]
    parts += [_ANSWERS, _STREAMS, "\n".join(_ignored()), "\n".join(_errors())]
    return "\n".join(parts)


def _endpoints() -> Iterator[str]:
    yield "## Endpoints\n"
    yield from _table(
        ("endpoint", "what"),
        (
            (f"`{method} {route.path.replace(':path', '')}`", str(route.summary))
            for module in ROUTERS
            for route in module.router.routes
            if isinstance(route, APIRoute)
            for method in sorted(route.methods or ())
        ),
    )
    yield from _table_rows((("`GET /docs`, `GET /openapi.json`", "This API as a page and as a document"),))
    yield ""


def _common_fields() -> Iterator[str]:
    yield "## Fields of both kinds of completion\n"
    yield from _fields(SamplingFields, without=frozenset())
    yield ""


def _request(model: type[BaseModel], title: str) -> Iterator[str]:
    yield f"## {title}\n"
    inherits = issubclass(model, SamplingFields)
    if inherits:
        yield "Beside the fields above:\n"
    yield from _fields(model, without=frozenset(SamplingFields.model_fields) if inherits else frozenset())
    yield ""
    if refused := REQUESTS[model]:
        yield "Refused, unless null or:\n"
        yield from _table(("field", "harmless values"), (_refused_row(rule) for rule in refused))
        yield ""


def _refused_row(rule: Refused) -> tuple[str, str]:
    return f"`{rule.name}`", ", ".join(f"`{harmless_text(value)}`" for value in rule.harmless)


def _fields(model: type[BaseModel], *, without: frozenset[str]) -> Iterator[str]:
    schema = model.model_json_schema()
    required = schema.get("required", ())
    yield from _table(
        ("field", "type", "what"),
        (
            (f"`{name}`" + (", required" if name in required else ""), _type(field), field.get("description", ""))
            for name, field in schema["properties"].items()
            if name not in without
        ),
    )


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in schema:
        kinds = (_type(option) for option in schema["anyOf"] if option.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}" + _length(schema, "Items")
    if kind == "string":
        return kind + _length(schema, "Length")
    return kind + _interval(schema)


def _length(schema: Mapping[str, Any], what: str) -> str:
    low, high = schema.get(f"min{what}"), schema.get(f"max{what}")
    if high is not None:
        return f" ({low or 0} to {high})"
    return f" (at least {low})" if low else ""


def _interval(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    open_low = schema.get("exclusiveMinimum")
    if high is not None:
        return (
            f" in ({_number(open_low)}, {_number(high)}]" if low is None else f" in [{_number(low)}, {_number(high)}]"
        )
    return "" if low is None else f" of at least {_number(low)}"


def _number(value: float | None) -> str:
    """Bounds of machine integers are easier to read as powers."""
    if value is None:
        return "-inf"
    powers: dict[float, str] = {2**31 - 1: "2^31 - 1", -(2**31): "-2^31", 2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
    return powers.get(value, f"{value:g}")


def _ignored() -> Iterator[str]:
    yield "## Ignored fields\n"
    yield ", ".join(f"`{name}`" for name in IGNORED) + ", and all that nobody knows."
    yield ""


def _errors() -> Iterator[str]:
    yield "## Errors\n"
    yield '`{"error": {"message", "type", "param", "code"}}`; `param` is the field at fault.\n'
    yield from _table(
        ("case", "status", "type", "code"),
        ((case, str(error.status), f"`{error.type}`", f"`{error.code}`") for case, error in _ERROR_CASES),
    )
    yield from _table_rows(
        (
            ("unknown URL", "404", "`invalid_request_error`", "`unknown_url`"),
            (
                "method that the URL does not take (one that nobody knows: 400)",
                "405",
                "`invalid_request_error`",
                "`method_not_supported`",
            ),
        )
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield from _table_rows((head,))
    yield "|" + "---|" * len(head)
    yield from _table_rows(rows)


def _table_rows(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in rows:
        yield "| " + " | ".join(row) + " |"


if __name__ == "__main__":
    print(render())
