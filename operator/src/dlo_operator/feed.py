"""From a change in the API to the keys that it concerns. Routes and remembers versions; reads and writes nothing.

What a watch told is compared with full listings: a change that only a listing shows means that a watch sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dlo_api.conditions import STORAGE_HEALTHY
from dlo_api.identity import digest_of
from dlo_kube.gateway import Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE, NODE_WEIGHT_CACHE

from dlo_operator.keys import Key, deployment_key, node_key
from dlo_operator.nodes import WARM_PREFIX
from dlo_operator.reconcile.workload import DEPLOYMENT_LABEL


class Feed:
    """Turns events into keys.

    Args:
        interested: the deployments that a node's cache concerns; told whether more of it has changed than its entries.
        all_deployments: every deployment that is known.
    """

    def __init__(
        self, interested: Callable[[str, bool], Iterable[Key]], all_deployments: Callable[[], Iterable[Key]]
    ) -> None:
        self._interested = interested
        self._all_deployments = all_deployments
        self._lock = threading.Lock()
        self._nodes: dict[str, str] = {}
        self._fitness: dict[str, str] = {}
        self._versions: dict[tuple[str, str, str], str] = {}
        self._missed: set[tuple[str, str, str, str]] = set()
        self._asleep = False

    def keys(self, obj: Mapping[str, Any], *, deleted: bool) -> frozenset[Key]:
        """The keys that an event of a watch concerns."""
        self.heard(obj, deleted=deleted)
        return self.concerned(obj, deleted=deleted)

    def heard(self, obj: Mapping[str, Any], *, deleted: bool) -> None:
        """Remembers what a watch has told, for `compare`."""
        kind, meta = obj["kind"], obj["metadata"]
        if kind != DIFFUSION_DEPLOYMENT.kind:
            return
        key = (kind, meta.get("namespace") or "", meta["name"])
        with self._lock:
            if deleted:
                self._versions.pop(key, None)
            else:
                self._versions[key] = str(meta.get("resourceVersion"))

    def concerned(self, obj: Mapping[str, Any], *, deleted: bool) -> frozenset[Key]:
        """The keys that a changed object concerns, whoever found the change."""
        kind, meta = obj["kind"], obj["metadata"]
        name, namespace = meta["name"], meta.get("namespace") or ""
        if kind == DIFFUSION_DEPLOYMENT.kind:
            return frozenset({deployment_key(namespace, name)})
        if kind == NODE.kind:
            return self._of_node(obj, name, deleted=deleted)
        if kind == NODE_WEIGHT_CACHE.kind:
            wide = self._new(self._fitness, name, "" if deleted else fitness_digest(obj))
            return frozenset({node_key(name), *self._interested(name, wide)})
        owner = (meta.get("labels") or {}).get(DEPLOYMENT_LABEL)
        return frozenset({deployment_key(namespace, owner)}) if owner else frozenset()

    def _of_node(self, obj: Mapping[str, Any], name: str, *, deleted: bool) -> frozenset[Key]:
        """Heartbeats of a kubelet are no news; what placement looks at is news for all deployments."""
        if not self._new(self._nodes, name, "" if deleted else node_digest(obj)):
            return frozenset()
        return frozenset({node_key(name), *self._all_deployments()})

    def _new(self, known: dict[str, str], name: str, digest: str) -> bool:
        """Whether a digest (empty: it is gone) differs from the last one; remembers it."""
        with self._lock:
            if known.get(name, "") == digest:
                return False
            if digest:
                known[name] = digest
            else:
                known.pop(name, None)
            return True

    def compare(self, kind: str, listed: Iterable[Object]) -> tuple[int, frozenset[Key]]:
        """What a full listing shows and no watch told: how many, and the keys of what is gone.

        Call it with what was listed at least some seconds after the last change that matters; a version missed
        twice in a row, still the same, counts as a sleeping watch.
        """
        found = {
            (kind, obj["metadata"].get("namespace") or "", obj["metadata"]["name"]): str(
                obj["metadata"]["resourceVersion"]
            )
            for obj in listed
        }
        with self._lock:
            told = {key: version for key, version in self._versions.items() if key[0] == kind}
            ghosts = told.keys() - found.keys()
            for key in ghosts:
                del self._versions[key]
            missed = {(*key, version) for key, version in found.items() if told.get(key) != version}
            missed |= {(*key, "gone") for key in ghosts}
            before = {item for item in self._missed if item[0] == kind}
            self._asleep = bool(before & missed)
            self._missed = (self._missed - before) | missed
        gone = frozenset(
            deployment_key(namespace, name)
            for _, namespace, name in ghosts
            if kind == DIFFUSION_DEPLOYMENT.kind
        )
        return len(missed), gone

    @property
    def asleep(self) -> bool:
        """Whether a watch was found to have told nothing of a change for a whole interval."""
        return self._asleep


def node_digest(obj: Mapping[str, Any]) -> str:
    """What placement looks at, as one word; our own labels of warm nodes are no ground for it."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    extended = {key: value for key, value in (status.get("allocatable") or {}).items() if "/" in key}
    return digest_of(
        [
            meta.get("uid"),
            {
                key: value
                for key, value in (meta.get("labels") or {}).items()
                if not key.startswith(WARM_PREFIX)
            },
            [dict(taint) for taint in spec.get("taints") or ()],
            extended,
            "deletionTimestamp" in meta,
        ]
    )[:16]


def fitness_digest(obj: Mapping[str, Any]) -> str:
    """What of a cache counts for deployments that hold nothing on its node, as one word: whether it can be used."""
    status = obj.get("status") or {}
    healthy = [c for c in status.get("conditions") or () if c.get("type") == STORAGE_HEALTHY]
    return digest_of(
        [
            obj["metadata"].get("uid"),
            bool(status),
            [(c.get("status"), c.get("reason")) for c in healthy],
            (status.get("root") or {}).get("path"),
            status.get("memory"),
            "deletionTimestamp" in obj["metadata"],
        ]
    )[:16]
