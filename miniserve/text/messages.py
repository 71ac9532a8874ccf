"""Chat messages in the one shape that every template takes. Owns the checks of the `messages` field.

Does not know templates: what those want of a broken call, the caller says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miniserve.errors import InvalidParameterError, UnsupportedParameterError, shown
from miniserve.strict_json import check_json, read_json

Message = Mapping[str, Any]

_PART_TYPES = ("text", "refusal")  # a model's refusal is part of the history like any text
_SPEAKERS = ("system", "developer", "user")  # who says something, or would not have a message
# Fields of an assistant's message in OpenAI's API that no template reads.
_UNREAD = {"function_call": "send tool_calls", "audio": "send its text as content"}
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
        raise _wrong("messages must not be empty")
    return [_normalise(message, f"messages[{i}]", keep_broken_calls) for i, message in enumerate(messages)]


def check_history(messages: Sequence[Message]) -> None:
    """Refuse a conversation that could not have been: what would reach the template in part only, or as nothing.

    A call that was never answered is let be: the user may have interrupted it.

    Raises:
        InvalidParameterError, UnsupportedParameterError: names the message.
    """
    call_ids: set[str] = set()
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise _wrong(f"messages must be an array of messages, each with role and content, got {_kind(messages)}")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _wrong(f"{where} must be an object with role and content, got {_kind(message)}")
        check_json(dict(message), where, "messages")
        role = message.get("role")
        _check_fields(message, where)
        if role == "assistant":
            call_ids |= _ids_of_calls(message, where)
        elif message.get("tool_calls"):
            raise _wrong(
                f"{where}.tool_calls: only messages of the role 'assistant' call tools; this is of {shown(role)}"
            )
        if role == "tool":
            _check_answer(message, where, call_ids)
        content = message.get("content")
        if role in _SPEAKERS and (content is None or content == []):
            got = "null" if content is None else "an empty array"
            raise _wrong(f"{where}.content of the role {shown(role)} must be text or text parts, got {got}")


def check_continuable(messages: Sequence[Message]) -> None:
    """Refuse to go on with a final message that has nothing to go on with.

    Args:
        messages: normalised.

    Raises:
        InvalidParameterError: it is not the assistant's, calls tools, or is empty.
    """
    final = messages[-1]
    if final["role"] != "assistant":
        raise not_continuable(f"its role is {shown(final['role'])}, not 'assistant'")
    if final.get("tool_calls"):
        raise not_continuable("it calls tools, and is complete")
    if not final["content"]:
        raise not_continuable("its content is empty")


def not_continuable(why: str) -> InvalidParameterError:
    """The error of a final message that cannot be continued."""
    return InvalidParameterError(
        f"the final message cannot be continued: {why}; leave continue_final_message out",
        param="continue_final_message",
    )


def _check_fields(message: Message, where: str) -> None:
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise _wrong(f"{where}.name must be a string, got {_kind(name)}")
    for field, remedy in _UNREAD.items():
        if message.get(field) is not None:
            raise UnsupportedParameterError(f"{where}.{field} is not implemented; {remedy}", param="messages")


def _ids_of_calls(message: Message, where: str) -> set[str]:
    ids: set[str] = set()
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):  # all else is for `normalise_messages`
        call_id = call.get("id") if isinstance(call, Mapping) else None
        if not isinstance(call_id, str) or not call_id:
            raise _wrong(f"{where}.tool_calls[{index}].id must be a non-empty string, got {_kind(call_id)}")
        if call_id in ids:
            raise _wrong(f"{where}.tool_calls[{index}].id is {shown(call_id)} again; give each call an id of its own")
        ids.add(call_id)
    return ids


def _check_answer(message: Message, where: str, call_ids: set[str]) -> None:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        raise _wrong(f"{where}.tool_call_id must be the id of the call that it answers, got {_kind(call_id)}")
    if call_id not in call_ids:
        raise _wrong(
            f"{where}.tool_call_id is {shown(call_id)}, but no message before it has a tool call of this id: send the "
            "assistant's message with its tool_calls too"
        )


def _wrong(message: str) -> InvalidParameterError:
    return InvalidParameterError(message, param="messages")


def _normalise(message: Message, where: str, keep_broken_calls: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where}.role must be a non-empty string")
    result = {name: value for name, value in message.items() if value is not None}
    # Models are trained on "system"; "developer" is OpenAI's newer name for it.
    result["role"] = "system" if role == "developer" else role
    field = "content"
    if role == "assistant" and message.get("content") is None:
        field = "refusal"  # what a model says in place of an answer
    result["content"] = _content_text(message.get(field), f"{where}.{field}")
    if role == "assistant":
        _rename_reasoning(result, where)
    tool_calls = result.pop("tool_calls", None)
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise _wrong(f"{where}.tool_calls must be an array, got {_kind(tool_calls)}")
    if tool_calls:
        result["tool_calls"] = [
            _normalise_call(call, f"{where}.tool_calls[{i}]", keep_broken_calls) for i, call in enumerate(tool_calls)
        ]
    return result


def _rename_reasoning(message: dict[str, Any], where: str) -> None:
    given = {name: message.pop(name) for name in _REASONING_NAMES if name in message}
    for name, value in given.items():
        if not isinstance(value, str):
            raise _wrong(f"{where}.{name} must be a string, got {_kind(value)}")
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
        raise _wrong(f"{where} must be a string or an array of text parts, got {_kind(content)}")
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(f"{where} must be an object with a type, got {_kind(part)}")
    kind = part.get("type")
    if kind not in _PART_TYPES:
        got = shown(kind) if isinstance(kind, str) else _kind(kind)
        raise _wrong(f"{where} must be a part of type 'text', got {got}")
    text = part.get(kind)
    if not isinstance(text, str):
        raise _wrong(f"{where}.{kind} must be a string, got {_kind(text)}")
    return text


def _normalise_call(call: Any, where: str, keep_broken: bool) -> dict[str, Any]:
    """OpenAI sends arguments as JSON text; templates expect the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise _wrong(f"{where} must be an object with a function")
    if (kind := call.get("type")) not in (None, "function"):
        raise _wrong(f"{where}.type must be 'function', got {shown(kind)}")
    function = call["function"]
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong(f"{where}.function.name must be a non-empty string, got {_kind(function.get('name'))}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed_arguments(arguments, keep_broken)
    if arguments is not None and not isinstance(arguments, (Mapping, str)):
        raise _wrong(f"{where}.function.arguments must be a JSON object, got {_kind(arguments)}")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _parsed_arguments(text: str, keep_broken: bool) -> Mapping[str, Any] | str:
    """A model wrote them, and may have been cut off: that is no reason to refuse the whole conversation."""
    if not text.strip():
        return {}
    try:
        value = read_json(text)
    except ValueError:
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
    if value == "":
        return "an empty string"
    names: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (str, "a string"),
        ((int, float), "a number"),
        (Mapping, "an object"),
        (Sequence, "an array"),
    )
    default = "null" if value is None else type(value).__name__
    return next((name for kind, name in names if isinstance(value, kind)), default)
