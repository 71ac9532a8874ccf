"""How short an answer to a JSON schema can be: what nobody can finish is refused, rather than written to the limit.

A lower bound, in tokens: one for each value that is required, more for a long string. It is endless where a schema
requires itself. Knows schemas; neither grammars nor a vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from miniserve.sampling_params import StructuredOutput
from miniserve.structured.references import Reference, References
from miniserve.structured.sources import schemas_of

_MAX_ROUNDS = 16  # a schema that takes more of them to settle is let through
_MOST = 2**53  # as much as matters: numbers in a schema may have any length


def unfinishable(asked: StructuredOutput, *, longest_token: int, max_tokens: float) -> str:
    """Why no answer can be whole within `max_tokens`; empty if one may be.

    Args:
        asked: JSON, or a grammar with JSON in it; nothing else is looked into.
        longest_token: bytes of the longest token.
    """
    try:
        reasons = (_reason(_Shortest(schema, longest_token), max_tokens) for schema in schemas_of(asked))
        return next(filter(None, reasons), "")
    except RecursionError:
        return "it is nested too deeply"


def _reason(shortest: _Shortest, max_tokens: float) -> str:
    num_tokens = shortest.num_tokens()
    if num_tokens == math.inf:
        circle = next((name for (_, name), needed in shortest.needed.items() if needed == math.inf), None)
        if circle is None:
            return "no answer is possible"
        return f"no answer can be finished: what $ref {circle[:100]!r} names requires itself again, without end"
    if num_tokens > max_tokens:
        return (
            f"no answer can be finished: it takes {num_tokens:.0f} tokens at least, and the context holds {max_tokens}"
        )
    return ""


class _Shortest:
    """The least solution of "as long as what it requires", found from above.

    Attributes:
        needed: tokens that the target of each reference takes, as far as is known.
    """

    def __init__(self, root: Any, longest_token: int) -> None:
        self._root = root
        self._longest_token = longest_token
        self._references = References(root)
        self.needed: dict[Reference, float] = dict.fromkeys(self._references.targets, math.inf)

    def num_tokens(self) -> float:
        """Of the whole answer."""
        targets = list(self._references.targets.items())
        for _ in range(_MAX_ROUNDS):
            before = dict(self.needed)
            for name, target in targets:
                self.needed[name] = self._value(target)
            if self.needed == before:
                return self._value(self._root)
            targets.reverse()  # a chain settles in one round of the right direction
        return 0

    def _value(self, schema: Any, kinds: Any = None) -> float:
        """`kinds`: the types that the schemas around this one leave; None is any."""
        if schema is False:
            return math.inf
        if not isinstance(schema, Mapping):
            return 1
        kinds = schema.get("type", kinds)
        reference = self._references.key(schema)
        needed = [1.0, 1.0 if reference is None else self.needed[reference]]
        needed += (self._value(part, kinds) for part in _list(schema.get("allOf")))
        for choices in (schema[key] for key in ("anyOf", "oneOf") if key in schema):
            needed.append(min((self._value(choice, kinds) for choice in _list(choices)), default=1))
        if "const" in schema or "enum" in schema:
            literals = [schema["const"]] if "const" in schema else _list(schema["enum"])
            needed.append(
                min((self._text(len(json.dumps(literal, ensure_ascii=False))) for literal in literals), default=1)
            )
        elif kinds is not None:
            needed.append(min((self._of_kind(kind, schema) for kind in _list(kinds) or [kinds]), default=1))
        return _bounded(max(needed))

    def _of_kind(self, kind: Any, schema: Mapping[str, Any]) -> float:
        match kind:
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "string":
                return self._text(_count(schema, "minLength"))
        return 1

    def _object(self, schema: Mapping[str, Any]) -> float:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties")
        keys = {key for key in _list(schema.get("required")) if isinstance(key, str)}
        more = max(0, _count(schema, "minProperties") - len(keys))
        return 1 + more + sum(self._value(properties.get(key, others)) for key in keys)

    def _array(self, schema: Mapping[str, Any]) -> float:
        first, length = _list(schema.get("prefixItems")), _count(schema, "minItems")
        more = length - len(first)
        needed = 1 + sum(self._value(item) for item in first[:length])
        return needed + more * self._value(schema.get("items")) if more > 0 else needed

    def _text(self, length: int) -> float:
        return max(1, length // self._longest_token)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(schema: Mapping[str, Any], key: str) -> int:
    value = schema.get(key)
    return max(0, int(min(value, _MOST))) if isinstance(value, (int, float)) else 0


def _bounded(number: float) -> float:
    return number if number == math.inf else min(number, _MOST)
