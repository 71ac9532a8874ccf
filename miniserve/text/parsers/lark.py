"""Grammars of tool calls, as text in llguidance's Lark. Owns how rules are spelled and joined.

Each syntax says how one call is written, and the rules here say how calls, text and another answer may be mixed.
Knows the dialect, not the library: the text is compiled elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import StructuredOutput
from miniserve.strict_json import read_json
from miniserve.text.json_schema import check_depth
from miniserve.text.parsers.base import Tool

MAX_CALLS = 16  # in one answer, where the request names no limit
# One blank, or a line break with indentation: a small model writes white space for ever where any of it is allowed.
# Escapes such as \u00e9 are JSON like any.
JSON_OPTIONS = {"whitespace_pattern": r"[ ]|\n[ ]{0,40}", "json_allow_general_unicode_escapes": True}
_WORDS = ("title", "description", "$comment")
_ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Rules:
    """How one syntax writes calls.

    Attributes:
        calls: expression of an answer that calls.
        free: the rule `free`, of text with or without calls.
        rules: what the two refer to.
    """

    calls: str
    free: str
    rules: Sequence[str]


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text)


def special(text: str, special_ids: Mapping[str, int]) -> str:
    """A special token by its id; text like any where it is none."""
    return f"<[{special_ids[text]}]>" if text in special_ids else literal(text)


def opening(tag: str, *patterns: str) -> re.Pattern[str]:
    """What an answer of calls begins with: the tag or, where there is one, another pattern, behind white space."""
    return re.compile(rf"\s*(?:{'|'.join([re.escape(tag), *patterns])})")


def without(text: str) -> str:
    """What does not contain this text, as part of a terminal."""
    return f"~/(?s:.*){_escaped_slashes(re.escape(text))}(?s:.*)/"


def json_value(schema: Mapping[str, Any]) -> str:
    """A JSON value that is valid against `schema`."""
    text = json.dumps({**_bare(schema), "x-guidance": JSON_OPTIONS}, ensure_ascii=False, separators=(",", ":"))
    return f"%json {text}"


def _bare(schema: Any) -> Any:
    """`schema` without its words: with those of a hundred tools a grammar would be too long."""
    if isinstance(schema, list):
        return [_bare(value) for value in schema]
    if not isinstance(schema, Mapping):
        return schema
    # A property of such a name has a schema, which is no string; const and enum have no schemas in them.
    return {
        key: value if key in ("const", "enum") else _bare(value)
        for key, value in schema.items()
        if not (key in _WORDS and isinstance(value, str))
    }


def arguments(tool: Tool) -> str:
    """The arguments of a call, as one JSON object."""
    return json_value(tool.schema)


def call_object(tool: Tool) -> str:
    """A whole call as one JSON value: where an answer may be JSON too, only another JSON value is told from it."""
    inner = {key: value for key, value in tool.schema.items() if key != "x-guidance"}
    properties = {"name": {"const": tool.name}, "parameters": _moved(inner, "#/properties/parameters")}
    required = list(properties)
    return json_value({"type": "object", "properties": properties, "required": required, "additionalProperties": False})


def _moved(schema: Any, place: str) -> Any:
    """`schema` with its references by place as they are where it is part of another; names stay what they are."""
    if isinstance(schema, list):
        return [_moved(value, place) for value in schema]
    if not isinstance(schema, Mapping) or _is_document(schema):
        return schema
    result = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        result["$ref"] = place + reference[1:]
    return result


def _is_document(schema: Mapping[str, Any]) -> bool:
    """Whether references within are to places in itself, wherever it is."""
    return isinstance(name := schema.get("$id"), str) and not name.startswith("#")


def repeated(item: str, separator: str, max_calls: int | None) -> str:
    """`item` once or more often, with `separator`, an expression or nothing, between."""
    more = (max_calls or MAX_CALLS) - 1
    return f"{item} ({separator} {item}){{0,{more}}}" if more else item


def either(rule: str, alternatives: Sequence[str]) -> str:
    """A rule that is one of `alternatives`."""
    return f"{rule}: " + "\n    | ".join(alternatives)


def text_around(
    tag: str, content: str, max_times: int | None, special_ids: Mapping[str, int] = MappingProxyType({})
) -> str:
    """The rule `free`: text, in which `content` has to follow wherever `tag` is written."""
    times = f"{{0,{max_times or MAX_CALLS}}}"
    text = f"TEXT: {_ANY_TEXT} & {without(tag)}"
    if tag in special_ids:
        return f"free: (TEXT {special(tag, special_ids)} {content}){times} TEXT\n{text}"
    return f"free: (opening {content}){times} TEXT\nopening[lazy]: {_ANY_TEXT} {literal(tag)}\n{text}"


def grammar(written: Rules, *, answer: StructuredOutput | None = None, required: bool = False) -> str:
    """The whole grammar. `answer`, `required`: as `ToolFormat.grammar`."""
    # Models begin their calls on a new line, after reasoning above all.
    lines = [f"calls: /\\n{{0,2}}/ {written.calls}", *written.rules]
    if required:
        lines.insert(0, "start: calls")
    elif answer is not None:
        lines = ["start: calls | answer", f"answer: {_answer(answer)}", *lines]
    else:
        lines = ["start: free", written.free, *lines]
    return "\n".join(lines) + "\n"


def _answer(answer: StructuredOutput) -> str:
    match answer.kind:
        case "json":
            schema = _read(answer)
            return json_value(schema if isinstance(schema, dict) else {"anyOf": [schema]})
        case "choice":
            choices = _read(answer)
            if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
                raise InvalidParameterError(
                    f"{answer.name} must be an array of strings, at least one", param=answer.param
                )
            # As one terminal: as alternatives of a rule, thousands would be too many.
            return f"CHOICE\nCHOICE: {' | '.join(map(literal, choices))}"
        case "regex":
            return f"/{_escaped_slashes(answer.source)}/"
        case "grammar":
            return f"%lark {{\n{answer.source}\n}}"


def _read(answer: StructuredOutput) -> Any:
    try:
        value = read_json(answer.source)
    except ValueError as error:
        raise InvalidParameterError(f"{answer.name} is not valid JSON: {error}", param=answer.param) from error
    check_depth(value, answer.name, answer.param)
    return value


def _escaped_slashes(pattern: str) -> str:
    """A regular expression for between slashes."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")
