"""Where each "$ref" of a JSON schema leads. Owns how places and names within a schema are read.

What has an "$id" of its own is a document of its own: places ("#/...") and names ("#...") in it are its own. A
reference by URI is followed by the library alone, and counts as unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from miniserve.sampling_params import StructuredOutput
from miniserve.structured.sources import schemas_of

Reference = tuple[int, str]  # the identity of the document that it stands in, and its text


class References:
    """All references of one schema, as it was read: no part of it may be another part too.

    Attributes:
        targets: what each leads to; None where that is unknown, or there is nothing.
        intruders: those by place that lead into the middle of another document: references there would be misread.
    """

    def __init__(self, root: Any) -> None:
        self._documents: dict[int, Any] = {}  # by the identity of each object with a reference
        self.targets: dict[Reference, Any] = {}
        self.intruders: list[str] = []
        anchors: dict[Reference, Any] = {}
        for part, document in _parts(root):
            if isinstance(name := part.get("$anchor"), str):
                anchor = (id(document), "#" + name)
                anchors[anchor] = None if anchor in anchors else part
            if isinstance(part.get("$ref"), str):
                self._documents[id(part)] = document
        for part, document in _parts(root):
            if (key := self.key(part)) is not None and key not in self.targets:
                self.targets[key] = anchors[key] if key in anchors else self._at_place(key[1], document)

    def key(self, part: Mapping[str, Any]) -> Reference | None:
        """The reference that an object of the schema has; None if it has none."""
        document = self._documents.get(id(part))
        return None if document is None else (id(document), part["$ref"])

    def target(self, part: Mapping[str, Any]) -> Any:
        """What the reference of an object of the schema leads to; None if there is none, or it is unknown."""
        key = self.key(part)
        return None if key is None else self.targets[key]

    def _at_place(self, reference: str, document: Any) -> Any:
        """RFC 6901."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        target = document
        for part in unquote(reference[1:]).split("/")[1:]:
            if target is not document and _is_document(target):
                self.intruders.append(reference)
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                index = int(name[:9]) if name.isdecimal() else len(target)
                target = target[index] if index < len(target) else None
            else:
                target = target.get(name) if isinstance(target, Mapping) else None
        return target


def misread_reference(asked: StructuredOutput) -> str:
    """Why the grammar would follow a reference to a wrong place; empty if it would not."""
    for schema in schemas_of(asked):
        for reference in References(schema).intruders:
            return (
                f"$ref {reference[:100]!r} leads by place into a part with an $id of its own; refer to that part by "
                "its $id"
            )
    return ""


def objects(root: Any) -> Iterator[Mapping[str, Any]]:
    """Each object in a JSON value."""
    return (part for part, _ in _parts(root))


def _parts(root: Any) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Each object, with the document that it is part of."""
    waiting = [(root, root)]
    while waiting:
        value, document = waiting.pop()
        if isinstance(value, Mapping):
            document = value if _is_document(value) else document
            yield value, document
            waiting += ((child, document) for child in value.values())
        elif isinstance(value, list):
            waiting += ((child, document) for child in value)


def _is_document(schema: Any) -> bool:
    """In older drafts, an "$id" such as "#name" is a name."""
    return isinstance(schema, Mapping) and isinstance(name := schema.get("$id"), str) and not name.startswith("#")
