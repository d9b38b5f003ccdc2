"""Objects of the API, as JSON values, to the values that decisions are made from.

Patient with what it reads: fields of a later version are left out, a broken object becomes one that nothing is
known of. Must not call the API or read a clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

from dlo_api.names import AGENT_FIELD_MANAGER
from dlo_api.v1alpha1 import DiffusionDeploymentSpec, NodeWeightCacheSpec
from dlo_api.v1alpha1.node_weight_cache import NodeWeightCacheStatus
from pydantic import BaseModel, ValidationError

from dlo_operator.reconcile.inputs import (
    CacheFacts,
    EngineReport,
    NodeFacts,
    Object,
    PodFacts,
    Taint,
    Trouble,
    VolumeFacts,
    WorkloadFacts,
)
from dlo_operator.reconcile.pod import ENGINE
from dlo_operator.reconcile.record import read_record
from dlo_operator.reconcile.revision import REVISION_LABEL
from dlo_operator.reconcile.shapes import misshapen

_T = TypeVar("_T", bound=BaseModel)

_BROKEN_WAITS: Final = frozenset(
    {
        "CrashLoopBackOff",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)


def read_spec(obj: Object) -> tuple[DiffusionDeploymentSpec | None, str]:
    """The spec, or None and why it cannot be read."""
    try:
        spec = _model(DiffusionDeploymentSpec, obj.get("spec") or {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return None, f"spec.{where}: {first['msg']} — correct it and apply again"
    wrong = misshapen(spec)
    return (None, f"{wrong} — correct it and apply again") if wrong else (spec, "")


def read_node(obj: Object) -> NodeFacts:
    """A Node."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    return NodeFacts(
        name=meta["name"],
        uid=meta.get("uid", ""),
        labels=meta.get("labels") or {},
        taints=tuple(
            Taint(taint.get("key", ""), taint.get("value") or "", taint.get("effect", ""))
            for taint in spec.get("taints") or ()
        ),
        allocatable=status.get("allocatable") or {},
        deleting="deletionTimestamp" in meta,
    )


def read_cache(obj: Object, lease_age: float | None) -> CacheFacts:
    """A NodeWeightCache; what cannot be read of it counts as not reported."""
    meta = obj["metadata"]
    try:
        spec = _model(NodeWeightCacheSpec, obj.get("spec") or {})
    except ValidationError:
        spec = NodeWeightCacheSpec()
    try:
        status = _model(NodeWeightCacheStatus, obj["status"]) if obj.get("status") else None
    except ValidationError:
        status = None
    return CacheFacts(
        name=meta["name"],
        spec=spec,
        status=status,
        generation=meta.get("generation", 0),
        lease_age=lease_age,
        reported=_reported(meta),
    )


def _reported(meta: Mapping[str, Any]) -> datetime | None:
    times = [
        datetime.fromisoformat(entry["time"])
        for entry in meta.get("managedFields") or ()
        if entry.get("manager") == AGENT_FIELD_MANAGER and entry.get("time")
    ]
    return max(times, default=None)


def read_workload(obj: Object) -> WorkloadFacts:
    """The child Deployment."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    template = spec.get("template") or {}
    meta = template.get("metadata") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    progressing, failure = conditions.get("Progressing", {}), conditions.get("ReplicaFailure", {})
    return WorkloadFacts(
        revision=(meta.get("labels") or {}).get(REVISION_LABEL, ""),
        record=read_record(meta.get("annotations") or {}),
        replicas=spec.get("replicas", 1),
        existing=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        settled=status.get("observedGeneration", 0) >= obj["metadata"].get("generation", 0),
        rolled_out=progressing.get("reason") == "NewReplicaSetAvailable",
        deadline_exceeded=progressing.get("reason") == "ProgressDeadlineExceeded",
        refused=failure.get("message", "") if failure.get("status") == "True" else "",
        template=template,
    )


def read_pod(obj: Object, report: EngineReport | None) -> PodFacts:
    """An engine pod."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    conditions = {condition["type"]: condition.get("status") for condition in status.get("conditions") or ()}
    return PodFacts(
        name=meta["name"],
        node=spec.get("nodeName") or "",
        revision=(meta.get("labels") or {}).get(REVISION_LABEL, ""),
        ready=conditions.get("Ready") == "True",
        record=read_record(meta.get("annotations") or {}),
        deleting="deletionTimestamp" in meta,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        trouble=_trouble(status),
        report=report,
    )


def read_volume(volume: Object | None, claim: Object | None) -> VolumeFacts:
    """The pair through which pods mount a cache root; either may be missing."""
    found = [obj for obj in (volume, claim) if obj is not None]
    return VolumeFacts(
        claim_uid=claim["metadata"].get("uid", "") if claim is not None else "",
        going=any("deletionTimestamp" in obj["metadata"] for obj in found),
    )


def restarts(obj: Object) -> int:
    """How often the engine container was started again."""
    containers = (obj.get("status") or {}).get("containerStatuses") or ()
    return sum(
        container.get("restartCount", 0) for container in containers if container.get("name") == ENGINE
    )


def _trouble(status: Mapping[str, Any]) -> Trouble | None:
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for container in containers:
        state, last = container.get("state") or {}, container.get("lastState") or {}
        ended = state.get("terminated") or last.get("terminated") or {}
        waiting = state.get("waiting") or {}
        failed = ended.get("exitCode", 0) != 0
        if container.get("ready") or (not failed and waiting.get("reason") not in _BROKEN_WAITS):
            continue
        return _ended(container, ended, waiting)
    return next(
        (
            Trouble("Unschedulable", condition.get("message") or "no node has room for it")
            for condition in status.get("conditions") or ()
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False"
        ),
        None,
    )


def _ended(container: Mapping[str, Any], ended: Mapping[str, Any], waiting: Mapping[str, Any]) -> Trouble:
    """A container that ended, or cannot start: its exit status, and the last line that it left."""
    said = (ended.get("message") or "").strip()
    # What a container did not write as its termination message is the end of its log.
    line = said.splitlines()[-1].removeprefix("error: ") if said else ""
    reason = waiting.get("reason") or ended.get("reason") or "Error"
    if ended:
        killed = " (out of memory)" if ended.get("reason") == "OOMKilled" else ""
        what = f"exit status {ended.get('exitCode', 0)}{killed}"
        message = f"{what}: {line}" if line else what
    else:
        message = f"{reason}: {waiting['message']}" if waiting.get("message") else reason
    head = line.split(":", 1)[0]
    return Trouble(
        reason=reason,
        message=f"{container.get('name')}: {message}",
        restarts=container.get("restartCount", 0),
        code=head if head != line and head.isalnum() else "",
        ended=ended.get("finishedAt") or "",
    )


def _model(kind: type[_T], value: Mapping[str, Any]) -> _T:
    return kind.model_validate_json(json.dumps(value), extra="ignore")
