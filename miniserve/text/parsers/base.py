"""The tools of a request, the deltas of an answer that may call them, and the parser that finds those.

Owns the checks of the `tools` field. Does not know tokens, nor any syntax.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from miniserve.errors import InvalidParameterError
from miniserve.text.json_schema import check_schema, shown_json

Message = Mapping[str, Any]

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NO_ARGUMENTS = MappingProxyType({"type": "object", "properties": {}, "additionalProperties": False})


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments as it was sent; None where the request has none: it takes none then.
        strict: its arguments have to be valid against the schema.
        place: what errors call the parameters, such as "tools[0].function.parameters".
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    place: str = field(default="parameters", compare=False)

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of its arguments: an object always."""
        return _NO_ARGUMENTS if self.parameters is None else {"type": "object", **self.parameters}

    @classmethod
    def from_openai(cls, tool: Any, where: str) -> Tool:
        """Read one entry of the `tools` field; `where` is what errors call it, such as "tools[0]".

        Raises:
            InvalidParameterError: it is malformed.
        """
        if not isinstance(tool, Mapping):
            raise _error(f"{where} must be an object with a type and a function, got {shown_json(tool)}")
        if tool.get("type") != "function":
            raise _error(f"{where}.type must be 'function', got {shown_json(tool.get('type'))}")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _error(f"{where}.function must be an object with a name, got {shown_json(function)}")
        where = f"{where}.function"
        name, description, strict = function.get("name"), function.get("description"), function.get("strict")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _error(f"{where}.name must be 1 to 64 of a-z, A-Z, 0-9, '_', '.', '-', got {shown_json(name)}")
        if description is not None and not isinstance(description, str):
            raise _error(f"{where}.description must be a string, got {shown_json(description)}")
        if strict is not None and not isinstance(strict, bool):
            raise _error(f"{where}.strict must be true or false, got {shown_json(strict)}")
        place = f"{where}.parameters"
        return cls(name, description, _parameters(function.get("parameters"), place, name), bool(strict), place)

    def to_openai(self) -> dict[str, Any]:
        """As chat templates take it: what the request said, without `strict`, which no model knows."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


def read_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """Read the `tools` field.

    Raises:
        InvalidParameterError: a tool is malformed, two have the same name, or there are too many.
    """
    if len(tools) > MAX_TOOLS:
        raise _error(f"tools has {len(tools)} functions; at most {MAX_TOOLS} are allowed")
    result: dict[str, Tool] = {}
    for index, entry in enumerate(tools):
        tool = Tool.from_openai(entry, f"tools[{index}]")
        if tool.name in result:
            raise _error(f"tools[{index}].function.name is {tool.name!r} again; give each function a name of its own")
        result[tool.name] = tool
    return tuple(result.values())


def _parameters(value: Any, param: str, name: str) -> Mapping[str, Any] | None:
    if value is None:
        return None
    where = f"{param} of {name!r}"
    if not isinstance(value, Mapping):
        raise InvalidParameterError(f"{where} must be a JSON schema, got {shown_json(value)}", param=param)
    check_schema(value, where, param)
    if value.get("type", "object") != "object":
        raise InvalidParameterError(
            f'{where} must have the type "object", for arguments are always one; got {shown_json(value["type"])}',
            param=param,
        )
    return value


def _error(message: str) -> InvalidParameterError:
    return InvalidParameterError(message, param="tools")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. `index` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of call `index`: all of them joined are the text of one JSON object."""

    index: int
    text: str


Delta = TextDelta | CallStart | ArgumentsDelta


class ToolParser(ABC):
    """Reads the text of one answer as it is generated. The joined deltas do not depend on how it is cut into pushes."""

    @property
    @abstractmethod
    def broke_off(self) -> bool:
        """Whether a call has ended within its arguments, which are no JSON then: such an answer calls nothing whole."""

    @abstractmethod
    def push(self, text: str) -> list[Delta]:
        """Add generated text; returns what is certain now."""

    @abstractmethod
    def flush(self, *, is_cut: bool = False) -> list[Delta]:
        """End the text; returns what was held back. `is_cut`: the answer would have gone on."""


class _Wrapper(ToolParser):
    """Chooses among the deltas of another parser."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    @property
    def broke_off(self) -> bool:
        return self._parser.broke_off


class CallsOnly(_Wrapper):
    """Of an answer that had to be calls, the calls alone: any text is the beginning of one that was cut off."""

    def push(self, text: str) -> list[Delta]:
        """As `ToolParser.push`."""
        return _without_text(self._parser.push(text))

    def flush(self, *, is_cut: bool = False) -> list[Delta]:
        """As `ToolParser.flush`."""
        return _without_text(self._parser.flush(is_cut=is_cut))


class CallsOrAnswer(_Wrapper):
    """Of an answer that is either calls or something else, held to a structure: the calls alone, or all as it is.

    The beginning decides, and is held back until it has. What may be that of a tag is not shown where it is cut off.

    Args:
        opening: what every answer that calls begins with, up to where its first call is certain.
    """

    def __init__(self, parser: ToolParser, opening: re.Pattern[str]) -> None:
        super().__init__(parser)
        self._opening = opening
        self._held = ""
        self._calls: bool | None = None  # once it is decided

    def push(self, text: str) -> list[Delta]:
        """As `ToolParser.push`."""
        if self._calls is False:
            return [TextDelta(text)] if text else []
        self._held += text
        return self._decided(self._parser.push(text))

    def flush(self, *, is_cut: bool = False) -> list[Delta]:
        """As `ToolParser.flush`."""
        if self._calls is False:
            return []
        deltas = self._parser.flush(is_cut=is_cut)
        # Without its tag, a call looks like any answer in JSON, and is shown like one.
        is_tag = self._calls is None and not self._held.lstrip().startswith("{")
        return [] if is_cut and is_tag else self._decided(deltas)

    def _decided(self, deltas: list[Delta]) -> list[Delta]:
        """What may be shown. The first delta says which it is: text comes first in an answer without calls."""
        if self._calls is None and deltas:
            self._calls = isinstance(deltas[0], CallStart) and self._opening.match(self._held) is not None
        if self._calls is False:
            held, self._held = self._held, ""
            return [TextDelta(held)]
        if self._calls:
            self._held = ""
        return _without_text(deltas)


def _without_text(deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if not isinstance(delta, TextDelta)]
