"""What every deployment needs of every node, as last planned; kept in memory, made anew after a start.

While a deployment that exists has not been planned, its needs are unknown, and nobody may take anything away
from a node: see `shrinkable`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from dlo_operator.keys import Key
from dlo_operator.reconcile.plan import NodeClaim


class Version(NamedTuple):
    """Which deployment, and which of its specs."""

    uid: str
    generation: int


_NONE: Final = Version("", 0)


class ClaimBook:
    """Claims by deployment and node; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[Key, tuple[Version, dict[str, NodeClaim]]] = {}
        self._by_node: dict[str, set[Key]] = {}

    def put(self, key: Key, version: Version, claims: Mapping[str, NodeClaim]) -> frozenset[str]:
        """Replaces a deployment's claims by those of a version; the nodes for which that changes something."""
        with self._lock:
            _, before = self._claims.get(key, (_NONE, {}))
            self._claims[key] = (version, dict(claims))
            return self._changed(key, before, claims)

    def drop(self, key: Key) -> frozenset[str]:
        """Forgets a deployment that is gone; the nodes that held something for it."""
        with self._lock:
            _, before = self._claims.pop(key, (_NONE, {}))
            return self._changed(key, before, {})

    def of_node(self, node: str) -> tuple[NodeClaim, ...]:
        """All claims on a node, in order of their deployments."""
        with self._lock:
            return tuple(self._claims[key][1][node] for key in sorted(self._by_node.get(node, ())))

    def claimants(self, node: str) -> frozenset[Key]:
        """The deployments that claim something of a node."""
        with self._lock:
            return frozenset(self._by_node.get(node, ()))

    def deployments(self) -> frozenset[Key]:
        """Every deployment that was planned."""
        with self._lock:
            return frozenset(self._claims)

    def source_ids(self) -> frozenset[str]:
        """Every source that somebody claims."""
        with self._lock:
            return frozenset(
                source.id
                for _, claims in self._claims.values()
                for claim in claims.values()
                for source in claim.claim.sources
            )

    def shrinkable(self, existing: Iterable[tuple[Key, Version]]) -> bool:
        """Whether the needs of all existing deployments, as they are specified now, are known."""
        with self._lock:
            return all(key in self._claims and self._claims[key][0] == version for key, version in existing)

    def _changed(
        self, key: Key, before: Mapping[str, NodeClaim], after: Mapping[str, NodeClaim]
    ) -> frozenset[str]:
        for node in before.keys() - after.keys():
            self._by_node[node].discard(key)
        for node in after:
            self._by_node.setdefault(node, set()).add(key)
        return frozenset(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
