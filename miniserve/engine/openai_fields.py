"""Fields that OpenAI's API spells as nested objects, taken apart: for the HTTP API and for `LLM`, which share them.

Says what is wrong with one in its own words: the schemas could only say that no alternative matched. Does not know what
the engine makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from miniserve.engine.options import REASONING_EFFORTS, TOOL_CHOICES, ToolChoice
from miniserve.errors import InvalidParameterError, UnsupportedParameterError
from miniserve.sampling_params import StructuredOutput
from miniserve.strict_json import read_json
from miniserve.text.json_schema import check_schema, shown_json
from miniserve.text.parsers.base import Tool, read_tools

STRUCTURED_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT = {"type": "object"}
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TOOL_CHOICE_SHAPES = 'must be none, auto, required, or {"type": "function", "function": {"name": ...}}'


def parse_tools(value: Any) -> tuple[Tool, ...]:
    """The functions that the model may call.

    Raises:
        InvalidParameterError: it is no array, or one of them is malformed; as `read_tools`.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong("tools", "must be an array of functions", value)
    return read_tools(value)


def parse_tool_choice(value: Any) -> tuple[ToolChoice, str | None]:
    """Whether tools may or must be called, and the name of the one that has to be; None is "auto".

    Raises:
        InvalidParameterError, UnsupportedParameterError: it is neither a known word nor a function.
    """
    if value is None:
        return "auto", None
    if isinstance(value, str) and value in TOOL_CHOICES:
        return cast(ToolChoice, value), None
    if not isinstance(value, Mapping):
        raise _wrong("tool_choice", _TOOL_CHOICE_SHAPES, value)
    if (kind := value.get("type")) is None:
        raise InvalidParameterError(
            f"tool_choice {_TOOL_CHOICE_SHAPES}, got an object without a type", param="tool_choice"
        )
    if kind != "function":
        raise UnsupportedParameterError(
            f"tool_choice.type must be 'function', got {shown_json(kind)}: no other is implemented", param="tool_choice"
        )
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise _wrong("tool_choice", "must name the function, as tool_choice.function.name", name)
    return "required", name


def parse_reasoning(value: Any) -> str | None:
    """The effort that `reasoning` names, in the spelling of OpenAI's newer API; None leaves it to the template.

    Raises:
        InvalidParameterError, UnsupportedParameterError: it is no object, or asks for anything else.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("reasoning", 'must be an object, such as {"effort": "low"}', value)
    for key, given in value.items():
        if key != "effort" and given is not None:
            raise UnsupportedParameterError(
                f"reasoning.{str(key)[:40]} is not implemented; leave it out", param="reasoning"
            )
    effort = value.get("effort")
    if effort is not None and effort not in REASONING_EFFORTS:
        raise _wrong("reasoning", f"must have one of {', '.join(REASONING_EFFORTS)} as effort", effort)
    return effort


def parse_response_format(value: Any) -> StructuredOutput | None:
    """What `response_format` asks the answer to look like; None for free text.

    Raises:
        InvalidParameterError: it has no known shape.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("response_format", "must be an object with a type", value)
    match value.get("type"):
        case "text":
            _check_unused(value, "schema", "json_schema")
            return None
        case "json_object":
            _check_unused(value, "json_schema")
            return _json_object(value.get("schema"))
        case "json_schema":
            asked = _json_schema(value.get("json_schema"))
            _check_unused(value, "schema")
            return asked
        case kind:
            raise _wrong("response_format", "must have the type text, json_object or json_schema", kind)


def parse_structured_outputs(value: Any) -> StructuredOutput | None:
    """What `structured_outputs` asks the answer to look like: exactly one of `STRUCTURED_OUTPUTS`.

    Raises:
        InvalidParameterError, UnsupportedParameterError: it has no known shape.
    """
    if value is None:
        return None
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise _wrong(name, "must be an object", value)
    named = {key: given for key, given in value.items() if given is not None and given is not False}
    for key in named:
        if key not in STRUCTURED_OUTPUTS:
            raise UnsupportedParameterError(f"{name}.{str(key)[:40]} is not implemented; leave it out", param=name)
    if len(named) != 1:
        asked = " and ".join(named) or "nothing"
        raise InvalidParameterError(
            f"{name} must ask for exactly one of {', '.join(STRUCTURED_OUTPUTS)}, got {asked}", param=name
        )
    [(kind, source)] = named.items()
    return _STRUCTURED[kind](source)


def _structured_json(source: Any) -> StructuredOutput:
    if isinstance(source, str):
        try:
            source = read_json(source)
        except ValueError as error:
            raise InvalidParameterError(
                f"structured_outputs.json is not valid JSON: {error}", param="structured_outputs"
            ) from None
    return _json("structured_outputs", "json", source)


def _structured_text(kind: Any) -> Callable[[Any], StructuredOutput]:
    def parse(source: Any) -> StructuredOutput:
        if not isinstance(source, str):
            raise _wrong("structured_outputs", f"must have a string as {kind}", source)
        return StructuredOutput(kind, source)

    return parse


def _structured_choice(source: Any) -> StructuredOutput:
    is_list = isinstance(source, Sequence) and not isinstance(source, str)
    if not is_list or not source:
        raise _wrong("structured_outputs", "must have a non-empty array of strings as choice", source)
    for index, answer in enumerate(source):
        if not isinstance(answer, str) or not answer:
            raise InvalidParameterError(
                f"structured_outputs.choice[{index}] must be a non-empty string, got {shown_json(answer)}",
                param="structured_outputs",
            )
    return StructuredOutput.choice(source)


def _structured_json_object(source: Any) -> StructuredOutput:
    if source is not True:
        raise _wrong("structured_outputs", "must have true or false as json_object", source)
    return StructuredOutput.json(_ANY_OBJECT)


_STRUCTURED: Mapping[str, Callable[[Any], StructuredOutput]] = {
    "json": _structured_json,
    "regex": _structured_text("regex"),
    "choice": _structured_choice,
    "grammar": _structured_text("grammar"),
    "json_object": _structured_json_object,
}


def _check_unused(value: Mapping[str, Any], *keys: str) -> None:
    """A schema where none is read asks for what it does not get."""
    for key in keys:
        if value.get(key) is not None:
            raise InvalidParameterError(
                f"response_format has {key}, but its type is {value['type']}; leave it out, or send another type",
                param="response_format",
            )


def _json_object(schema: Any) -> StructuredOutput:
    """The schema beside the type is an extension of several servers."""
    if schema is None:
        return StructuredOutput.json(_ANY_OBJECT, "response_format")
    return _json("response_format", "schema", schema)


def _json_schema(value: Any) -> StructuredOutput:
    """OpenAI's wrapper around a schema. `strict` changes nothing: what is asked for is kept to, always."""
    if not isinstance(value, Mapping):
        raise _wrong("response_format", "must have an object as json_schema", value)
    name, strict = value.get("name"), value.get("strict")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise _wrong("response_format", "must have 1 to 64 of a-z, A-Z, 0-9, '_', '-' as json_schema.name", name)
    if strict is not None and not isinstance(strict, bool):
        raise _wrong("response_format", "must have true or false as json_schema.strict", strict)
    return _json("response_format", "json_schema.schema", value.get("schema"))


def _json(param: str, key: str, schema: Any) -> StructuredOutput:
    if not isinstance(schema, Mapping):
        raise _wrong(param, f"must have a JSON schema, an object, as {key}", schema)
    check_schema(schema, f"{param}.{key}", param)
    return StructuredOutput.json(schema, f"{param}.{key}")


def _wrong(param: str, demand: str, value: Any) -> InvalidParameterError:
    got = "nothing" if value is None else shown_json(value)
    return InvalidParameterError(f"{param} {demand}, got {got}", param=param)
