"""What the node's NodeWeightCache asks for, read with patience. Pure.

A spec may come from a later operator: fields that are not known here are left out, and a source or entry that
cannot be read at all is reported by its id without hiding the others. Such an id still counts as listed, so
that not understanding an entry never takes its reference away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource
from pydantic import ValidationError

_SHOWN: Final = 200
_ID: Final = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A source or entry of the spec that this version does not understand."""

    id: str
    kind: str
    message: str


@dataclass(frozen=True)
class Wanted:
    """One generation of the spec of one NodeWeightCache."""

    name: str
    uid: str
    generation: int
    sources: Mapping[str, NodeSource] = field(default_factory=dict)
    entries: tuple[NodeEntry, ...] = ()
    unreadable_sources: tuple[Unreadable, ...] = ()
    unreadable_entries: tuple[Unreadable, ...] = ()

    @property
    def entry_ids(self) -> frozenset[str]:
        """The ids of all listed entries, understood or not."""
        return frozenset(entry.id for entry in self.entries) | {each.id for each in self.unreadable_entries}

    def entry(self, entry_id: str) -> NodeEntry | None:
        """The entry of that id, if it is listed and understood."""
        return next((entry for entry in self.entries if entry.id == entry_id), None)

    def entries_of(self, source_id: str) -> tuple[NodeEntry, ...]:
        """The entries that are built from a source."""
        return tuple(entry for entry in self.entries if entry.source_id == source_id)


def read_wanted(obj: Mapping[str, Any]) -> Wanted:
    """The spec of a NodeWeightCache object as the API server gives it."""
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    sources: dict[str, NodeSource] = {}
    entries: list[NodeEntry] = []
    odd_sources: list[Unreadable] = []
    odd_entries: list[Unreadable] = []
    for stated in spec.get("sources") or ():
        try:
            source = NodeSource.model_validate_json(json.dumps(stated), extra="ignore")
        except ValidationError as error:
            odd_sources += _unreadable(stated, error)
        else:
            sources[source.id] = source
    for stated in spec.get("entries") or ():
        try:
            entries.append(NodeEntry.model_validate_json(json.dumps(stated), extra="ignore"))
        except ValidationError as error:
            odd_entries += _unreadable(stated, error)
    return Wanted(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        sources=sources,
        entries=tuple(entries),
        unreadable_sources=tuple(odd_sources),
        unreadable_entries=tuple(odd_entries),
    )


def _unreadable(stated: Mapping[str, Any], error: ValidationError) -> list[Unreadable]:
    """What can be said of it: nothing where even its id is not one, since status could not carry it."""
    if not _ID.fullmatch(str(stated.get("id", ""))):
        return []
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return [
        Unreadable(
            id=stated["id"],
            kind="Files" if stated.get("kind") == "Files" else "Layout",
            message=f"this agent does not understand {place}: {first['msg']}"[:_SHOWN],
        )
    ]
