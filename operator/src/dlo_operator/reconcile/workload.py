"""The children of a DiffusionDeployment: Deployment, Service, PodDisruptionBudget. Pure.

A pod is rendered from the spec, the chart's settings and the revision's record alone: nothing here may depend
on which nodes are there, or every change of a node would roll the engines. Pods get no API token, no capability
and no writable file system; under `Required` the engine sees its own entries and nothing else of the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from dlo_api.names import API_VERSION, DIFFUSION_DEPLOYMENT, OPERATOR_FIELD_MANAGER, label
from dlo_api.v1alpha1 import DiffusionDeploymentSpec

from dlo_operator.reconcile.inputs import Object, PlanSettings
from dlo_operator.reconcile.pod import pod_spec
from dlo_operator.reconcile.record import RECORD_ANNOTATION, Record
from dlo_operator.reconcile.revision import REVISION_LABEL

DEPLOYMENT_LABEL: Final = label("deployment")
ENGINE_NAME: Final = "dlo-engine"
_HISTORY: Final = 2


def selector(name: str) -> dict[str, str]:
    """The labels by which a deployment's engine pods are found; never changed."""
    return {"app.kubernetes.io/name": ENGINE_NAME, DEPLOYMENT_LABEL: name}


def labels(name: str) -> dict[str, str]:
    """Labels of every child."""
    return {
        **selector(name),
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": "engine",
        "app.kubernetes.io/managed-by": OPERATOR_FIELD_MANAGER,
    }


def metadata(name: str, namespace: str, uid: str, annotations: Mapping[str, str] | None = None) -> Object:
    """Metadata of a child, owned by its DiffusionDeployment."""
    made: Object = {
        "name": name,
        "namespace": namespace,
        "labels": labels(name),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": DIFFUSION_DEPLOYMENT,
                "name": name,
                "uid": uid,
                "controller": True,
                # Foreground deletion of the owner would need one more permission, and gives nothing here.
                "blockOwnerDeletion": False,
            }
        ],
    }
    if annotations:
        made["annotations"] = dict(annotations)
    return made


def deployment(
    name: str,
    namespace: str,
    uid: str,
    spec: DiffusionDeploymentSpec,
    revision: str,
    record: Record,
    settings: PlanSettings,
) -> Object:
    """The Deployment of the engines of one revision."""
    template = {
        "metadata": {
            "labels": {**spec.engine.pod_labels, **labels(name), REVISION_LABEL: revision},
            "annotations": {**spec.engine.pod_annotations, RECORD_ANNOTATION: record.to_text()},
        },
        "spec": pod_spec(name, spec, record, settings),
    }
    return held(name, namespace, uid, spec, template)


def held(
    name: str, namespace: str, uid: str, spec: DiffusionDeploymentSpec, template: Mapping[str, Any]
) -> Object:
    """The Deployment with a given pod template, e.g. the old revision's while the new one is warmed."""
    rollout = spec.rollout
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(name, namespace, uid),
        "spec": {
            **scale(spec),
            "revisionHistoryLimit": _HISTORY,
            "progressDeadlineSeconds": rollout.progress_deadline_seconds,
            "selector": {"matchLabels": selector(name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {
                    # The API server refuses 0 for both; without surge one engine must be allowed to go.
                    "maxUnavailable": rollout.max_unavailable
                    if rollout.max_surge
                    else max(1, rollout.max_unavailable),
                    "maxSurge": rollout.max_surge,
                },
            },
            "template": copy.deepcopy(dict(template)),
        },
    }


def scale(spec: DiffusionDeploymentSpec) -> Object:
    """The number of engines: none while suspended."""
    return {"replicas": 0 if spec.suspend else spec.replicas}


def service(name: str, namespace: str, uid: str, spec: DiffusionDeploymentSpec) -> Object:
    """The Service in front of the engines."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, namespace, uid, spec.serving.service_annotations),
        "spec": {
            "type": "ClusterIP",
            "selector": selector(name),
            "ports": [{"name": "http", "port": spec.serving.port, "protocol": "TCP", "targetPort": "http"}],
        },
    }


def budget_wanted(spec: DiffusionDeploymentSpec) -> bool:
    """Whether there is a budget: with one engine or none it could only block drains."""
    return not spec.suspend and spec.replicas > 1


def budget(name: str, namespace: str, uid: str, spec: DiffusionDeploymentSpec) -> Object:
    """The PodDisruptionBudget; broken engines never hold up a drain."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(name, namespace, uid),
        "spec": {
            "maxUnavailable": max(1, spec.rollout.max_unavailable),
            "selector": {"matchLabels": selector(name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
