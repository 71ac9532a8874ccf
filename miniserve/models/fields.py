"""Typed reads from metadata that somebody else wrote: config.json, generation_config.json, GGUF key-values.

Owns the messages for a missing or ill-typed field. Knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from miniserve.errors import CheckpointError

T = TypeVar("T")
_LARGEST = 2**31 - 1  # of any size, length or window


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping of untrusted values. `source` is the file (and section) that messages name.

    A field that is null counts as absent. Every reader raises CheckpointError for a value of the wrong type.
    """

    source: str
    values: Mapping[str, Any]

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None where the field is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        if value > _LARGEST:
            raise self._wrong(key, value, f"at most {_LARGEST}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; required when there is no default."""
        value = self.optional_integer(key)
        return self._required(key, default) if value is None else value

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None where the field is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; required when there is no default."""
        value = self.optional_number(key)
        return self._required(key, default) if value is None else value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers; empty where the field is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list of numbers")
        return tuple(Fields(f"{self.source}: {key}", {"an element": item}).number("an element") for item in value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers that are not negative, or None where the field is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
        ):
            raise self._wrong(key, value, "a list of integers")
        return tuple(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None where the field is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required when there is no default."""
        value = self.optional_text(key)
        return self._required(key, default) if value is None else value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where the field is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return tuple(value)

    def token_ids(self, key: str) -> frozenset[int]:
        """One token id or a list of them; empty where the field is absent."""
        value = self.values.get(key)
        if value is None:
            return frozenset()
        token_ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in token_ids):
            raise self._wrong(key, value, "a token id or a list of token ids")
        return frozenset(token_ids)

    def section(self, key: str) -> Fields | None:
        """A nested object, or None where the field is absent or empty."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(f"{self.source}: {key}", value) if value else None

    def unknown(self, known: Collection[str]) -> list[str]:
        """The keys that are set and not in `known`."""
        return sorted(key for key, value in self.values.items() if value is not None and key not in known)

    def _required(self, key: str, default: T | None) -> T:
        if default is None:
            raise CheckpointError(f"{self.source}: {key} is missing")
        return default

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        return CheckpointError(f"{self.source}: {key} must be {expected}, got {shown}")
