"""Which entries a deployment needs, from its topology and its model section. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dlo_api.identity import identified, source_id
from dlo_api.topology import coordinate
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeEntryStatus

from dlo_operator.reconcile.inputs import CacheFacts
from dlo_operator.reconcile.record import WantedEntry

#: More entries of one deployment do not fit its status; a node's list holds 256.
MOST_ENTRIES: Final = 64
_UNNAMED: Final = "0"


def secret_of(spec: DiffusionDeploymentSpec) -> tuple[str, str] | None:
    """Name and key (empty: all keys) of the Secret that the source is read with."""
    source = spec.model.source
    if source.hugging_face is not None and source.hugging_face.token_secret_ref is not None:
        reference = source.hugging_face.token_secret_ref
        return reference.name, reference.key
    if source.s3 is not None and source.s3.secret_ref is not None:
        return source.s3.secret_ref.name, ""
    return None


def id_of_source(spec: DiffusionDeploymentSpec, namespace: str) -> str:
    """The id of the deployment's source."""
    secret = secret_of(spec)
    return source_id(
        spec.model.source,
        variant=spec.model.variant,
        secret=f"{namespace}/{secret[0]}" if secret is not None else "",
    )


def entries_for(spec: DiffusionDeploymentSpec, source: str) -> tuple[NodeEntry, ...]:
    """Every entry that an engine of this spec maps: a Layout per component and tensor rank, and the rest."""
    size = spec.parallelism.tensor
    layouts = [
        NodeEntry(
            id=_UNNAMED,
            source_id=source,
            kind="Layout",
            component=component,
            layout=spec.model.layout,
            tensor_size=size,
            tensor_rank=rank,
            dtype=spec.model.dtype,
            quantization=spec.model.quantization,
            retention_seconds=spec.cache.retention_seconds,
        )
        for component in spec.model.components
        for rank in range(size)
    ]
    rest = NodeEntry(
        id=_UNNAMED,
        source_id=source,
        kind="Files",
        select="PipelineRest",
        streamed=tuple(sorted(spec.model.components)),
        retention_seconds=spec.cache.retention_seconds,
    )
    return tuple(identified(entry) for entry in (*layouts, rest))


def reported(cache: CacheFacts, ids: Iterable[str]) -> dict[str, NodeEntryStatus]:
    """What the node says of these entries, by id; those it says nothing of are absent."""
    wanted = frozenset(ids)
    found = cache.status.entries if cache.status is not None else ()
    return {entry.id: entry for entry in found if entry.id in wanted}


def holds_all(cache: CacheFacts, entries: Iterable[NodeEntry]) -> bool:
    """Whether the node holds every entry, verified, and its heartbeat moves."""
    ids = [entry.id for entry in entries]
    states = reported(cache, ids)
    return cache.alive and all(
        name in states
        and states[name].phase == "Ready"
        and states[name].input_key is not None
        and states[name].manifest_sha256 is not None
        for name in ids
    )


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
