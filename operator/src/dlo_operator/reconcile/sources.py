"""Resolve once, pin for all. Pure.

One node's agent resolves a source; its answer is the pin of every other node. A pin stays for as long as
anything refers to the source: a branch that moves changes nothing, a change of `spec.model.source` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource, Pin, SourceStatus

from dlo_operator.reconcile.inputs import CacheFacts
from dlo_operator.reconcile.record import Record
from dlo_operator.reconcile.reports import REFUSED, blames_source


@dataclass(frozen=True)
class Resolution:
    """What is known of the deployment's source.

    Attributes:
        source: as nodes shall list it; without a pin, only `resolver` lists it.
        resolver: the node that resolves; empty once there is a pin, or when there is no node.
        facts: what an agent found under the pin, or said when it could not; None when nothing is known.
    """

    source: NodeSource
    resolver: str = ""
    facts: SourceStatus | None = None

    @property
    def pinned(self) -> bool:
        """Whether the source stands for known bytes."""
        return self.source.pin.digest != ""


def resolve(
    spec: DiffusionDeploymentSpec,
    identity: str,
    candidates: Iterable[str],
    caches: Mapping[str, CacheFacts],
    records: Iterable[Record],
    *,
    near: Mapping[str, CacheFacts] | None = None,
    secret_name: str = "",
) -> Resolution:
    """The state of the source `identity`.

    Args:
        spec: an accepted spec.
        identity: id of its source.
        candidates: nodes that may resolve it, best first.
        caches: every node's cache.
        records: what running revisions stand on; their pins come before any other.
        near: at least the caches that list the source; None to look through all.
        secret_name: copy of the credential in the agents' namespace.
    """
    source = NodeSource(
        id=identity, source=spec.model.source, variant=spec.model.variant, secret_name=secret_name
    )
    near = caches if near is None else near
    pin = _pin(identity, near, records)
    if pin is not None:
        pinned = source.model_copy(update={"pin": pin})
        found = (_status(cache, identity) for cache in _holders(identity, near))
        facts = next(
            (s for s in found if s is not None and s.digest == pin.digest and s.reason is None), None
        )
        return Resolution(pinned, facts=facts)
    resolver = _resolver(identity, tuple(candidates), caches)
    return Resolution(source, resolver, _status(caches.get(resolver), identity))


def complaints(
    identity: str, nodes: Iterable[str], caches: Mapping[str, CacheFacts], entries: Iterable[NodeEntry]
) -> dict[str, tuple[str, str]]:
    """Word and message of each node that cannot read what is pinned, as an agent or a failed build says."""
    found: dict[str, tuple[str, str]] = {}
    ids = frozenset(entry.id for entry in entries)
    for name in nodes:
        cache = caches.get(name)
        if cache is None or cache.status is None:
            continue
        state = _status(cache, identity)
        if state is not None and state.reason not in (None, "Hashing") and state.reason not in REFUSED:
            found[name] = (state.reason or "", state.message or "")
            continue
        for entry in cache.status.entries:
            blamed = entry.id in ids and entry.phase == "Failed" and blames_source(entry.reason or "")
            if blamed and name not in found:
                found[name] = (entry.reason or "", entry.message or "")
    return found


def _pin(identity: str, caches: Mapping[str, CacheFacts], records: Iterable[Record]) -> Pin | None:
    for record in records:
        for source in record.claim.sources:
            if source.id == identity and source.pin.digest:
                return source.pin
    holders = _holders(identity, caches)
    for cache in holders:
        if cache.sources[identity].pin.digest:
            return cache.sources[identity].pin
    # The answer of a node that was asked: it lists the source without a pin.
    for cache in holders:
        state = _status(cache, identity)
        if state is not None and state.digest and state.reason is None and cache.alive:
            return Pin(revision=state.revision or "", digest=state.digest)
    return None


def _holders(identity: str, caches: Mapping[str, CacheFacts]) -> tuple[CacheFacts, ...]:
    """The caches of nodes that are told to read the source, by name."""
    found = [(name, cache) for name, cache in caches.items() if identity in cache.sources]
    return tuple(cache for _, cache in sorted(found, key=lambda item: item[0]))


def _resolver(identity: str, candidates: tuple[str, ...], caches: Mapping[str, CacheFacts]) -> str:
    def asked(name: str) -> bool:
        return name in caches and identity in caches[name].sources

    alive = [name for name in candidates if name in caches and caches[name].alive]
    return next((name for name in alive if asked(name)), next(iter((*alive, *candidates)), ""))


def _status(cache: CacheFacts | None, identity: str) -> SourceStatus | None:
    if cache is None or cache.status is None:
        return None
    return next((state for state in cache.status.sources if state.id == identity), None)
