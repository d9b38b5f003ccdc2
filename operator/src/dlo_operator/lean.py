"""What of an object is worth keeping in memory: everything that a decision reads, and nothing else. Pure.

Who reads one more field of a mirrored kind adds it here; a test holds that plans from kept objects equal plans
from whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from dlo_api.names import AGENT_FIELD_MANAGER, OPERATOR_FIELD_MANAGER
from dlo_kube.gateway import Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE, NODE_WEIGHT_CACHE, POD

from dlo_operator.reconcile.record import RECORD_ANNOTATION

_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_POD_STATUS: Final = ("phase", "podIP", "conditions", "containerStatuses", "initContainerStatuses")
_IDENTITY: Final = ("name", "namespace", "uid", "resourceVersion", "generation", "deletionTimestamp")


def lean(obj: Mapping[str, Any]) -> Object:
    """The object as it is kept; shares what it keeps with `obj`."""
    return _BY_KIND.get(obj["kind"], _whole)(obj)


def _whole(obj: Mapping[str, Any]) -> Object:
    meta = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    if _LAST_APPLIED in (meta.get("annotations") or {}):
        meta["annotations"] = {k: v for k, v in meta["annotations"].items() if k != _LAST_APPLIED}
    return {**obj, "metadata": meta}


def _deployment(obj: Mapping[str, Any]) -> Object:
    """With what we own of the status: an apply would remove what we own and do not mean any more."""
    kept = _whole(obj)
    owned = [
        entry
        for entry in obj["metadata"].get("managedFields") or ()
        if entry.get("manager") == OPERATOR_FIELD_MANAGER and entry.get("subresource") == "status"
    ]
    if "managedFields" in obj["metadata"]:
        kept["metadata"]["managedFields"] = owned
    return kept


def _cache(obj: Mapping[str, Any]) -> Object:
    """With when the agent last wrote."""
    kept = _whole(obj)
    times = [
        {"manager": entry["manager"], "time": entry["time"]}
        for entry in obj["metadata"].get("managedFields") or ()
        if entry.get("manager") == AGENT_FIELD_MANAGER and entry.get("time")
    ]
    if times:
        kept["metadata"]["managedFields"] = times
    return kept


def _node(obj: Mapping[str, Any]) -> Object:
    return {
        **_head(obj, "labels"),
        "spec": _some(obj.get("spec"), ("taints",)),
        "status": _some(obj.get("status"), ("allocatable",)),
    }


def _pod(obj: Mapping[str, Any]) -> Object:
    kept = _head(obj, "labels")
    record = (obj["metadata"].get("annotations") or {}).get(RECORD_ANNOTATION)
    if record is not None:
        kept["metadata"]["annotations"] = {RECORD_ANNOTATION: record}
    return {
        **kept,
        "spec": _some(obj.get("spec"), ("nodeName",)),
        "status": _some(obj.get("status"), _POD_STATUS),
    }


def _head(obj: Mapping[str, Any], *more: str) -> Object:
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": _some(obj["metadata"], (*_IDENTITY, *more)),
    }


def _some(value: Mapping[str, Any] | None, names: tuple[str, ...]) -> Object:
    return {name: value[name] for name in names if name in value} if value else {}


_BY_KIND: Final[Mapping[str, Callable[[Mapping[str, Any]], Object]]] = {
    DIFFUSION_DEPLOYMENT.kind: _deployment,
    NODE_WEIGHT_CACHE.kind: _cache,
    NODE.kind: _node,
    POD.kind: _pod,
}
