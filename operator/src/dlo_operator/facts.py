"""Nodes and their caches as decisions see them: parsed once for each version, and shared by all reconciles.

Thousands of nodes list the same sources and entries, so equal parts are kept once. Must not be changed by readers.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from dlo_api.eligibility import engines_that_fit
from dlo_api.topology import world_size
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_kube.gateway import Object
from dlo_kube.kinds import NODE, NODE_WEIGHT_CACHE
from pydantic import BaseModel

from dlo_operator import observe
from dlo_operator.heartbeats import Heartbeats
from dlo_operator.mirror import Mirror, View
from dlo_operator.reconcile.inputs import LEASE_LATE_SECONDS, CacheFacts, NodeFacts, Shortlist
from dlo_operator.reconcile.scheduling import suits

_T = TypeVar("_T", bound=BaseModel)
#: Ways of placing pods for which the nodes that suit are remembered.
_MOST_FITS: Final = 32
#: Ages that stand for no heartbeat, one that moves, and one that is late.
_AGES: Final[Mapping[bool | None, float | None]] = {None: None, False: 0.0, True: LEASE_LATE_SECONDS}


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


class Fleet(NamedTuple):
    """All nodes and caches at one moment, and what of them concerns one deployment."""

    nodes: tuple[NodeFacts, ...]
    caches: Mapping[str, CacheFacts]
    shortlist: Shortlist


class Facts:
    """All nodes and caches, as of now, with an index of what they hold.

    A look costs by what has changed since the last one, and by what concerns the deployment, not by the number of
    nodes. Of the age of a heartbeat only whether it is late counts, as of the last look at all of them.
    """

    def __init__(self, mirror: Mirror, heartbeats: Heartbeats) -> None:
        self._mirror = mirror
        self._heartbeats = heartbeats
        self._lock = threading.Lock()
        self._node_view: Mapping[str, NodeFacts] | None = None
        self._nodes: tuple[NodeFacts, ...] = ()
        self._fits: OrderedDict[tuple[str, str, int], _Fit] = OrderedDict()
        self._seen = 0
        self._late: Mapping[str, bool] = {}
        self._caches: Mapping[str, CacheFacts] = {}
        self._raw: dict[str, CacheFacts] = {}
        self._index: dict[str, set[str]] = {}
        self._roots: Counter[str] = Counter()

    def look(self, spec: DiffusionDeploymentSpec | None, ids: Iterable[str]) -> Fleet:
        """The fleet, for a deployment that asks for these sources and entries.

        Raises Unavailable before the first full list.
        """
        with self._lock:
            self._take_nodes()
            self._take_caches()
            fit = self._fit(spec) if spec is not None else _Fit()
            near = frozenset[str]().union(*(self._index.get(name, ()) for name in ids))
            shortlist = Shortlist(fit.matching, fit.eligible, fit.by_name, near, frozenset(self._roots))
            return Fleet(self._nodes, self._caches, shortlist)

    def _take_nodes(self) -> None:
        view = self._mirror.view(NODE)
        if view is not self._node_view:
            self._node_view = view
            self._nodes = tuple(sorted(view.values(), key=lambda node: node.name))

    def _fit(self, spec: DiffusionDeploymentSpec) -> _Fit:
        """The nodes for a way of placing pods; only those that changed are judged again."""
        key = spec.placement.model_dump_json(), spec.engine.device, world_size(spec.parallelism)
        known = self._fits.setdefault(key, _Fit())
        self._fits.move_to_end(key)
        if len(self._fits) > _MOST_FITS:
            self._fits.popitem(last=False)
        if known.nodes is not self._nodes:
            known.judge(spec, self._nodes)
        return known

    def _take_caches(self) -> None:
        late = self._heartbeats.late()
        beats = late is not self._late
        # Asked before the view is: what changes in between is in the view early, and told again at the next look.
        seen, changed = self._mirror.changed(NODE_WEIGHT_CACHE, self._seen)
        view: Mapping[str, CacheFacts | None] = self._mirror.view(NODE_WEIGHT_CACHE)
        if not changed and not beats:
            return
        now = dict(self._caches)
        for name in changed | (view.keys() | self._raw.keys() if beats else frozenset()):
            before: CacheFacts | None = self._raw.get(name)
            facts: CacheFacts | None = view.get(name)
            if before is not facts:
                self._count(name, before, facts)
            if facts is None:
                self._raw.pop(name, None)
                now.pop(name, None)
                continue
            age = _AGES[late.get(name)]
            if before is not facts or now[name].lease_age != age:
                now[name] = replace(facts, lease_age=age)
            self._raw[name] = facts
        self._caches, self._seen, self._late = now, seen, late

    def _count(self, name: str, before: CacheFacts | None, after: CacheFacts | None) -> None:
        """Brings the index from one version of a cache to the next."""
        old, new = (cache.ids if cache is not None else frozenset[str]() for cache in (before, after))
        for gone in old - new:
            self._index[gone].discard(name)
            if not self._index[gone]:
                del self._index[gone]
        for come in new - old:
            self._index.setdefault(come, set()).add(name)
        for cache, sign in ((before, -1), (after, 1)):
            if cache is not None and cache.root:
                self._roots[cache.root] += sign
                if not self._roots[cache.root]:
                    del self._roots[cache.root]


class _Fit:
    """Which nodes suit one way of placing pods."""

    def __init__(self) -> None:
        self.nodes: tuple[NodeFacts, ...] = ()
        self.matching: tuple[NodeFacts, ...] = ()
        self.eligible: tuple[NodeFacts, ...] = ()
        self.by_name: dict[str, NodeFacts] = {}
        self._verdicts: dict[str, tuple[NodeFacts, bool, bool]] = {}

    def judge(self, spec: DiffusionDeploymentSpec, nodes: tuple[NodeFacts, ...]) -> None:
        """Takes these nodes, sorted by name."""
        before, self._verdicts, self.nodes = self._verdicts, {}, nodes
        for node in nodes:
            known = before.get(node.name)
            if known is None or known[0] is not node:
                matches = suits(spec, node)
                known = node, matches, matches and engines_that_fit(spec, node) > 0
            self._verdicts[node.name] = known
        self.matching = tuple(node for node, matches, _ in self._verdicts.values() if matches)
        self.by_name = {node.name: node for node, _, fits in self._verdicts.values() if fits}
        self.eligible = tuple(self.by_name.values())
