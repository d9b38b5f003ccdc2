"""Pods that only wait, so that a cluster which scales from zero gets a node for the engines. Pure.

An engine's pod names the entries that it mounts, and their names are known only once a node holds them; where no
node is eligible yet, none ever would. An attractor asks for what an engine asks of a node and mounts nothing of
the cache. It makes an autoscaler add a node, holds it while the cache is built there, and is rolled to the engine
as any other template is. It is never ready, so no request reaches it and nothing counts it as an engine.
"""

from __future__ import annotations

from typing import Final

from dlo_api.names import label
from dlo_api.v1alpha1 import DiffusionDeploymentSpec

from dlo_operator.reconcile.inputs import Object, PlanSettings
from dlo_operator.reconcile.pod import UNPRIVILEGED, node_resources, placed_pod
from dlo_operator.reconcile.record import ModelSizes
from dlo_operator.reconcile.revision import NO_REVISION, REVISION_LABEL
from dlo_operator.reconcile.view import View

NAME: Final = "waits-for-node"
#: Nobody ever sets it: a pod that has a readiness gate is not ready before that.
NEVER: Final = label("never-ready")
_PROGRAM: Final = (
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "print('holds this node for an engine while the cache is built', flush=True)\n"
    "signal.pause()\n"
)


def attracts(view: View) -> bool:
    """Whether waiting pods are wanted: while there is no eligible node, and until engines can take their place."""
    workload = view.inputs.workload
    return not view.eligible if workload is None else workload.revision == NO_REVISION


def template(
    labels: dict[str, str], spec: DiffusionDeploymentSpec, sizes: ModelSizes, settings: PlanSettings
) -> Object:
    """The pod template: an engine's scheduling and resources, as far as the model's sizes are known."""
    waits: Object = {
        "name": NAME,
        "image": settings.images.agent,
        "imagePullPolicy": settings.images.pull_policy,
        "command": ["python", "-P", "-c", _PROGRAM],
        "resources": node_resources(spec, sizes),
        "securityContext": dict(UNPRIVILEGED),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod = placed_pod(spec, settings) | {
        "readinessGates": [{"conditionType": NEVER}],
        "containers": [waits],
    }
    return {
        "metadata": {
            "labels": {**spec.engine.pod_labels, **labels, REVISION_LABEL: NO_REVISION},
            "annotations": dict(spec.engine.pod_annotations),
        },
        "spec": pod,
    }
