"""Chat messages in the one shape that every template takes. Owns the checks of the `messages` field.

Does not know templates: what those want of a broken call, the caller says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from miniserve.errors import InvalidParameterError

Message = Mapping[str, Any]

_PART_TYPES = ("text", "refusal")  # a model's refusal is part of the history like any text
_REASONING_NAMES = ("reasoning_content", "reasoning")  # templates know the first, some clients send the second


def normalise_messages(messages: Sequence[Message], *, keep_broken_calls: bool = False) -> list[dict[str, Any]]:
    """New messages: content is a string, arguments of calls are objects, reasoning has both its names, null is absent.

    Args:
        messages: as in OpenAI's API; content is a string, null or a list of text parts.
        keep_broken_calls: arguments that are no JSON object, such as those of a call that was cut off, stay the text
            that the model wrote. Otherwise that text becomes the only argument, "arguments", of an object.

    Raises:
        InvalidParameterError: a message is malformed.
    """
    if not messages:
        raise InvalidParameterError("messages must not be empty", param="messages")
    return [_normalise(message, f"messages[{i}]", keep_broken_calls) for i, message in enumerate(messages)]


def _normalise(message: Message, where: str, keep_broken_calls: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameterError(f"{where}.role must be a non-empty string", param="messages")
    result = {name: value for name, value in message.items() if value is not None}
    # Models are trained on "system"; "developer" is OpenAI's newer name for it.
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content_text(message.get("content"), f"{where}.content")
    if role == "assistant":
        _rename_reasoning(result, where)
    tool_calls = result.pop("tool_calls", None)
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise InvalidParameterError(f"{where}.tool_calls must be a list, got {_kind(tool_calls)}", param="messages")
    if tool_calls:
        result["tool_calls"] = [
            _normalise_call(call, f"{where}.tool_calls[{i}]", keep_broken_calls) for i, call in enumerate(tool_calls)
        ]
    return result


def _rename_reasoning(message: dict[str, Any], where: str) -> None:
    given = {name: message.pop(name) for name in _REASONING_NAMES if name in message}
    for name, value in given.items():
        if not isinstance(value, str):
            raise InvalidParameterError(f"{where}.{name} must be a string, got {_kind(value)}", param="messages")
    reasoning = next(filter(None, given.values()), None)
    if reasoning is not None:
        message.update(dict.fromkeys(_REASONING_NAMES, reasoning))


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


def _normalise_call(call: Any, where: str, keep_broken: bool) -> dict[str, Any]:
    """OpenAI sends arguments as JSON text; templates expect the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidParameterError(f"{where} must be an object with a function", param="messages")
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed_arguments(arguments, keep_broken)
    if arguments is not None and not isinstance(arguments, (Mapping, str)):
        raise InvalidParameterError(
            f"{where}: arguments must be a JSON object, got {_kind(arguments)}", param="messages"
        )
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _parsed_arguments(text: str, keep_broken: bool) -> Mapping[str, Any] | str:
    """A model wrote them, and may have been cut off: that is no reason to refuse the whole conversation."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    return text if keep_broken else {"arguments": text}


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
