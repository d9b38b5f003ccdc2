"""The Deployment controller and the kubelets, simulated: pods come, wait, crash and go as tests want them.

A kubelet starts a pod as ready only when the entries that its gate wants lie on its node.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from dlo_kube.gateway import Object
from dlo_kube.kinds import DEPLOYMENT, PERSISTENT_VOLUME, PERSISTENT_VOLUME_CLAIM, POD
from fakes.kube import FakeCluster
from unit.operator.simulated import Agent

#: When engines end that do.
CRASHED = "2026-03-01T10:00:00Z"


@dataclass
class Kubelets:
    """The Deployment controller and all kubelets: one step towards the template each time.

    Attributes:
        started_cold: pods that were started where an entry was missing; must stay empty.
        crash: termination message with which every new engine ends; empty for none.
        exit_status: with which it ends then.
        refuse: message with which creating pods fails.
    """

    cluster: FakeCluster
    agents: dict[str, Agent]
    started_cold: list[str] = field(default_factory=list)
    crash: str = ""
    exit_status: int = 1
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
        if "readinessGates" in template["spec"]:
            self._wait(obj)
            return
        gate = template["spec"]["initContainers"][0]["args"]
        wants = json.loads(gate[gate.index("--want-json") + 1])
        optional = "--optional-layout" in gate
        keys = {want["inputKey"] for want in wants if not (optional and want["kind"] == "Layout")}
        warm = [name for name, agent in sorted(self.agents.items()) if keys <= agent.disk]
        name = f"{obj['metadata']['name']}-{self.made}"
        if not warm:
            self.started_cold.append(name)
        nodes = warm or sorted(self.agents)
        status: Object = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        if self.crash or not warm:
            status = _crashed(self.crash or "DeadlinePassed: not ready", self.exit_status)
        if self.unschedulable or not self._mountable(template["spec"], obj["metadata"]["namespace"]):
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
                    "ownerReferences": [_owner(obj)],
                },
                "spec": {} if status["phase"] == "Pending" else {"nodeName": nodes[self.made % len(nodes)]},
                "status": status,
            }
        )

    def _wait(self, obj: Object) -> None:
        """A pod that is never ready: on a node as soon as there is one."""
        nodes = sorted(self.agents)
        status = {
            "phase": "Running" if nodes else "Pending",
            "conditions": [{"type": "Ready", "status": "False"}],
        }
        if not nodes:
            words = {"type": "PodScheduled", "status": "False", "message": "no nodes available"}
            status["conditions"] = [words]
        self.cluster.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{obj['metadata']['name']}-{self.made}",
                    "namespace": obj["metadata"]["namespace"],
                    "labels": obj["spec"]["template"]["metadata"]["labels"],
                    "ownerReferences": [_owner(obj)],
                },
                "spec": {"nodeName": nodes[self.made % len(nodes)]} if nodes else {},
                "status": status,
            }
        )

    def _mountable(self, pod: Object, namespace: str) -> bool:
        """Whether every claim of the pod is there, and the volume that it asks for names it."""
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" not in volume:
                continue
            name = volume["persistentVolumeClaim"]["claimName"]
            claim = self.cluster.get(PERSISTENT_VOLUME_CLAIM, name, namespace)
            if claim is None:
                return False
            found = self.cluster.get(PERSISTENT_VOLUME, claim["spec"]["volumeName"])
            reference = (found or {}).get("spec", {}).get("claimRef", {})
            same = (reference.get("namespace"), reference.get("name")) == (namespace, name)
            if not same or reference.get("uid") not in (None, claim["metadata"]["uid"]):
                return False
        return True

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


def _owner(obj: Object) -> Object:
    meta = obj["metadata"]
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": meta["name"], "uid": meta["uid"]}


def _ready(pod: Object) -> bool:
    return {"type": "Ready", "status": "True"} in pod["status"].get("conditions", [])


def _crashed(message: str, exit_status: int) -> Object:
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": False,
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {
                    "terminated": {"exitCode": exit_status, "message": message, "finishedAt": CRASHED}
                },
            }
        ],
    }
