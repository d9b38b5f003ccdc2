"""Names of revisions, and which one serves. Pure.

A revision is named by the pinned bytes and by everything that changes the pod template. Replicas, warm-up,
retention and the pace of a rollout are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dlo_api.identity import digest_of
from dlo_api.names import label
from dlo_api.v1alpha1 import DiffusionDeploymentSpec

from dlo_operator.reconcile.inputs import Images, PodFacts, WorkloadFacts

REVISION_LABEL: Final = label("revision")
#: Of templates and pods that only wait for a node; no revision has a dash.
NO_REVISION: Final = "no-revision"
_LENGTH: Final = 10


def revision_of(
    spec: DiffusionDeploymentSpec, pin_digest: str, entry_ids: Iterable[str], images: Images
) -> str:
    """The revision of this spec on these bytes."""
    value = spec.to_json()
    cache, serving = value["cache"], value["serving"]
    return digest_of(
        {
            "pin": pin_digest,
            "entries": sorted(entry_ids),
            "engine": value["engine"],
            "parallelism": value["parallelism"],
            "offload": value["offload"],
            "cache": {name: cache[name] for name in ("policy", "onFallback", "verify", "mount")},
            "placement": value["placement"],
            "drain": value["rollout"]["drainTimeoutSeconds"],
            "serving": {name: serving[name] for name in ("port", "maxQueuedRequests")},
            "images": [images.engine, images.agent, images.pull_policy, list(images.pull_secrets)],
        }
    )[:_LENGTH]


def serving_revision(
    target: str | None, previous: str | None, workload: WorkloadFacts | None, pods: Iterable[PodFacts]
) -> tuple[str | None, str | None]:
    """Revision that serves and revision that is being warmed or rolled out, if another.

    Args:
        target: what the spec asks for; None while the source is not pinned.
        previous: what served when the status was last written.
        workload, pods: as they are.
    """
    if workload is None or workload.revision == NO_REVISION:
        return None, target
    if workload.revision != target:
        return workload.revision, target
    others = sorted(
        (not pod.ready, pod.revision)
        for pod in pods
        if pod.revision not in (target, NO_REVISION) and not pod.finished
    )
    if others:
        return others[0][1], target
    if (
        workload.settled
        and workload.updated >= workload.replicas
        and (workload.rolled_out or workload.replicas == 0)
    ):
        return target, None
    return (target, None) if previous == target else (previous, target)
