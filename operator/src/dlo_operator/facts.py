"""Nodes and their caches as decisions see them: parsed once for each version, and shared by all reconciles.

Thousands of nodes list the same sources and entries, so equal parts are kept once. Must not be changed by readers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar
from weakref import WeakValueDictionary

from dlo_kube.gateway import Object
from dlo_kube.kinds import NODE, NODE_WEIGHT_CACHE
from pydantic import BaseModel

from dlo_operator import observe
from dlo_operator.heartbeats import Heartbeats
from dlo_operator.mirror import Mirror, View
from dlo_operator.reconcile.inputs import LEASE_LATE_SECONDS, CacheFacts, NodeFacts

_T = TypeVar("_T", bound=BaseModel)


class Parts:
    """Parses caches, keeping equal parts of them once."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, BaseModel] = WeakValueDictionary()

    def read_cache(self, obj: Object) -> CacheFacts | None:
        """A NodeWeightCache without its heartbeat; None for one that is being deleted."""
        if "deletionTimestamp" in obj["metadata"]:
            return None
        facts = observe.read_cache(obj, None)
        spec = facts.spec.model_copy(
            update={"sources": self._shared(facts.spec.sources), "entries": self._shared(facts.spec.entries)}
        )
        status = facts.status
        if status is not None:
            status = status.model_copy(
                update={"sources": self._shared(status.sources), "entries": self._shared(status.entries)}
            )
        return replace(facts, spec=spec, status=status)

    def _shared(self, items: Iterable[_T]) -> tuple[_T, ...]:
        return tuple(self._once(item) for item in items)

    def _once(self, item: _T) -> _T:
        key = f"{type(item).__name__}{item.model_dump_json(exclude_unset=True)}"
        known = self._known.setdefault(key, item)
        return known if isinstance(known, type(item)) else item


def mirror_views() -> dict[str, View]:
    """What a mirror has to make of nodes and caches for `Facts`."""
    return {NODE.kind: observe.read_node, NODE_WEIGHT_CACHE.kind: Parts().read_cache}


class Facts:
    """All nodes and caches, as of now."""

    def __init__(self, mirror: Mirror, heartbeats: Heartbeats) -> None:
        self._mirror = mirror
        self._heartbeats = heartbeats
        self._lock = threading.Lock()
        self._aged: dict[str, tuple[CacheFacts, CacheFacts]] = {}

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Every Node. Raises Unavailable before the first full list."""
        return tuple(self._mirror.view(NODE).values())

    def caches(self) -> Mapping[str, CacheFacts]:
        """Every NodeWeightCache with the state of its heartbeat, by name; of its age, only whether it is late counts.

        Raises Unavailable before the first full list.
        """
        view, ages = self._mirror.view(NODE_WEIGHT_CACHE), self._heartbeats.ages()
        with self._lock:
            before, self._aged = self._aged, {}
            for name, facts in view.items():
                if facts is None:
                    continue
                age, known = ages.get(name), before.get(name)
                if known is None or known[0] is not facts or _state(known[1].lease_age) != _state(age):
                    known = facts, replace(facts, lease_age=age)
                self._aged[name] = known
            return {name: aged for name, (_, aged) in self._aged.items()}


def _state(age: float | None) -> bool | None:
    return None if age is None else age >= LEASE_LATE_SECONDS
