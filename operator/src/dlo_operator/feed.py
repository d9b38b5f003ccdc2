"""From a change in the API to the keys that it concerns. Routes and remembers versions; reads and writes nothing.

What a watch told is compared with full listings: a change that only a listing shows means that a watch sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dlo_api.identity import digest_of
from dlo_kube.gateway import Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE, NODE_WEIGHT_CACHE

from dlo_operator.keys import Key, deployment_key, node_key
from dlo_operator.reconcile.workload import DEPLOYMENT_LABEL


class Feed:
    """Turns events into keys.

    Args:
        interested: the deployments that a node's cache concerns.
        all_deployments: every deployment that is known.
    """

    def __init__(
        self, interested: Callable[[str], Iterable[Key]], all_deployments: Callable[[], Iterable[Key]]
    ) -> None:
        self._interested = interested
        self._all_deployments = all_deployments
        self._lock = threading.Lock()
        self._nodes: dict[str, str] = {}
        self._versions: dict[tuple[str, str, str], str] = {}
        self._missed: set[tuple[str, str, str, str]] = set()
        self._asleep = False

    def keys(self, obj: Mapping[str, Any], *, deleted: bool) -> frozenset[Key]:
        """The keys that a changed object concerns."""
        kind, meta = obj["kind"], obj["metadata"]
        name, namespace = meta["name"], meta.get("namespace") or ""
        with self._lock:
            if deleted:
                self._versions.pop((kind, namespace, name), None)
            else:
                self._versions[kind, namespace, name] = str(meta.get("resourceVersion"))
        if kind == DIFFUSION_DEPLOYMENT.kind:
            return frozenset({deployment_key(namespace, name)})
        if kind == NODE.kind:
            return self._of_node(obj, name, deleted=deleted)
        if kind == NODE_WEIGHT_CACHE.kind:
            return frozenset({node_key(name), *self._interested(name)})
        owner = (meta.get("labels") or {}).get(DEPLOYMENT_LABEL)
        return frozenset({deployment_key(namespace, owner)}) if owner else frozenset()

    def _of_node(self, obj: Mapping[str, Any], name: str, *, deleted: bool) -> frozenset[Key]:
        """Heartbeats of a kubelet are no news; what placement looks at is news for all deployments."""
        seen = "" if deleted else node_digest(obj)
        with self._lock:
            if self._nodes.get(name, "") == seen:
                return frozenset()
            if deleted:
                self._nodes.pop(name, None)
            else:
                self._nodes[name] = seen
        return frozenset({node_key(name), *self._all_deployments()})

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
    """What placement looks at, as one word."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    extended = {key: value for key, value in (status.get("allocatable") or {}).items() if "/" in key}
    return digest_of(
        [
            meta.get("uid"),
            dict(meta.get("labels") or {}),
            [dict(taint) for taint in spec.get("taints") or ()],
            extended,
            "deletionTimestamp" in meta,
        ]
    )[:16]
