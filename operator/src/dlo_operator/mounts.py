"""Which deployments mount cache roots as volumes, and the end of volumes that nobody mounts any more.

A PersistentVolume cannot be owned by a deployment, so its end is decided here: by what every deployment was last
planned to mount, and by a fresh look at the volume. Pods that still run keep theirs by the API server's own
protection. Must not be asked to sweep while some deployment that exists has not been planned.
"""

from __future__ import annotations

import threading

from dlo_api.names import OPERATOR_FIELD_MANAGER
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import PERSISTENT_VOLUME, PERSISTENT_VOLUME_CLAIM

from dlo_operator.executor import Executor
from dlo_operator.keys import Key
from dlo_operator.reconcile.volumes import VOLUME_LABEL

_OURS = {"app.kubernetes.io/managed-by": OPERATOR_FIELD_MANAGER}
Claim = tuple[str, str]  # namespace, name


class MountBook:
    """Claims by deployment; safe to use from several threads."""

    def __init__(self, gateway: Gateway, executor: Executor) -> None:
        self._gateway, self._executor = gateway, executor
        self._lock = threading.Lock()
        self._mounted: dict[Key, frozenset[str]] = {}

    def put(self, key: Key, claims: frozenset[str]) -> bool:
        """Replaces what a deployment mounts; whether it mounts less than before."""
        with self._lock:
            before = self._mounted.pop(key, frozenset())
            if claims:
                self._mounted[key] = claims
            return bool(before - claims)

    def sweep(self) -> int:
        """Deletes claims and volumes of ours that no deployment mounts; how many."""
        gone = 0
        for kind in (PERSISTENT_VOLUME_CLAIM, PERSISTENT_VOLUME):
            for obj in self._gateway.list(kind, labels=_OURS).items:
                if not self._unused(obj):
                    continue
                meta = obj["metadata"]
                gone += self._executor.delete(kind, meta["name"], meta.get("namespace"), self._unused)
        return gone

    def _unused(self, obj: Object) -> bool:
        labels = obj["metadata"].get("labels") or {}
        ours = labels.items() >= _OURS.items() and VOLUME_LABEL in labels
        with self._lock:
            used = {(key.namespace, name) for key, names in self._mounted.items() for name in names}
        return ours and _claim(obj) not in used


def _claim(obj: Object) -> Claim:
    """The claim, or the one that a volume is for."""
    if obj["kind"] == PERSISTENT_VOLUME_CLAIM.kind:
        return obj["metadata"]["namespace"], obj["metadata"]["name"]
    reference = (obj.get("spec") or {}).get("claimRef") or {}
    return reference.get("namespace", ""), reference.get("name", "")
