"""The full life of a deployment on a real API server, and its state as one value that equal ends share.

The controllers of Deployments and the garbage collector are the real ones; agents are simulated, and so are
kubelets, which only say that a pod is ready. The operator is not part of it: tests start and kill its process.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.apiserver import ApiServer
from api.processes import SYSTEM, start_operator, stop
from dlo_kube.errors import KubeError
from dlo_kube.gateway import Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    LEASE,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Kind,
)
from unit.api.manifests import manifest
from unit.operator.simulated import Agent, Content

TEAM = "stage"
CONTROLLERS = ("deployment-controller", "replicaset-controller", "garbage-collector-controller")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets", True)
NODES = ("stage-node-1", "stage-node-2")
_ROLLOUT = "deployment.kubernetes.io/revision"
_CHILDREN = (DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET)
#: What differs between equal ends: identities, versions, times, addresses, and the digest of an intent with uids.
_VOLATILE = frozenset(
    {
        *("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "dlo.dev/applied"),
        *(
            "lastTransitionTime",
            "lastUpdateTime",
            "observedGeneration",
            "clusterIP",
            "clusterIPs",
            "renewTime",
        ),
    }
)


class Life:
    """One namespace, two nodes with agents, and what a user does with one deployment or several."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.gateway = server.gateway()
        self.agents: list[Agent] = []
        for name in (SYSTEM, TEAM):
            self.gateway.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def begin(self) -> None:
        """Two new nodes with empty disks, and nothing of an earlier life."""
        for obj in self.gateway.list(DIFFUSION_DEPLOYMENT, TEAM).items:
            self.delete(obj["metadata"]["name"])
        self.end()
        content = Content()
        self.agents = [Agent(self.gateway, name, content, SYSTEM) for name in NODES]
        for name in NODES:
            meta = {"name": name, "labels": {"stage": TEAM}}
            self.gateway.create({"apiVersion": "v1", "kind": "Node", "metadata": meta})

    def end(self) -> None:
        """The nodes go, and what the operator made for them."""
        for name in NODES:
            for kind, namespace in ((NODE, None), (NODE_WEIGHT_CACHE, None), (LEASE, SYSTEM)):
                found = self.gateway.get(kind, name, namespace)
                if found is not None:
                    self.gateway.delete(kind, name, namespace, uid=found["metadata"]["uid"])
        wait(lambda: not self._left(), "nodes and caches go", 20)

    def _left(self) -> list[Any]:
        kinds = ((NODE, None), (NODE_WEIGHT_CACHE, None), (POD, TEAM), (REPLICA_SET, TEAM))
        return [obj for kind, where in kinds for obj in self.gateway.list(kind, where).items]

    # -- the user --------------------------------------------------------------------------------------------

    def create(self, name: str = "digits", replicas: int = 2) -> None:
        """Two ranks on any node of the stage."""
        self.gateway.create(
            manifest(
                {
                    "metadata.namespace": TEAM,
                    "metadata.name": name,
                    "spec.engine.device": "Cpu",
                    "spec.parallelism.tensor": 2,
                    "spec.replicas": replicas,
                    "spec.placement.nodeSelector": {"stage": TEAM},
                    # The server taints new nodes, and nothing here says that they are ready.
                    "spec.placement.tolerations": [{"operator": "Exists"}],
                }
            )
        )

    def change(self, spec: Object, name: str = "digits") -> None:
        """Fields of the spec, under a manager for these fields, so that others stay."""
        identity = {"apiVersion": DIFFUSION_DEPLOYMENT.api_version, "kind": DIFFUSION_DEPLOYMENT.kind}
        meta = {"name": name, "namespace": TEAM}
        self.gateway.apply({**identity, "metadata": meta, "spec": spec}, manager=f"user-{'-'.join(spec)}")

    def delete(self, name: str = "digits") -> None:
        """As `kubectl delete`."""
        obj = self.gateway.get(DIFFUSION_DEPLOYMENT, name, TEAM)
        assert obj is not None
        self.gateway.delete(DIFFUSION_DEPLOYMENT, name, TEAM, uid=obj["metadata"]["uid"])

    # -- agents and kubelets ---------------------------------------------------------------------------------

    def turn(self) -> None:
        """Agents take a turn; every pod that is not ready becomes it."""
        for agent in self.agents:
            agent.step(most=1)
        for pod in self.gateway.list(POD, TEAM).items:
            if "deletionTimestamp" in pod["metadata"] or _is_ready(pod):
                continue
            meta = {name: pod["metadata"][name] for name in ("name", "namespace", "uid")}
            status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            try:
                self.gateway.apply_status(
                    {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}, manager="kubelet"
                )
            except KubeError:
                continue  # it has just gone; the next turn sees what is there

    # -- judging ---------------------------------------------------------------------------------------------

    def ready(self, name: str = "digits") -> bool:
        """See `ready_everywhere`."""
        return ready_everywhere(self.gateway.get(DIFFUSION_DEPLOYMENT, name, TEAM))

    def gone(self) -> bool:
        """Whether nothing of any deployment is left: no child, no entry."""
        children = (*_CHILDREN, POD, REPLICA_SET)
        if any(self.gateway.list(kind, TEAM).items for kind in children):
            return False
        caches = self.gateway.list(NODE_WEIGHT_CACHE).items
        return not any(cache.get("spec", {}).get("entries") for cache in caches)

    def state(self, *, history: bool = True) -> dict[str, Any]:
        """Everything that the operator answers for, without what differs between equal ends.

        Without `history`, the number of rollouts does not count either.
        """
        found: dict[str, Any] = {}
        for obj in self.gateway.list(DIFFUSION_DEPLOYMENT, TEAM).items:
            seen = obj.get("status", {}).get("observedGeneration") == obj["metadata"]["generation"]
            found[_place(obj)] = {**_plain(obj), "judged": seen}
        for kind in _CHILDREN:
            for obj in self.gateway.list(kind, TEAM).items:
                found[_place(obj)] = {part: _plain(obj.get(part)) for part in ("metadata", "spec")}
                if not history:
                    found[_place(obj)]["metadata"].get("annotations", {}).pop(_ROLLOUT, None)
        for kind, namespace in ((NODE_WEIGHT_CACHE, None), (LEASE, SYSTEM)):
            for obj in self.gateway.list(kind, namespace).items:
                if obj["metadata"]["name"] in NODES:
                    found[_place(obj)] = _plain(obj)
        for obj in self.gateway.list(NODE).items:
            found[_place(obj)] = obj["metadata"]["labels"]
        pods = self.gateway.list(POD, TEAM).items
        found["pods"] = sorted(
            f"{pod['metadata']['labels'].get('dlo.dev/revision')} {_is_ready(pod)}" for pod in pods
        )
        if history:
            found["rollouts"] = len(self.gateway.list(REPLICA_SET, TEAM).items)
        return found


STEPS: tuple[tuple[str, Callable[[Life], None], Callable[[Life], bool]], ...] = (
    ("create", Life.create, Life.ready),
    (
        "change",
        lambda life: life.change(
            {"model": {"source": {"directory": {"root": "samples", "path": "digits-2"}}}}
        ),
        Life.ready,
    ),
    ("scale up", lambda life: life.change({"replicas": 3}), Life.ready),
    ("scale down", lambda life: life.change({"replicas": 1}), Life.ready),
    ("delete", Life.delete, Life.gone),
)


@dataclass
class Operator:
    """The operator's process and its successors, all under one identity, as a pod's container is started again.

    Attributes:
        kubeconfig: how it reaches the API server.
        log: file that all of them write to.
        resync_seconds: pause between its full lists.
        starts: how many there were.
    """

    kubeconfig: Path
    log: Path
    resync_seconds: str = "10"
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Starts one."""
        with self.log.open("ab") as log:
            self.process = start_operator(
                self.kubeconfig, log, identity="operator-1", resync_seconds=self.resync_seconds, more=more
            )
        self.starts += 1
        return self.process

    def exit_status(self) -> int | None:
        """Of the one that was started last; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    @contextmanager
    def running(self, *more: str) -> Iterator[None]:
        """Started; whichever runs at the end is stopped as a kubelet does it."""
        self.start(*more)
        try:
            yield
        finally:
            assert self.process is not None
            stop(self.process)


def ready_everywhere(obj: Object | None) -> bool:
    """Whether a DiffusionDeployment is ready, at the newest generation, on every node that it wants; also in the small
    print, which the operator writes a while later.
    """
    if obj is None:
        return False
    status = obj.get("status", {})
    ready = any(
        (c["type"], c["status"], c["observedGeneration"]) == ("Ready", "True", obj["metadata"]["generation"])
        for c in status.get("conditions", [])
    )
    nodes = status.get("cache", {}).get("nodes", {})
    engines = status.get("readyReplicas", 0) == obj["spec"]["replicas"]
    return ready and engines and nodes.get("ready") == nodes.get("desired")


def wait(done: Callable[[], Any], what: str, seconds: float, pause: float = 0.1) -> None:
    """Until `done` says something true."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}"
        time.sleep(pause)


def differences(found: Any, expected: Any, path: str = "") -> Iterable[str]:
    """Where two states differ, one line a place."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from differences(found.get(key), expected.get(key), f"{path}/{key}")
    elif found != expected:
        yield f"{path}: {repr(found)[:200]} and not {repr(expected)[:200]}"


def _place(obj: Object) -> str:
    return f"{obj['kind']} {obj['metadata']['name']}"


def _is_ready(pod: Object) -> bool:
    found = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in found)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in _VOLATILE}
    return [_plain(item) for item in value] if isinstance(value, list) else value
