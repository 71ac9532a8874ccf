"""Keywords of a JSON schema that have no effect where they stand, and the schema without them.

llguidance refuses each keyword that it cannot keep to, also where there is nothing to keep. Knows schemas; neither
grammars nor a vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_HOLDERS = (
    *("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else"),
)

# Keywords that do something only beside another one.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "then": ("if",),
    "else": ("if",),
    "if": ("then", "else"),
}
# Values that demand nothing.
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}


def without_effectless(schema: Any) -> Any:
    """`schema` without such keywords; the same object where it has none.

    Raises:
        RecursionError: it nests too deep to be looked through.
    """
    if isinstance(schema, list):
        items = [without_effectless(item) for item in schema]
        return items if any(new is not old for new, old in zip(items, schema, strict=True)) else schema
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: _within(key, value) for key, value in schema.items() if _has_effect(key, value, schema)}
    is_same = len(kept) == len(schema) and all(kept[key] is value for key, value in schema.items())
    return schema if is_same else kept


def _within(keyword: str, value: Any) -> Any:
    if keyword in _HOLDERS:
        return without_effectless(value)
    if keyword in _NAMED and isinstance(value, Mapping):  # a name may be that of a keyword
        parts = {name: without_effectless(part) for name, part in value.items()}
        return parts if any(parts[name] is not part for name, part in value.items()) else value
    return value


def _has_effect(keyword: str, value: Any, schema: Mapping[str, Any]) -> bool:
    partners = _NEEDED.get(keyword)
    if partners is not None:
        return any(partner in schema for partner in partners)
    return keyword not in _NOTHING or not any(value is said or value == said == {} for said in _NOTHING[keyword])
