"""How many properties of one object may be left out: any of them may come next, and each costs a place in every step.

A few hundred are more than a parser follows within its limits, and it would find that out in the middle of an answer.
Knows schemas; neither grammars nor a vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miniserve.sampling_params import StructuredOutput
from miniserve.structured.references import References, objects
from miniserve.structured.sources import schemas_of

MAX_OPTIONAL = 256


def too_many_optional(asked: StructuredOutput) -> str:
    """Why an object has too many properties that may be left out; empty if none has. JSON in a grammar counts too."""
    for schema in schemas_of(asked):
        counted = _Counted(schema)
        number = max((counted.optional(part) for part in objects(schema)), default=0)
        if number > MAX_OPTIONAL:
            return (
                f"an object has {number} properties that may be left out, and at most {MAX_OPTIONAL} may be: make more "
                "of them required, or put some into objects of their own"
            )
    return ""


class _Counted:
    """Counts each part once: many may refer to the same one."""

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._counts: dict[int, tuple[int, int]] = {}

    def optional(self, schema: Mapping[str, Any]) -> int:
        """Properties of this object, with all that is joined to it, less those that are required."""
        named, required = self._count(schema)
        return max(0, named - required)

    def _count(self, schema: Any) -> tuple[int, int]:
        """Properties that it names, and names that it requires."""
        if not isinstance(schema, Mapping):
            return 0, 0
        if id(schema) not in self._counts:
            self._counts[id(schema)] = 0, 0  # what comes back to itself adds nothing
            properties = schema.get("properties")
            named = len(properties) if isinstance(properties, Mapping) else 0
            required = len(_list(schema.get("required")))
            choices = (_list(schema.get(key)) for key in ("anyOf", "oneOf"))
            likely = (max(map(self._count, choice), default=(0, 0)) for choice in choices)
            joined = [self._references.target(schema), *_list(schema.get("allOf"))]
            for more, of_them in (*map(self._count, joined), *likely):
                named, required = named + more, required + of_them
            self._counts[id(schema)] = named, required
        return self._counts[id(schema)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
