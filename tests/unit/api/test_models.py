"""The models: defaults as api.md writes them, JSON names, strictness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from dlo_api.advice import ADVICE, advised
from dlo_api.conditions import (
    DEPLOYMENT_CONDITIONS,
    NODE_CONDITIONS,
    NODE_REASONS,
    REASONS,
    Condition,
    find,
)
from dlo_api.v1alpha1 import DiffusionDeployment, NodeWeightCache, Offload, Parallelism
from pydantic import ValidationError
from unit.api.manifests import deployment, manifest

# The example of the API's design, defaults written out.
_WRITTEN_OUT = """
model:
  source:
    directory: {root: samples, path: digits}
  components: [transformer]
  variant: ""
  layout: ""
  dtype: Source
  quantization: None
engine:
  kind: Native
  version: ""
  device: Cuda
  image: ""
  imagePullSecrets: []
  serviceAccountName: ""
  extraArgs: []
  extraEnv: []
  resources: {}
  podLabels: {}
  podAnnotations: {}
replicas: 1
parallelism: {tensor: 1, data: 1, ulysses: 1, ring: 1, cfg: 1, pipeline: 1, expert: 1}
offload:
  mode: DistributedLayerwise
  transfer: RankLocal
  residentLayers: 0
  hostRegistration: {policy: Auto}
cache:
  policy: Required
  onFallback: Fail
  verify: Always
  mount: HostPath
  prewarm:
    {scope: Needed, spareNodes: 1, minReadyNodes: 1, maxParallelNodes: 4, progressDeadlineSeconds: 3600}
  retentionSeconds: 86400
placement:
  nodeSelector: {}
  tolerations: []
  affinity: {}
  priorityClassName: ""
  runtimeClassName: ""
  gpuResource: nvidia.com/gpu
rollout: {maxUnavailable: 1, maxSurge: 0, drainTimeoutSeconds: 600, progressDeadlineSeconds: 3600}
serving: {port: 8000, maxQueuedRequests: 64, serviceAnnotations: {}}
suspend: false
"""


def test_defaults_are_those_of_the_design() -> None:
    """The smallest manifest means exactly the written-out one."""
    assert deployment().spec.to_json() == yaml.safe_load(_WRITTEN_OUT)


def test_json_round_trip_keeps_everything() -> None:
    """What is written is read back equal."""
    given = deployment({"spec.offload.residentLayers": "Auto", "spec.offload.deviceMemoryBudget": "20Gi"})
    assert DiffusionDeployment.model_validate_json(json.dumps(given.to_json()), by_name=False) == given


def test_snake_case_is_refused_in_manifests_and_used_in_python() -> None:
    """JSON has one spelling, Python the other."""
    assert Offload(resident_layers=3).to_json()["residentLayers"] == 3
    with pytest.raises(ValidationError, match="max_surge"):
        deployment({"spec.rollout": {"max_surge": 1}})


def test_models_are_frozen() -> None:
    """A spec cannot be edited in place."""
    parallelism = Parallelism()
    with pytest.raises(ValidationError, match="frozen"):
        parallelism.tensor = 2


@pytest.mark.parametrize("value", ["2", 2.5, True, [2]])
def test_a_number_is_a_number(value: object) -> None:
    """Nothing is turned into an integer silently."""
    with pytest.raises(ValidationError):
        deployment({"spec.replicas": value})


def test_components_hold_no_name_twice() -> None:
    """A set list, as the API server treats it."""
    with pytest.raises(ValidationError, match="twice"):
        deployment({"spec.model.components": ["transformer", "transformer"]})


def test_keyed_lists_hold_no_key_twice() -> None:
    """As the API server refuses them: by key, whatever else the items say."""
    with pytest.raises(ValidationError, match="the same name twice"):
        deployment({"spec.engine.imagePullSecrets": [{"name": "a"}, {"name": "a"}]})
    condition = {"type": "Ready", "reason": "Ready", "lastTransitionTime": "2026-11-29T10:00:00Z"}
    with pytest.raises(ValidationError, match="the same type twice"):
        deployment({"status.conditions": [{**condition, "status": s} for s in ("True", "False")]})


def test_full_status_of_a_deployment_is_read() -> None:
    """Every status field of api.md has its place."""
    status = {
        "observedGeneration": 7,
        "phase": "Warming",
        "revision": {"current": "a1b2", "updating": "c3d4", "sourceDigest": "9f00"},
        "replicas": 2,
        "updatedReplicas": 1,
        "readyReplicas": 2,
        "selector": "app=digits",
        "cache": {
            "entries": [
                {
                    "kind": "Layout",
                    "component": "transformer",
                    "coordinate": "0/2",
                    "inputKey": "ab",
                    "contentDigest": "cd",
                    "bytes": 1,
                }
            ],
            "nodes": {"desired": 4, "ready": 3, "warming": 1, "failed": 0},
            "summary": "3/4",
            "bytesPerNode": 1,
            "savedBytesPerNode": 1,
        },
        "offload": {"mode": "DistributedLayerwise", "transfer": "RankLocal", "backing": "RegisteredCache"},
        "plan": {
            "gpusPerPod": 2,
            "diskPerNode": "124Gi",
            "hostMemoryPerNode": "210Gi",
            "lockedMemoryPerNode": "124Gi",
        },
        "problems": [
            {"node": "n3", "entry": "ab", "reason": "InsufficientDisk", "message": "12 GiB missing"}
        ],
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "Warming",
                "message": "",
                "lastTransitionTime": "2026-11-29T10:00:00Z",
                "observedGeneration": 7,
            }
        ],
    }
    read = deployment({"status": status}).status
    assert read is not None
    assert read.to_json() == status


def test_full_node_weight_cache_is_read() -> None:
    """Every field of api.md has its place, `bootID` with its spelling."""
    value = yaml.safe_load((Path(__file__).parent / "node_weight_cache.yaml").read_text(encoding="utf-8"))
    read = NodeWeightCache.model_validate_json(json.dumps(value), by_name=False)
    written = read.to_json()
    assert written["status"] == value["status"]
    assert written["spec"]["sources"] == value["spec"]["sources"]
    assert read.spec.entries[1].streamed == ("transformer",)
    assert read.status is not None
    assert read.status.boot_id == "7b1c"


def test_unknown_numbers_are_absent() -> None:
    """An empty status says nothing rather than 0."""
    read = deployment({"status": {}}).status
    assert read is not None
    assert read.to_json() == {"problems": [], "conditions": []}


def test_every_condition_type_has_reasons() -> None:
    """Types and reasons are one table for each kind."""
    assert list(DEPLOYMENT_CONDITIONS) == list(REASONS)
    assert list(NODE_CONDITIONS) == list(NODE_REASONS)
    for reasons in (*REASONS.values(), *NODE_REASONS.values()):
        for reason in reasons:
            Condition(
                type="Ready", status="False", reason=reason, last_transition_time="2026-11-29T10:00:00Z"
            )


def test_every_failing_reason_has_advice() -> None:
    """Whatever is not the good state of a condition says what a person can do; and nothing else is listed."""
    good = {reasons[0] for reasons in (*REASONS.values(), *NODE_REASONS.values())}
    good |= {"ScaledToZero", "CacheDisabled"}
    failing = {
        reason for table in (REASONS, NODE_REASONS) for reasons in table.values() for reason in reasons
    }
    assert failing - good <= set(ADVICE)
    assert not good & set(ADVICE)


def test_advice_is_added_once() -> None:
    """Words that say what to do already stay as they are."""
    assert advised("DiskFull", "no room") == f"no room — {ADVICE['DiskFull']}"
    assert advised("DiskFull", "no room — buy a disk") == "no room — buy a disk"
    assert advised("Unheard", "no room") == "no room"


def test_find_takes_the_condition_of_a_type() -> None:
    """None stands for Unknown."""
    ready = Condition(
        type="Ready", status="True", reason="Ready", last_transition_time="2026-11-29T10:00:00Z"
    )
    assert find((ready,), "Ready") is ready
    assert find((ready,), "Accepted") is None


def test_manifest_helper_leaves_the_smallest_alone() -> None:
    """Changes do not leak between tests."""
    manifest({"spec.model.source.directory.path": "other"})
    assert manifest()["spec"]["model"]["source"]["directory"]["path"] == "digits"
