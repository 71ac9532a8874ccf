"""Parameters that a model writes as plain text between tags, and JSON: which type each has, and how it is written.

Types come from the tool's JSON schema, of which only what decides that is read. Does not know the tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn

from miniserve.errors import InvalidParameterError, shown
from miniserve.text.parsers import lark
from miniserve.text.parsers.base import Tool
from miniserve.text.parsers.json_scanner import JsonScanner

Types = frozenset[str]
STRING: Types = frozenset({"string"})

_MAX_REFERENCES = 16  # that lead on to each other
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # how templates print them in the history
_KINDS = {
    NoneType: "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", *_DEFINITIONS}) | _ANNOTATIONS
_STRING_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"}) | _ANNOTATIONS


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool. `schema` stands on its own: what it refers to is in it."""

    tool: Tool
    key: str
    schema: Mapping[str, Any]
    required: bool

    @property
    def types(self) -> Types | None:
        """The JSON types that it may have; None is any."""
        return _types(self.schema, self.schema)


def parameters(tool: Tool) -> list[Parameter]:
    """All that the schema names, in its order; then those that it only requires.

    Raises:
        InvalidParameterError: the tool is strict, and this syntax cannot keep to its schema.
    """
    root = _resolved(tool.schema, tool.schema)
    if tool.strict:
        _check_keywords(tool, "it", root, _OBJECT_KEYWORDS)
    properties, required = _mapping(root.get("properties")), root.get("required")
    required = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    keys = [*properties, *(key for key in required if key not in properties)]
    return [
        Parameter(tool, key, {**definitions, **_resolved(properties.get(key), root)}, key in required) for key in keys
    ]


def takes_any(tool: Tool) -> bool:
    """Whether the schema says nothing of the parameters, so that there may be any."""
    return not tool.schema.keys() - {"type"} - _ANNOTATIONS


def any_parameter(tool: Tool) -> Parameter:
    """One of those."""
    return Parameter(tool, "any", {}, required=False)


def types_of(tool: Tool, key: str) -> Types | None:
    """The JSON types that a parameter may have; None is any."""
    root = _resolved(tool.schema, tool.schema)
    return _types(_mapping(root.get("properties")).get(key), root)


def as_json(text: str, types: Types | None) -> str:
    """What the model wrote, as JSON of one of `types`; a string where it is none."""
    value = _PYTHON.get(text.strip(), text.strip())
    try:
        kind = _kind(json.loads(value, parse_constant=_refuse, strict=False))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    allowed = types is None or "string" not in types or kind in types or (kind == "integer" and "number" in types)
    return JsonScanner().push(value)[1] if allowed else json.dumps(text, ensure_ascii=False)


def value_rules(rule: str, parameter: Parameter, end: str) -> list[str]:
    """Grammar rules for `rule`: the parameter's value and `end`, the tag after it, each with its line break.

    Raises:
        InvalidParameterError: a value cannot be told from what is around it, or the tool is strict and this syntax
            cannot keep to its schema.
    """
    tool, key, types = parameter.tool, parameter.key, parameter.types
    if not key or any(char in key for char in ">\n"):
        raise _error(tool, f"a parameter is named {shown(key)}, which the model's syntax of calls cannot carry")
    after = lark.literal(f"\n{end}\n")
    if types is not None and "string" not in types:
        return [f"{rule}: {lark.json_value(parameter.schema)} {after}"]
    if tool.strict:
        plain = _STRING_KEYWORDS if types == STRING else _ANNOTATIONS | {"type"}
        _check_keywords(tool, f"parameter {key!r}", parameter.schema, plain | frozenset(_DEFINITIONS))
    values = _values(parameter.schema) if types == STRING else None
    if values is not None:
        if any(end in value for value in values):
            raise _error(tool, f"parameter {key!r} has a value with {end} in it, which would end it")
        return [f"{rule}: {rule.upper()} {after}", f"{rule.upper()}: {' | '.join(map(lark.literal, values))}"]
    return [
        f"{rule}[lazy]: {rule.upper()} {after}",
        f"{rule.upper()}: {_length(parameter.schema, types)} & {lark.without(end)}",
    ]


def _length(schema: Mapping[str, Any], types: Types | None) -> str:
    """Any text, of the length that a string is to have."""
    if types != STRING or not {"minLength", "maxLength"} & schema.keys():
        return "/(?s:.*)/"
    return f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"


def _values(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings that may stand there, where they are counted."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None


def _check_keywords(tool: Tool, where: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(schema.keys() - known)
    if unknown:
        raise _error(
            tool,
            f"{where} has {unknown[0]!r}, which the model's syntax of calls cannot be held to; "
            "leave the keyword out, or strict",
        )


def _error(tool: Tool, reason: str) -> InvalidParameterError:
    return InvalidParameterError(f"{tool.place} of {tool.name!r} cannot be used: {reason}", param=tool.place)


# The few parts of JSON Schema that tell a type


def _types(schema: Any, root: Mapping[str, Any]) -> Types | None:
    """The types of a schema and of what it offers as choices; None where one of them may be any."""
    result: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        schema = waiting.pop()
        if id(schema) in seen:  # choices may refer to each other in circles
            continue
        seen.add(id(schema))
        schema = _resolved(schema, root)
        kinds = _own_types(schema)
        choices = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
        if kinds is not None:
            result |= kinds
        elif choices is not None:
            waiting += choices
        else:
            return None
    return frozenset(result)


def _own_types(schema: Mapping[str, Any]) -> Types | None:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind, schema["enum"]))
    return None


def _resolved(value: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with what it refers to in place of the reference, and the one in place of `allOf` with one."""
    schema = _mapping(value)
    target: Any
    for _ in range(_MAX_REFERENCES):
        if isinstance(schema.get("$ref"), str):
            target, keyword = _target(schema["$ref"], root), "$ref"
        elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            target, keyword = schema["allOf"][0], "allOf"
        else:
            break
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{key: value for key, value in schema.items() if key != keyword}}
    return schema


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema (RFC 6901) points at; None for all else."""
    if not reference.startswith("#/"):
        return None
    target: Any = root
    for name in reference[2:].split("/"):
        target = _mapping(target).get(name.replace("~1", "/").replace("~0", "~"))
    return target


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "object")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
