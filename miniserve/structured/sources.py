"""From what a user asks an answer to look like to a grammar in llguidance's form. Owns the options of JSON.

Finds out what is no JSON or no text at all; whether a grammar makes sense is for the compiler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import StructuredOutput
from miniserve.strict_json import read_json
from miniserve.structured.effectless import without_effectless

# A schema must not change them for itself. White space between the parts of a document is one blank, or a line break
# with indentation: a small model would write it for ever. Escapes such as \u00e9 are JSON like any others.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ ]|\n[ ]{0,40}",
    "coerce_one_of": False,
    "lenient": False,
    "json_allow_general_unicode_escapes": True,
}
_JSON_IN_LARK = re.compile(r"%json\s*(?=\{)")
_BACKUS_NAUR = re.compile(r"^\s*<?[\w-]+>?\s*::=", re.MULTILINE)


def to_grammar(asked: StructuredOutput) -> str:
    """The grammar's text.

    JSON is written with one blank or a line break and indentation, or nothing, between its parts. A schema's own
    "x-guidance" is put aside.

    Raises:
        InvalidParameterError: it is not even well-formed.
    """
    try:
        asked.source.encode()
    except UnicodeEncodeError as error:
        raise refused(asked, f"half a surrogate pair at character {error.start} is not valid Unicode") from error
    match asked.kind:
        case "json":
            return _from_schema(asked)
        case "choice":
            return _from_choices(asked)
        case "regex":
            return LLMatcher.grammar_from_regex(asked.source)
        case "grammar":
            if _BACKUS_NAUR.search(asked.source):
                raise refused(
                    asked,
                    "it looks like GBNF or another Backus-Naur form; write it in Lark, as llguidance reads it: "
                    '"start: ..." is the first rule, with ":" in place of "::="',
                )
            return LLMatcher.grammar_from_lark(_with_plain_schemas(asked.source))


def schemas_of(asked: StructuredOutput) -> Iterator[Any]:
    """The JSON schemas that an answer is held to: that of JSON, and those within a grammar.

    Raises:
        RecursionError: one within a grammar nests too deep to be read.
    """
    if asked.kind == "json":
        yield json.loads(asked.source)
    if asked.kind == "grammar":
        for start in _JSON_IN_LARK.finditer(asked.source):
            try:
                yield json.JSONDecoder().raw_decode(asked.source, start.end())[0]
            except ValueError:  # within a literal
                continue


def refused(asked: StructuredOutput, reason: str) -> InvalidParameterError:
    """The error that says why there is no grammar."""
    return InvalidParameterError(f"{asked.name} cannot be used: {reason}", param=asked.param)


def _from_schema(asked: StructuredOutput) -> str:
    schema = _parse(asked)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refused(asked, f"a schema is a JSON object, got {json.dumps(schema)[:100]}")
    known = {name: value for name, value in _plain(schema).items() if name != "x-guidance"}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(known), overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:  # escapes that only Python reads
        raise refused(asked, "it is not valid JSON: it has half a surrogate pair, \\ud800 to \\udfff") from error


def _plain(schema: Any) -> Any:
    try:
        return without_effectless(schema)
    except RecursionError:  # as deep as that, it is refused for it
        return schema


def _with_plain_schemas(source: str) -> str:
    """A grammar with its JSON schemas as they have an effect."""
    parts, end = [], 0
    for start in _JSON_IN_LARK.finditer(source):
        if start.end() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(source, start.end())
        except (ValueError, RecursionError):  # within a literal, or refused for it
            continue
        if (plain := _plain(schema)) is not schema:
            parts += [source[end : start.end()], json.dumps(plain, ensure_ascii=False)]
            end = after
    return "".join(parts) + source[end:]


def _from_choices(asked: StructuredOutput) -> str:
    choices = _parse(asked)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise refused(asked, "it must be an array of strings, with one at least")
    # As one terminal: as alternatives of a rule, thousands would be too many.
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def _parse(asked: StructuredOutput) -> Any:
    try:
        return read_json(asked.source)
    except ValueError as error:
        raise refused(asked, f"it is not valid JSON: {error}") from error
