"""The PersistentVolume and claim through which pods mount a cache root where they may not name a host path. Pure.

One read-only pair for each namespace and node class (root path), bound to each other beforehand. It is a local
volume, since the kubelet mounts those with the volume's own options: with `ro`, whatever a pod asks for. Container
runtimes of newer releases clear that for a container which does not ask for it, so that the chart's admission policy
holds every pod to ask. No deployment owns the pair: a volume is cluster-scoped, and several deployments of the
namespace share it. Whoever mounts it says so (`claims_in_use`), and what nobody mounts any more is deleted by the
controller.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from dlo_api.identity import digest_of
from dlo_api.names import OPERATOR_FIELD_MANAGER, label

from dlo_operator.reconcile.inputs import Object, VolumeFacts
from dlo_operator.reconcile.view import View

PREFIX: Final = "dlo-cache-"
VOLUME_LABEL: Final = label("cache-volume")
_LENGTH: Final = 16
#: Claims ask for it and volumes offer it; a host folder has no size of its own.
_NOMINAL: Final = "1Gi"
#: A local volume must say on which nodes it is. The class's nodes are not known here, and the path is the same on all
#: of them: so, every node that a kubelet of Linux has labelled.
_EVERYWHERE: Final[Object] = {
    "required": {
        "nodeSelectorTerms": [
            {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}
        ]
    }
}


def claim_name(root: str) -> str:
    """The claim's name, in every namespace: by the path of the root."""
    return f"{PREFIX}{digest_of(root)[:_LENGTH]}"


def volume_name(namespace: str, root: str) -> str:
    """The volume's name: by namespace and path."""
    return f"dlo-{digest_of([namespace, root])[:_LENGTH]}"


def pair(namespace: str, root: str, standing: VolumeFacts | None) -> tuple[Object, ...]:
    """Claim and volume, in the order in which they are applied.

    The volume names the claim's uid once there is one, so that the two bind again whichever of them was deleted
    and made anew.
    """
    facts = standing or VolumeFacts()
    claim, volume = claim_name(root), volume_name(namespace, root)
    labels = {"app.kubernetes.io/managed-by": OPERATOR_FIELD_MANAGER, VOLUME_LABEL: claim}
    reference: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "name": claim,
        "namespace": namespace,
    }
    if facts.claim_uid:
        reference["uid"] = facts.claim_uid
    return (
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace, "labels": dict(labels)},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeMode": "Filesystem",
                "volumeName": volume,
                "resources": {"requests": {"storage": _NOMINAL}},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume, "labels": dict(labels)},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "capacity": {"storage": _NOMINAL},
                "storageClassName": "",
                "volumeMode": "Filesystem",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": reference,
                "local": {"path": root},
                "mountOptions": ["ro"],
                "nodeAffinity": copy.deepcopy(_EVERYWHERE),
            },
        },
    )


def claims_in_use(view: View) -> frozenset[str]:
    """Names of the claims that pods to come mount; those that run keep theirs by the API server's own protection."""
    spec, record, workload = view.inputs.spec, view.record, view.inputs.workload
    used = set(_claims_of(workload.template.get("spec") or {})) if workload is not None else set()
    if spec is not None and spec.cache.mount == "PersistentVolume" and record is not None:
        used.add(claim_name(record.root))
    return frozenset(name for name in used if name.startswith(PREFIX))


def _claims_of(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the claims that a pod's spec mounts."""
    return tuple(
        str(volume["persistentVolumeClaim"].get("claimName", ""))
        for volume in pod.get("volumes") or ()
        if volume.get("persistentVolumeClaim")
    )
