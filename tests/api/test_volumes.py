"""Cache roots as volumes, with the real binder, the real protection of claims in use, and the real Pod Security."""

from __future__ import annotations

from typing import Any

from api.life import CONTROLLERS
from api.test_operator import Stage, stage
from dlo_kube.gateway import Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    NAMESPACE,
    PERSISTENT_VOLUME,
    PERSISTENT_VOLUME_CLAIM,
    POD,
)
from unit.api.manifests import manifest

__all__ = ["stage"]

BINDERS = (
    "persistentvolume-binder-controller",
    "persistentvolume-protection-controller",
    "persistentvolumeclaim-protection-controller",
)


def pair(stage: Stage) -> tuple[Object | None, Object | None]:
    """The volume and the claim, as far as they are there."""
    volumes = stage.gateway.list(PERSISTENT_VOLUME).items
    claims = stage.gateway.list(PERSISTENT_VOLUME_CLAIM, stage.namespace).items
    assert len(volumes) <= 1
    assert len(claims) <= 1
    return (volumes[0] if volumes else None), (claims[0] if claims else None)


def bound(stage: Stage) -> str:
    """The uid of the claim, when both halves are bound to each other; empty when they are not."""
    volume, claim = pair(stage)
    if volume is None or claim is None or "deletionTimestamp" in claim["metadata"]:
        return ""
    phases = {half.get("status", {}).get("phase") for half in (volume, claim)}
    uid: str = claim["metadata"]["uid"]
    return uid if phases == {"Bound"} and volume["spec"]["claimRef"]["uid"] == uid else ""


def reason(stage: Stage) -> str:
    """Why it is not ready."""
    conditions = (stage.status() or {}).get("conditions", [])
    return next((str(c["reason"]) for c in conditions if c["type"] == "Ready"), "")


def spec(stage: Stage, changes: dict[str, Any]) -> None:
    """The user changes the spec."""
    place = {"name": "digits", "namespace": stage.namespace}
    head = {"apiVersion": DIFFUSION_DEPLOYMENT.api_version, "kind": DIFFUSION_DEPLOYMENT.kind}
    stage.gateway.apply({**head, "metadata": place, "spec": changes}, manager="user")


def test_a_namespace_that_enforces_restricted(stage: Stage) -> None:
    """Refused with a host path before any pod; runs with a volume, which heals, and goes with its deployment."""
    gateway, namespace = stage.gateway, stage.namespace
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    meta = {"name": namespace, "labels": labels}
    gateway.apply({"apiVersion": "v1", "kind": NAMESPACE.kind, "metadata": meta}, manager="admin")
    with stage.server.controllers(*CONTROLLERS, *BINDERS), stage.operator(1):
        changes = {
            "metadata.namespace": namespace,
            "spec.engine.device": "Cpu",
            "spec.parallelism.tensor": 2,
            "spec.placement.nodeSelector": {"stage": namespace},
            "spec.placement.tolerations": [{"operator": "Exists"}],
        }
        gateway.create(manifest(changes))
        stage.until("refused", lambda: reason(stage) == "PodSecurityDenied", 1)
        assert gateway.get(DEPLOYMENT, "digits", namespace) is None

        spec(stage, {"cache": {"mount": "PersistentVolume"}})
        stage.until("ready", stage.ready, 1)
        first = stage.until("bound", lambda: bound(stage), 1)
        assert len(gateway.list(POD, namespace).items) == 1
        volume, _ = pair(stage)
        assert volume is not None
        assert volume["spec"]["mountOptions"] == ["ro"]
        assert "hostPath" not in volume["spec"]

        # Nothing uses the claim while there are no pods, so that whoever deletes it gets his way.
        spec(stage, {"replicas": 0, "cache": {"mount": "PersistentVolume"}})
        stage.until("scaled", lambda: stage.ready() and not gateway.list(POD, namespace).items, 1)
        _, claim = pair(stage)
        assert claim is not None
        gateway.delete(PERSISTENT_VOLUME_CLAIM, claim["metadata"]["name"], namespace, uid=first)
        stage.until("bound anew", lambda: bound(stage) not in ("", first), 1, seconds=60)

        obj = gateway.get(DIFFUSION_DEPLOYMENT, "digits", namespace)
        assert obj is not None
        gateway.delete(DIFFUSION_DEPLOYMENT, "digits", namespace, uid=obj["metadata"]["uid"])
        stage.until("swept", lambda: pair(stage) == (None, None), 1)
