"""Which nodes hold a deployment's entries. Pure, and stable: what is warm or being warmed stays chosen.

`Needed` takes as many nodes as the replicas need, and spares; `All` takes every eligible one; a node where a
pod of the deployment was bound is always taken. Of the nodes that are not ready yet, only so many build at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from dlo_api.eligibility import engines_that_fit
from dlo_api.quantity import format_quantity
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeEntryStatus, NodeWeightCacheStatus

from dlo_operator.reconcile import reports
from dlo_operator.reconcile.entries import holds_all, reported
from dlo_operator.reconcile.inputs import CacheFacts, NodeFacts

_STOPPED: Final = frozenset({"Failed", "Quarantined"})
#: Rank of a node without a cache object: it comes after those that report, and before none.
_UNKNOWN: Final = (True, False, True, True)


@dataclass(frozen=True)
class Needs:
    """What a node must have for the entries.

    Attributes:
        bytes: size of all of them; None while it is not known.
        mappings: memory mappings of one engine process; None while it is not known.
    """

    bytes: int | None = None
    mappings: int | None = None


@dataclass(frozen=True)
class Placed:
    """The choice, by node name.

    Attributes:
        desired: nodes that should hold the entries, best first.
        claimed: those of them that are told so now.
        ready, warming, failed: the desired ones by state; a desired node that waits for its turn is in none.
    """

    desired: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    warming: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def shortage(cache: CacheFacts, needs: Needs, entries: Iterable[NodeEntry]) -> tuple[str, str] | None:
    """Reason and words when the node cannot take the entries; None when it can, or it cannot be told.

    The words hold no number that moves by itself: each change of a status is a write.
    """
    status, entries = cache.status, tuple(entries)
    if status is None:
        return None
    states = tuple(cache.states[entry.id] for entry in entries if entry.id in cache.states)
    return (
        _unhealthy(status)
        or _told(states)
        or _few_mappings(status, needs)
        or (None if holds_all(cache, entries) else _lacking(status, needs, states))
    )


def cramped(cache: CacheFacts, needs: Needs) -> bool:
    """Whether there is a `shortage` on a node that none of the entries concerns."""
    room = cache.room
    if room.unhealthy:
        return True
    if needs.mappings is not None and room.mappings is not None and room.mappings < needs.mappings:
        return True
    if needs.bytes is None:
        return False
    return (room.free is not None and room.free < needs.bytes) or (
        room.budget is not None and room.budget < needs.bytes
    )


def _unhealthy(status: NodeWeightCacheStatus) -> tuple[str, str] | None:
    for condition in status.conditions:
        if condition.type == "StorageHealthy" and condition.status == "False":
            reason = reports.of_storage(condition.reason)
            return reason, reports.spoken(condition.reason, reason, condition.message)
    return None


def _told(states: tuple[NodeEntryStatus, ...]) -> tuple[str, str] | None:
    """The agent's own word on an entry that is not there."""
    for state in states:
        reason = reports.of_room(state.reason) if state.reason is not None else None
        if state.phase != "Ready" and reason is not None:
            return reason, reports.spoken(state.reason, reason, state.message)
    return None


def _few_mappings(status: NodeWeightCacheStatus, needs: Needs) -> tuple[str, str] | None:
    most = status.memory.max_map_count if status.memory is not None else None
    if most is None or needs.mappings is None or most >= needs.mappings:
        return None
    return (
        "MapCountTooLow",
        f"vm.max_map_count is {most}, an engine's process needs up to {needs.mappings} mappings"
        f" — set it to {max(65_530, needs.mappings)} on the node",
    )


def _lacking(
    status: NodeWeightCacheStatus, needs: Needs, states: tuple[NodeEntryStatus, ...]
) -> tuple[str, str] | None:
    if needs.bytes is None:
        return None
    free = status.root.free_bytes if status.root is not None else None
    # Bytes that a running build has taken are neither free nor lacking: then the agent's word counts.
    if free is not None and not states and free < needs.bytes:
        return (
            "InsufficientDisk",
            f"the entries need {format_quantity(needs.bytes)} on the cache's disk, less is free",
        )
    budget = status.memory.warm_budget_bytes if status.memory is not None else None
    if budget and budget < needs.bytes:
        return (
            "InsufficientHostMemory",
            f"the entries need {format_quantity(needs.bytes)} of memory, {format_quantity(budget)} may be warmed",
        )
    return None


def choose(
    spec: DiffusionDeploymentSpec,
    identity: str,
    eligible: Iterable[NodeFacts] | Mapping[str, NodeFacts],
    caches: Mapping[str, CacheFacts],
    entries: tuple[NodeEntry, ...],
    *,
    near: Iterable[str] | None = None,
    bound: frozenset[str] = frozenset(),
    needs: Needs = Needs(),
) -> Placed:
    """The nodes for these entries.

    Args:
        spec: an accepted spec.
        identity: of the deployment; spreads deployments over nodes that are equally good.
        eligible: nodes on which its pods may run; by name, or in any order.
        caches: what nodes hold, by name.
        entries: what they shall hold.
        near: at least the nodes that are told of one of them, or tell of one; None to look at all.
        bound: nodes on which a pod of the deployment is.
        needs: what a node must have for them.
    """
    nodes = eligible if isinstance(eligible, Mapping) else {node.name: node for node in eligible}
    close = frozenset(caches if near is None or not entries else near) & nodes.keys() & caches.keys()
    ready = frozenset(name for name in close if holds_all(caches[name], entries))
    first = ready | (bound & nodes.keys())

    def order() -> Iterator[str]:
        """Best first; those that hold nothing yet are looked at only when it comes to them."""
        rank = _Rank(identity, caches, frozenset(entry.id for entry in entries), entries, needs)
        yield from sorted(
            first, key=lambda name: (name not in bound, name not in ready, *rank.of(name), rank.lot(name))
        )
        groups: dict[tuple[bool, ...], list[str]] = {}
        for name in nodes:
            if name not in first:
                found = rank.of(name) if name in close else rank.of_idle(name)
                groups.setdefault(found, []).append(name)
        for found in sorted(groups):
            yield from sorted(groups[found], key=rank.lot)

    scope = spec.cache.prewarm.scope
    desired = list(order()) if scope == "All" else _needed(spec, nodes, order(), bound)
    kept = [name for name in desired if name in ready]
    failed = [name for name in desired if name not in ready and _stopped(caches.get(name), entries)]
    building = [name for name in desired if name not in ready and name not in failed]
    turn = building[: spec.cache.prewarm.max_parallel_nodes]
    claimed = {*kept, *failed, *turn, *(name for name in desired if name in bound)}
    return Placed(
        desired=tuple(desired),
        claimed=tuple(name for name in desired if name in claimed),
        ready=tuple(kept),
        warming=tuple(name for name in building if name in claimed),
        failed=tuple(failed),
    )


def _needed(
    spec: DiffusionDeploymentSpec, nodes: Mapping[str, NodeFacts], order: Iterator[str], bound: frozenset[str]
) -> list[str]:
    """The first nodes that hold all replicas, then the spares; at least `minReadyNodes`, and all bound ones."""
    prewarm = spec.cache.prewarm
    room = 0
    taken: list[str] = []
    while room < max(1, spec.replicas) and (name := next(order, None)) is not None:
        room += engines_that_fit(spec, nodes[name])
        taken.append(name)
    count = max(len(taken) + prewarm.spare_nodes, prewarm.min_ready_nodes, len(bound & nodes.keys()))
    return [*taken, *islice(order, count - len(taken))]


@dataclass(frozen=True)
class _Rank:
    """How good a node is for a deployment's entries; smaller is better."""

    identity: str
    caches: Mapping[str, CacheFacts]
    ids: frozenset[str]
    entries: tuple[NodeEntry, ...]
    needs: Needs

    def of(self, name: str) -> tuple[bool, ...]:
        """Of any node."""
        cache = self.caches.get(name)
        if cache is None:
            return _UNKNOWN
        short = shortage(cache, self.needs, self.entries) is not None
        return cache.late, short, not cache.alive, not self.ids <= cache.listed

    def of_idle(self, name: str) -> tuple[bool, ...]:
        """The same of a node that none of the entries concerns, for less."""
        cache = self.caches.get(name)
        if cache is None:
            return _UNKNOWN
        return cache.late, cramped(cache, self.needs), not cache.alive, True

    def lot(self, name: str) -> bytes:
        """Spreads deployments over nodes that are equally good."""
        return hashlib.sha256(f"{self.identity}/{name}".encode()).digest()


def _stopped(cache: CacheFacts | None, entries: tuple[NodeEntry, ...]) -> bool:
    if cache is None:
        return False
    states = reported(cache, (entry.id for entry in entries))
    return any(state.phase in _STOPPED for state in states.values())
