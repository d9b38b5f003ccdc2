"""What nodes say of the entries that a deployment needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dlo_api.topology import coordinate
from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeEntryStatus

from dlo_operator.reconcile.inputs import CacheFacts
from dlo_operator.reconcile.record import WantedEntry

#: More entries of one deployment do not fit its status; a node's list holds 256.
MOST_ENTRIES: Final = 64


def without_layouts(entries: Iterable[NodeEntry]) -> tuple[NodeEntry, ...]:
    """The entries that hold source files as they are."""
    return tuple(entry for entry in entries if entry.kind == "Files")


def reported(cache: CacheFacts, ids: Iterable[str]) -> dict[str, NodeEntryStatus]:
    """What the node says of these entries, by id; those it says nothing of are absent."""
    states = cache.states
    return {name: states[name] for name in ids if name in states}


def holds_all(cache: CacheFacts, entries: Iterable[NodeEntry]) -> bool:
    """Whether the node holds every entry, verified, and its heartbeat moves."""
    for entry in entries:
        state = cache.states.get(entry.id)
        if (
            state is None
            or state.phase != "Ready"
            or state.input_key is None
            or state.manifest_sha256 is None
        ):
            return False
    return cache.alive


def wanted_entries(
    entries: tuple[NodeEntry, ...], holders: Iterable[CacheFacts]
) -> tuple[WantedEntry, ...] | None:
    """The entries with the keys and digests that a node holding all of them reports; None while none does.

    Keys follow from the pinned source, and manifests from the keys, so that any such node will do; the
    first by name is taken.
    """
    holder = min(
        (cache for cache in holders if holds_all(cache, entries)), key=lambda c: c.name, default=None
    )
    if holder is None:
        return None
    states: Mapping[str, NodeEntryStatus] = reported(holder, (entry.id for entry in entries))
    return tuple(_wanted(entry, states[entry.id]) for entry in entries)


def _wanted(entry: NodeEntry, state: NodeEntryStatus) -> WantedEntry:
    layout = entry.kind == "Layout"
    return WantedEntry(
        id=entry.id,
        kind=entry.kind,
        component=entry.component if layout else None,
        rank=entry.tensor_rank if layout else None,
        coordinate=coordinate(entry.tensor_rank, entry.tensor_size) if layout else None,
        input_key=state.input_key or "",
        manifest_sha256=state.manifest_sha256 or "",
        content_digest=state.content_digest or "",
        bytes=state.bytes or 0,
    )
