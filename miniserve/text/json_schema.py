"""Whether a JSON schema has the shape of one: each keyword has a value of its kind, and references lead somewhere.

Keywords that nobody knows say nothing, as JSON Schema has it. Does not know which ones a grammar can keep to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from miniserve.errors import InvalidParameterError, shown
from miniserve.strict_json import check_json

MAX_SCHEMA_DEPTH = 100  # what walks through a schema may recurse
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_MAX_SHOWN = 100
_MAX_PATH = 160


class _Demand(NamedTuple):
    """What a keyword's value must be, in words and as a test."""

    words: str
    is_met: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


_OBJECT = _Demand("must be an object of schemas", lambda value: isinstance(value, Mapping))
_SCHEMAS = _Demand("must be an array of schemas", lambda value: isinstance(value, list))
_ALTERNATIVES = _Demand("must be a non-empty array of schemas", lambda value: isinstance(value, list) and bool(value))
_NUMBER = _Demand("must be a number", _is_number)
_BOUND = _Demand("must be a number", lambda value: isinstance(value, (int, float)))  # in older drafts a boolean
_COUNT = _Demand("must be an integer of at least 0", lambda value: _is_number(value) and value >= 0 and value % 1 == 0)
_STRING = _Demand("must be a string", _is_string)

_MAPPED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("items", "additionalItems", "unevaluatedItems", "contains"),
    *("not", "if", "then", "else"),
)
_DEMANDS: Mapping[str, _Demand] = {
    **dict.fromkeys(_MAPPED, _OBJECT),
    **dict.fromkeys(_LISTED, _SCHEMAS),
    **dict.fromkeys(("anyOf", "oneOf"), _ALTERNATIVES),
    "type": _Demand(f"must be one of {', '.join(_TYPES)}, or a non-empty array of them", _is_type),
    "required": _Demand(
        "must be an array of strings", lambda value: isinstance(value, list) and all(map(_is_string, value))
    ),
    "enum": _Demand("must be a non-empty array", lambda value: isinstance(value, list) and bool(value)),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    "multipleOf": _Demand("must be a number greater than 0", lambda value: _is_number(value) and value > 0),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("pattern", "format", "$ref"), _STRING),
}


def check_schema(schema: Any, where: str, param: str) -> None:
    """Refuse what is no JSON schema, or nests deeper than any honest one.

    Args:
        schema: a JSON value.
        where: what errors call it, such as "response_format.schema".
        param: the field of the request.

    Raises:
        InvalidParameterError: of `param`; the message names the keyword at fault.
    """
    check_json(schema, where, param, max_depth=MAX_SCHEMA_DEPTH)
    anchors = frozenset(_anchors(schema))
    waiting: list[tuple[str, Any, Any]] = [("", schema, schema)]
    while waiting:
        path, value, document = waiting.pop()
        if isinstance(value, bool):
            continue
        if not isinstance(value, Mapping):
            demand = f"must be an object or a boolean, got {shown_json(value)}"
            raise _malformed(path or "it", demand, where, param)
        if _is_document(value):
            document = value
        for keyword, given in value.items():
            if (fault := _fault(keyword, given, document, anchors)) is not None:
                raise _malformed(_join(path, keyword), fault, where, param)
            waiting += ((*part, document) for part in _subschemas(_join(path, keyword), keyword, given))


def check_depth(schema: Any, where: str, param: str) -> None:
    """Refuse a schema that nests deeper than any honest one, or has what is no JSON in it.

    Raises:
        InvalidParameterError: of `param`, whose part `where` it is.
    """
    check_json(schema, where, param, max_depth=MAX_SCHEMA_DEPTH)


def shown_json(value: Any) -> str:
    """A wrong value in an error message, as JSON, cut."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or no end of nesting
        return shown(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _is_document(schema: Mapping[str, Any]) -> bool:
    """Whether references within, by place, are to places in itself. In older drafts "#name" is an anchor."""
    return isinstance(name := schema.get("$id"), str) and not name.startswith("#")


def _fault(keyword: str, given: Any, root: Any, anchors: frozenset[str]) -> str | None:
    """What is wrong with the value of a keyword; its subschemas are looked at in their turn."""
    demand = _DEMANDS.get(keyword)
    if demand is not None and not demand.is_met(given):
        return f"{demand.words}, got {shown_json(given)}"
    if keyword != "$ref" or given == "#":
        return None
    if given.startswith("#/"):
        if not _leads_somewhere(given, root):
            return f"is {shown_json(given)}, but there is nothing at this place of the schema"
    elif given.startswith("#") and given not in anchors:
        return f'is {shown_json(given)}, but no part of the schema has this "$anchor"; "#/$defs/name" refers by place'
    return None


def _anchors(schema: Any) -> Iterator[str]:
    """All that "#name" may refer to, "#" included. Older drafts had it as the id."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        waiting += _children(value)
        if isinstance(value, Mapping):
            yield from (f"#{value[key]}" for key in ("$anchor", "$dynamicAnchor") if isinstance(value.get(key), str))
            yield from (value[key] for key in ("$id", "id") if isinstance(value.get(key), str))


def _subschemas(path: str, keyword: str, given: Any) -> Iterator[tuple[str, Any]]:
    """With where they are."""
    if keyword in _MAPPED:
        yield from ((_join(path, name), value) for name, value in given.items())
    elif keyword in _LISTED or (keyword == "items" and isinstance(given, list)):  # of items, older drafts had a list
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(given))
    elif keyword in _SINGLE:
        yield path, given


def _leads_somewhere(reference: str, root: Any) -> bool:
    """Whether a reference by place within the schema (RFC 6901) points at something."""
    target = root
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name[:9]) < len(target):
            target = target[int(name[:9])]
        elif isinstance(target, Mapping) and name in target:
            target = target[name]
        else:
            return False
    return True


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _malformed(path: str, fault: str, where: str, param: str) -> InvalidParameterError:
    if len(path) > _MAX_PATH:
        path = f"{path[: _MAX_PATH // 2]}...{path[-_MAX_PATH // 2 :]}"
    return InvalidParameterError(f"{where} is not a valid JSON schema: {path} {fault}", param=param)
