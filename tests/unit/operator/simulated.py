"""What stands around the operator, simulated: a node with its agent, and the controllers that run pods.

The agent follows the rules of its own package: it resolves what is listed, builds what is pinned, keeps on disk
what it has built. The kubelet starts a pod as ready only when the entries that its gate wants lie on its node.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dlo_api.identity import digest_of, node_lease_name
from dlo_api.names import AGENT_FIELD_MANAGER
from dlo_api.v1alpha1 import NodeWeightCacheSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import DEPLOYMENT, LEASE, NODE_WEIGHT_CACHE, POD
from fakes.kube import FakeCluster

GIB = 2**30


@dataclass
class Content:
    """What sources hold, by the last part of their path: digest, or a reason why they cannot be read."""

    digests: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    heads: tuple[int, ...] = (4,)

    def digest(self, name: str) -> str:
        """Digest of a source's files."""
        return self.digests.get(name, digest_of(name))


def source_name(source: NodeSource) -> str:
    """The last part of a source's path."""
    directory = source.source.directory
    return directory.path if directory is not None else "remote"


@dataclass
class Agent:
    """The agent of one node.

    Attributes:
        disk: input keys of what lies on the disk.
        builds: input keys built, in order.
        broken: reason by which every build fails; empty for none.
        alive: whether it does anything.
        idle: whether it builds nothing.
        refusal: reason that entries which are not there have, beside Pending.
    """

    cluster: Gateway
    node: str
    content: Content
    namespace: str
    root: str = "/var/cache/dlo"
    gid: int = 4242
    free: int = 100 * GIB
    disk: set[str] = field(default_factory=set)
    builds: list[str] = field(default_factory=list)
    broken: str = ""
    other_bytes: bool = False
    storage: str = ""
    alive: bool = True
    idle: bool = False
    refusal: str = ""
    beats: int = 0
    warm_budget: int = 64 * GIB

    def step(self, *, most: int = 100) -> bool:
        """One turn of its loop, building at most so many entries; whether its status changed."""
        if not self.alive:
            return False
        self._beat()
        obj = self.cluster.get(NODE_WEIGHT_CACHE, self.node)
        if obj is None:
            return False
        spec = NodeWeightCacheSpec.model_validate_json(json.dumps(obj.get("spec", {})))
        sources = [self._source(source) for source in spec.sources]
        entries = []
        for entry in spec.entries:
            pin = next((s.pin.digest for s in spec.sources if s.id == entry.source_id), "")
            key = self.key(entry, pin)
            stuck = self.broken or self.storage or self.idle or self.refusal
            if pin and key not in self.disk and not stuck and most > 0:
                most -= 1
                self.disk.add(key)
                self.builds.append(key)
            entries.append(self._entry(entry, key, pin))
        status: dict[str, Any] = {
            "observedGeneration": obj["metadata"]["generation"],
            "agentVersion": "test",
            "root": {"path": self.root, "gid": self.gid, "freeBytes": self.free, "totalBytes": 200 * GIB},
            "memory": {"totalBytes": 64 * GIB, "warmBudgetBytes": self.warm_budget},
            "sources": sources,
            "entries": entries,
        }
        if self.storage:
            status["conditions"] = [
                {
                    "type": "StorageHealthy",
                    "status": "False",
                    "reason": self.storage,
                    "message": "the marker file is missing",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ]
        if obj.get("status") == status:
            return False
        identity = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": {"name": self.node}}
        self.cluster.apply_status({**identity, "status": status}, manager=AGENT_FIELD_MANAGER)
        return True

    def key(self, entry: NodeEntry, pin: str) -> str:
        """The input key of an entry: by its bytes, not by who asks."""
        return digest_of(
            [pin, entry.kind, entry.component, entry.tensor_size, entry.tensor_rank, entry.dtype]
        )

    def _beat(self) -> None:
        lease = self.cluster.get(LEASE, node_lease_name(self.node), self.namespace)
        if lease is None:
            return
        self.beats += 1
        moved = datetime.fromtimestamp(self.beats, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        meta = {"name": self.node, "namespace": self.namespace, "uid": lease["metadata"]["uid"]}
        self.cluster.apply(
            {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": meta,
                "spec": {"holderIdentity": self.node, "renewTime": moved},
            },
            manager=AGENT_FIELD_MANAGER,
        )

    def _source(self, source: NodeSource) -> Object:
        name = source_name(source)
        if name in self.content.reasons:
            return {
                "id": source.id,
                "reason": self.content.reasons[name],
                "message": f"{name} cannot be read",
            }
        digest = digest_of("other") if self.other_bytes else self.content.digest(name)
        if source.pin.digest and source.pin.digest != digest:
            return {"id": source.id, "reason": "SourceMismatch", "message": "other bytes"}
        return {
            "id": source.id,
            "revision": name,
            "digest": digest,
            "architecture": "FluxTransformer2DModel",
            "headCounts": list(self.content.heads),
            "components": [
                {
                    "name": "transformer",
                    "bytes": 8 * 2**20,
                    "blocks": 4,
                    "largestBlockBytes": 2**20,
                    "residentBytes": 2**20,
                }
            ],
            "restBytes": 4 * 2**20,
        }

    def _entry(self, entry: NodeEntry, key: str, pin: str) -> Object:
        found: Object = {"id": entry.id, "kind": entry.kind}
        if entry.component is not None:
            found["component"] = entry.component
        if not pin:
            return {**found, "phase": "Pending"}
        if key in self.disk:
            return {
                **found,
                "phase": "Ready",
                "inputKey": key,
                "contentDigest": digest_of([key, "content"]),
                "manifestSha256": digest_of([key, "manifest"]),
                "bytes": 4 * 2**20,
            }
        if self.broken:
            phase = "Quarantined" if self.broken == "IntegrityFailed" else "Failed"
            return {**found, "phase": phase, "reason": self.broken, "message": "it did not work"}
        if self.refusal:
            return {**found, "phase": "Pending", "reason": self.refusal, "message": "it cannot be held"}
        return (
            {**found, "phase": "Pending"}
            if self.idle
            else {**found, "phase": "Building", "bytes": 100, "doneBytes": 1}
        )


@dataclass
class Kubelets:
    """The Deployment controller and all kubelets: one step towards the template each time.

    Attributes:
        started_cold: pods that were started where an entry was missing; must stay empty.
        crash: termination message with which every new engine ends; empty for none.
        refuse: message with which creating pods fails.
    """

    cluster: FakeCluster
    agents: dict[str, Agent]
    started_cold: list[str] = field(default_factory=list)
    crash: str = ""
    refuse: str = ""
    unschedulable: bool = False
    late: bool = False
    made: int = 0

    def step(self) -> bool:
        """One pod more, less or ready for each Deployment; whether anything changed."""
        changed = False
        for obj in self.cluster.objects(DEPLOYMENT):
            changed = self._deployment(obj) or changed
        return changed

    def _deployment(self, obj: Object) -> bool:
        meta, spec = obj["metadata"], obj["spec"]
        wanted = spec["template"]["metadata"]["labels"]["dlo.dev/revision"]
        pods = [
            pod
            for pod in self.cluster.objects(POD)
            if pod["metadata"]["namespace"] == meta["namespace"]
            and pod["metadata"]["labels"].get("dlo.dev/deployment") == meta["name"]
        ]
        new = [pod for pod in pods if pod["metadata"]["labels"]["dlo.dev/revision"] == wanted]
        old = [pod for pod in pods if pod not in new]
        changed = self._move(obj, new, old)
        return self._report(obj, wanted) or changed

    def _move(self, obj: Object, new: list[Object], old: list[Object]) -> bool:
        replicas = obj["spec"]["replicas"]
        surplus = old if len(old) + len(new) > replicas else []
        surplus = surplus or (new if len(new) > replicas else [])
        if surplus:
            self._remove(surplus[0])
            return True
        if len(old) + len(new) < replicas:
            if not self.refuse:
                self._create(obj)
            return not self.refuse
        if old and all(_ready(pod) for pod in new):
            self._remove(old[0])
            return True
        return False

    def _remove(self, pod: Object) -> None:
        self.cluster.remove(POD, pod["metadata"]["name"], pod["metadata"]["namespace"])

    def _create(self, obj: Object) -> None:
        self.made += 1
        template = obj["spec"]["template"]
        gate = template["spec"]["initContainers"][0]["args"]
        wants = json.loads(gate[gate.index("--want-json") + 1])
        keys = {want["inputKey"] for want in wants}
        warm = [name for name, agent in sorted(self.agents.items()) if keys <= agent.disk]
        name = f"{obj['metadata']['name']}-{self.made}"
        if not warm:
            self.started_cold.append(name)
        nodes = warm or sorted(self.agents)
        status: Object = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        if self.crash or not warm:
            status = _crashed(self.crash or "DeadlinePassed: not ready")
        if self.unschedulable:
            status = {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}],
            }
        self.cluster.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": obj["metadata"]["namespace"],
                    "labels": template["metadata"]["labels"],
                    "annotations": template["metadata"]["annotations"],
                    "ownerReferences": [
                        {
                            "apiVersion": "apps/v1",
                            "kind": "Deployment",
                            "name": obj["metadata"]["name"],
                            "uid": obj["metadata"]["uid"],
                        }
                    ],
                },
                "spec": {} if self.unschedulable else {"nodeName": nodes[self.made % len(nodes)]},
                "status": status,
            }
        )

    def _report(self, obj: Object, wanted: str) -> bool:
        meta = obj["metadata"]
        pods = [
            pod
            for pod in self.cluster.objects(POD)
            if pod["metadata"]["labels"].get("dlo.dev/deployment") == meta["name"]
            and pod["metadata"]["namespace"] == meta["namespace"]
        ]
        new = [pod for pod in pods if pod["metadata"]["labels"]["dlo.dev/revision"] == wanted]
        ready = [pod for pod in pods if _ready(pod)]
        complete = len(new) == len(pods) == obj["spec"]["replicas"] and len(ready) == len(pods)
        reason = "NewReplicaSetAvailable" if complete else "ReplicaSetUpdated"
        reason = "ProgressDeadlineExceeded" if self.late and not complete else reason
        conditions = [{"type": "Progressing", "status": "True", "reason": reason}]
        if self.refuse:
            conditions.append({"type": "ReplicaFailure", "status": "True", "message": self.refuse})
        status = {
            "observedGeneration": meta["generation"],
            "replicas": len(pods),
            "updatedReplicas": len(new),
            "readyReplicas": len(ready),
            "conditions": conditions,
        }
        if obj.get("status") == status:
            return False
        self.cluster.edit(
            DEPLOYMENT, meta["name"], lambda found: found.update(status=status), meta["namespace"]
        )
        return True


def _ready(pod: Object) -> bool:
    return {"type": "Ready", "status": "True"} in pod["status"].get("conditions", [])


def _crashed(message: str) -> Object:
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": False,
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": {"exitCode": 1, "message": message}},
            }
        ],
    }
