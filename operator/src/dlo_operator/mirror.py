"""The cluster as last heard of, in memory: fed by watches, by full lists, and by this process's own writes.

Never goes back to an older version of an object, and remembers what was deleted until the next full list, so that
late news of it cannot bring it back. It may lag behind, so nothing is deleted or taken away because of it alone:
whoever does that reads live first. Kinds that are not mirrored are read live.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, NamedTuple

from dlo_kube.errors import Unavailable
from dlo_kube.gateway import Gateway, Listing, Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    NAMESPACE,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Kind,
)

from dlo_operator.lean import lean
from dlo_operator.reconcile.workload import DEPLOYMENT_LABEL, ENGINE_NAME

#: Kinds that are mirrored whole, and those of which only our own objects are.
WHOLE: Final = (DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, NODE)
OURS: Final = (POD, DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET)
OUR_LABELS: Final[Mapping[str, str]] = {"app.kubernetes.io/name": ENGINE_NAME}
_NAMESPACE_SECONDS: Final = 15.0
_FREE_SECONDS: Final = 120.0
_KINDS: Final = (*WHOLE, *OURS)

Place = tuple[str, str]  # namespace, name
View = Callable[[Object], Any]


class Corrections(NamedTuple):
    """What a full list found that the mirror had not: objects that are new or changed, and last states of gone ones."""

    changed: tuple[Object, ...]
    gone: tuple[Object, ...]


@dataclass
class _Shelf:
    """The objects of one kind.

    Attributes:
        kept: JSON text by place, with its version; text takes a quarter of the memory of parsed values.
        buried: version at which a place was last seen to be deleted.
        unheard: places whose version is a write of ours that no watch has told of.
        owned: places by namespace and the deployment that they belong to.
        view: what parsed values are made by; None where nobody asks for them.
        viewed, stale: parsed values by name, and the names whose value has to be made anew.
        news, number: for each name the number of its last change, in that order, and the last number.
    """

    view: View | None = None
    kept: dict[Place, tuple[int, bytes]] = field(default_factory=dict)
    buried: dict[Place, int] = field(default_factory=dict)
    unheard: set[Place] = field(default_factory=set)
    owned: dict[Place, set[Place]] = field(default_factory=dict)
    owner: dict[Place, Place] = field(default_factory=dict)
    viewed: dict[str, Any] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    news: dict[str, int] = field(default_factory=dict)
    number: int = 0
    synced: bool = False

    def spoil(self, name: str) -> None:
        """The parsed value of a name, if there are any, is one of an earlier version."""
        if self.view is not None:
            self.stale.add(name)
            self.number += 1
            self.news.pop(name, None)
            self.news[name] = self.number


class Mirror:
    """Reads like a gateway; safe to use from several threads.

    Args:
        gateway: for full lists, and for what is not mirrored.
        views: for kinds without a namespace, what `view` makes of each object.
        monotonic: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        gateway: Gateway,
        views: Mapping[str, View] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._monotonic = monotonic
        self._namespaces: dict[str, tuple[float, Object | None]] = {}
        self._free: dict[tuple[str, str, str], float] = {}
        self._lock = threading.RLock()
        self._shelves = {kind.kind: _Shelf((views or {}).get(kind.kind)) for kind in _KINDS}

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether a full list of every kind has come in."""
        return all(shelf.synced for shelf in self._shelves.values())

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """See Gateway.get; raises Unavailable before the first full list.

        What is not ours is not mirrored, so a name that is not found is looked up live where others may hold it;
        that it is free is remembered for a while. Who then takes the name makes sure with `doubt`.
        """
        if kind == NAMESPACE:
            return self._namespace(name)
        shelf = self._shelf(kind)
        if shelf is None:
            return self._gateway.get(kind, name, namespace)
        with self._lock:
            found = shelf.kept.get((namespace or "", name))
        if found is not None:
            return _unpacked(found[1])
        return self._others(kind, (namespace or "", name)) if kind in OURS else None

    def doubt(self, kind: Kind, name: str, namespace: str) -> Object | None:
        """A live read of a name that is not mirrored."""
        self._free.pop((kind.kind, namespace, name), None)
        return self._gateway.get(kind, name, namespace)

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Listing:
        """See Gateway.list; of pods and children, our own only. Raises Unavailable before the first full list."""
        shelf = self._shelf(kind)
        if shelf is None or fields:
            return self._gateway.list(kind, namespace, labels=labels, fields=fields)
        owner = (labels or {}).get(DEPLOYMENT_LABEL)
        with self._lock:
            if owner is not None and namespace is not None:
                places: Iterable[Place] = tuple(shelf.owned.get((namespace, owner), ()))
            else:
                places = tuple(place for place in shelf.kept if namespace in (None, place[0]))
            texts = [shelf.kept[place] for place in sorted(places)]
        found = [_unpacked(text) for _, text in texts]
        latest = max((version for version, _ in texts), default=0)
        return Listing(tuple(obj for obj in found if _carries(obj, labels)), str(latest))

    def places(self, kind: Kind) -> tuple[Place, ...]:
        """Namespace and name of each object. Raises Unavailable before the first full list."""
        shelf = self._shelf(kind)
        with self._lock:
            return tuple(shelf.kept) if shelf is not None else ()

    def view(self, kind: Kind) -> Mapping[str, Any]:
        """What the view of the kind made of each object, by name; not to be changed.

        Raises:
            Unavailable: there was no full list yet.
        """
        shelf = self._shelf(kind)
        assert shelf is not None  # noqa: S101 - views are of mirrored kinds
        assert shelf.view is not None  # noqa: S101
        with self._lock:
            if shelf.stale:
                made = dict(shelf.viewed)
                for name in shelf.stale:
                    found = shelf.kept.get(("", name))
                    if found is None:
                        made.pop(name, None)
                    else:
                        made[name] = shelf.view(_unpacked(found[1]))
                shelf.viewed, shelf.stale = made, set()
            return shelf.viewed

    def changed(self, kind: Kind, since: int) -> tuple[int, frozenset[str]]:
        """Names of a kind without a namespace that have changed or gone since a number, and the number of now."""
        with self._lock:
            shelf = self._shelves[kind.kind]
            found = takewhile(lambda name: shelf.news[name] > since, reversed(shelf.news))
            return shelf.number, frozenset(found)

    # -- being told ------------------------------------------------------------------------------------------

    def take(self, obj: Mapping[str, Any], *, deleted: bool) -> bool:
        """Takes an event of a watch; whether it is news to somebody.

        What a full list has shown already is none; the echo of an own write is, once.
        """
        place, version = _place(obj), _version(obj)
        with self._lock:
            shelf = self._shelves[obj["kind"]]
            if deleted:
                return self._bury(shelf, place, version)
            known = shelf.kept.get(place)
            if known is not None and known[0] == version:
                heard = place not in shelf.unheard
                shelf.unheard.discard(place)
                return not heard
            if not self._put(shelf, place, version, obj):
                return False
            shelf.unheard.discard(place)
            return True

    def wrote(self, obj: Object) -> None:
        """Takes what the API server answered to a write of ours; a kind that is not mirrored is let go."""
        with self._lock:
            shelf = self._shelves.get(obj["kind"])
            place = _place(obj)
            if shelf is not None and self._put(shelf, place, _version(obj), obj):
                shelf.unheard.add(place)

    def deleted(self, obj: Object) -> None:
        """Takes that this version of an object was deleted by us; a later version still enters."""
        with self._lock:
            shelf = self._shelves.get(obj["kind"])
            if shelf is not None:
                self._bury(shelf, _place(obj), _version(obj))

    def refresh(self, kind: Kind) -> Corrections:
        """Compares with a full list, page by page, and takes what it shows. Raises KubeError.

        What the list does not have is gone, unless it is newer than the list.
        """
        shelf = self._shelves[kind.kind]
        self._namespaces, self._free = {}, {}
        changed: list[Object] = []
        seen: set[Place] = set()
        as_of = 0
        for page in self._gateway.pages(kind, labels=OUR_LABELS if kind in OURS else None):
            as_of = as_of or int(page.resource_version or 0)
            with self._lock:
                for obj in page.items:
                    place = _place(obj)
                    seen.add(place)
                    if self._put(shelf, place, _version(obj), obj):
                        shelf.unheard.discard(place)
                        changed.append(_head(obj))
        with self._lock:
            ghosts = [p for p, (version, _) in shelf.kept.items() if p not in seen and version <= as_of]
            gone = tuple(_head(_unpacked(shelf.kept[place][1])) for place in ghosts)
            for place in ghosts:
                self._bury(shelf, place, as_of)
            # Events and answers from before this list are not late by that much.
            shelf.buried = {p: version for p, version in shelf.buried.items() if version >= as_of}
            known = {name for _, name in (*shelf.kept, *shelf.buried)}
            shelf.news = {name: number for name, number in shelf.news.items() if name in known}
            shelf.synced = True
        return Corrections(tuple(changed), gone)

    # -- inside ----------------------------------------------------------------------------------------------

    def _others(self, kind: Kind, place: Place) -> Object | None:
        key, now = (kind.kind, *place), self._monotonic()
        if now < self._free.get(key, now):
            return None
        found = self._gateway.get(kind, place[1], place[0])
        if found is None:
            self._free[key] = now + _FREE_SECONDS
        return found

    def _namespace(self, name: str) -> Object | None:
        """Namespaces need no watch: their labels change rarely, and many deployments ask for the same one."""
        now = self._monotonic()
        known = self._namespaces.get(name)
        if known is None or now - known[0] >= _NAMESPACE_SECONDS:
            known = now, self._gateway.get(NAMESPACE, name)
            self._namespaces[name] = known
        return known[1]

    def _shelf(self, kind: Kind) -> _Shelf | None:
        shelf = self._shelves.get(kind.kind)
        if shelf is not None and not shelf.synced:
            raise Unavailable(f"{kind.plural} were not listed yet", hint="it is tried again by itself")
        return shelf

    def _put(self, shelf: _Shelf, place: Place, version: int, obj: Mapping[str, Any]) -> bool:
        """Takes a version if it is newer than what is known; whether it was."""
        known = shelf.kept.get(place)
        if version <= max(known[0] if known is not None else 0, shelf.buried.get(place, 0)):
            return False
        shelf.buried.pop(place, None)
        shelf.kept[place] = version, json.dumps(lean(obj), separators=(",", ":")).encode()
        self._index(shelf, place, (obj["metadata"].get("labels") or {}).get(DEPLOYMENT_LABEL))
        shelf.spoil(place[1])
        return True

    def _bury(self, shelf: _Shelf, place: Place, version: int) -> bool:
        known = shelf.kept.get(place)
        if known is not None and known[0] > version:
            return False
        shelf.buried[place] = max(version, shelf.buried.get(place, 0))
        shelf.unheard.discard(place)
        if known is None:
            return False
        del shelf.kept[place]
        self._index(shelf, place, None)
        shelf.spoil(place[1])
        return True

    @staticmethod
    def _index(shelf: _Shelf, place: Place, owner: str | None) -> None:
        before = shelf.owner.pop(place, None)
        if before is not None:
            shelf.owned[before].discard(place)
            if not shelf.owned[before]:
                del shelf.owned[before]
        if owner:
            shelf.owner[place] = (place[0], owner)
            shelf.owned.setdefault((place[0], owner), set()).add(place)


def kinds() -> tuple[Kind, ...]:
    """Every mirrored kind."""
    return _KINDS


def _place(obj: Mapping[str, Any]) -> Place:
    meta = obj["metadata"]
    return meta.get("namespace") or "", meta["name"]


def _version(obj: Mapping[str, Any]) -> int:
    """Versions are numbers that grow: on every API server over etcd, and by promise from Kubernetes 1.35 on."""
    return int(obj["metadata"]["resourceVersion"])


def _unpacked(text: bytes) -> Object:
    found: Object = json.loads(text)
    return found


def _head(obj: Mapping[str, Any]) -> Object:
    """What it takes to know whom an object concerns."""
    kept = lean(obj)
    return kept if obj["kind"] == NODE.kind else {"kind": kept["kind"], "metadata": kept["metadata"]}


def _carries(obj: Object, labels: Mapping[str, str] | None) -> bool:
    has = obj["metadata"].get("labels") or {}
    return all(has.get(name) == value for name, value in (labels or {}).items())
