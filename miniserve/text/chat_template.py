"""Chat messages to the prompt text the model was trained on. Owns the Jinja environment and its rules.

Templates come with checkpoints and are written for transformers: the environment offers what they find
there, in a sandbox, because a template is code of strangers. Messages are brought to the one shape that
every template takes before they are rendered. Does not know tokens: the caller tokenises the rendered text
without adding special tokens, for templates write their own. What users spell like one is told apart in pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from miniserve.errors import CheckpointError, InvalidParameterError
from miniserve.text.spelling import Piece, SpellingMarks
from miniserve.text.tokenizer import require_encodable

Message = Mapping[str, Any]
_PART_TYPES = ("text", "refusal")  # a model's refusal is part of the history like any text
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """A model's chat template, compiled.

    Args:
        source: Jinja source; None where the model has no chat template: then every `render` is refused.
        special_tokens: what the template sees as bos_token, eos_token and so on.

    Raises:
        CheckpointError: `source` is not valid Jinja.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._template = _compile(source) if source is not None else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`; arguments and errors as those of `render_pieces`."""
        pieces = self.render_pieces(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, template_kwargs=template_kwargs
        )
        return "".join(piece.text for piece in pieces)

    def render_pieces(
        self,
        messages: Sequence[Message],
        *,
        special_spellings: re.Pattern[str] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """The prompt text for `messages`, in pieces where they spell special tokens, in one piece otherwise.

        Args:
            messages: as in OpenAI's API; content is a string, null or a list of text parts.
            special_spellings: `Tokenizer.special_spellings`; what it finds in `messages` and `tools` comes back as
                literal pieces. None finds nothing.
            add_generation_prompt: end with the header of the assistant's turn.
            tools: function descriptions, for templates that know them.
            template_kwargs: more variables for the template (`enable_thinking`, ...).

        Raises:
            InvalidParameterError: there is no template, a message is malformed, or the template refuses them.
        """
        if self._template is None:
            raise InvalidParameterError(
                "this model has no chat template; use completions (on the command line, omit --chat)",
                param="messages",
            )
        if not messages:
            raise InvalidParameterError("messages must not be empty", param="messages")
        variables = template_kwargs or {}
        if taken := _OWN_VARIABLES & variables.keys():
            raise InvalidParameterError(
                f"chat_template_kwargs must not set {', '.join(sorted(taken))}: use the request fields of these names",
                param="chat_template_kwargs",
            )
        users = {
            "messages": [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
        }
        others = {"documents": None} | self._special_tokens | dict(variables)
        marks = SpellingMarks(special_spellings, users, others, self._source)
        prompt = self._render(others | marks.put(users) | {"add_generation_prompt": add_generation_prompt})
        require_encodable(prompt, param="messages")
        return marks.take(prompt)

    def _render(self, variables: Mapping[str, Any]) -> str:
        assert self._template is not None
        try:
            return self._template.render(variables)
        except Exception as error:  # whatever foreign code raises on these messages, its own words help most
            raise InvalidParameterError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error


# Messages in the one shape that every template takes


def _normalise(message: Message, where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameterError(f"{where}.role must be a non-empty string", param="messages")
    result = dict(message)
    # Models are trained on "system"; "developer" is OpenAI's newer name for it.
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content_text(message.get("content"), f"{where}.content")
    if "tool_calls" in result:
        tool_calls = result.pop("tool_calls")
        if tool_calls is not None and not isinstance(tool_calls, list):
            raise InvalidParameterError(f"{where}.tool_calls must be a list, got {_kind(tool_calls)}", param="messages")
        if tool_calls:
            result["tool_calls"] = [
                _normalise_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(tool_calls)
            ]
    return result


def _content_text(content: Any, where: str) -> str:
    """Many templates only concatenate strings: null would print as "None", a list as Python source."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidParameterError(
            f"{where} must be a string or a list of text parts, got {_kind(content)}", param="messages"
        )
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidParameterError(f"{where} must be an object with a type, got {_kind(part)}", param="messages")
    kind = part.get("type")
    if kind not in _PART_TYPES:
        shown = repr(kind[:40]) if isinstance(kind, str) else _kind(kind)
        raise InvalidParameterError(f"{where} must be a part of type 'text', got {shown}", param="messages")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidParameterError(f"{where}.{kind} must be a string, got {_kind(text)}", param="messages")
    return text


def _normalise_tool_call(call: Any, where: str) -> dict[str, Any]:
    """OpenAI sends arguments as JSON text; templates expect the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidParameterError(f"{where} must be an object with a function", param="messages")
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidParameterError(f"{where}: arguments are not valid JSON", param="messages") from error
    if arguments is not None and not isinstance(arguments, Mapping):
        raise InvalidParameterError(
            f"{where}: arguments must be a JSON object, got {_kind(arguments)}", param="messages"
        )
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _kind(value: Any) -> str:
    """JSON's name for the type of a wrong value: the value itself may be huge, or too deep to print."""
    if isinstance(value, bool):
        return "a boolean"
    names: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (str, "a string"),
        ((int, float), "a number"),
        (Mapping, "an object"),
        (Sequence, "a list"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "null")


# The environment that templates are written for


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(
            f"the model's chat template is not valid Jinja: {error}; fetch the tokenizer files again"
        ) from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only prints what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which the model would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
