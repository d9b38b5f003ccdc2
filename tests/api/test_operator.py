"""The operator as its own process on a real API server: kopf, queue, leadership, server-side apply.

The Deployment controller and the garbage collector are the real ones; agents are simulated, and so are kubelets,
which only say that a pod is ready.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api.apiserver import ApiServer
from api.life import CONTROLLERS, ready_everywhere
from api.processes import SYSTEM, start_operator, stop
from dlo_kube.client import ClusterGateway
from dlo_kube.gateway import Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    LEASE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
)
from fakes.proxy import WRITES
from unit.api.manifests import manifest
from unit.operator.simulated import Agent, Content


class Stage:
    """A namespace, nodes with agents, and the operator's process."""

    def __init__(self, server: ApiServer, gateway: ClusterGateway, namespace: str, folder: Path) -> None:
        self.server, self.gateway, self.namespace, self.folder = server, gateway, namespace, folder
        self.agents: list[Agent] = []
        content = Content()
        for number in (1, 2):
            name = f"{namespace}-node-{number}"
            gateway.create(
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": name, "labels": {"stage": namespace}},
                }
            )
            self.agents.append(Agent(gateway, name, content, SYSTEM))

    @contextmanager
    def operator(
        self, number: int, how: signal.Signals = signal.SIGTERM
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The operator's process, ended by a signal."""
        with (self.folder / f"operator-{number}.log").open("wb") as log:
            process = start_operator(self.server.kubeconfig, log, identity=f"operator-{number}")
        try:
            yield process
        finally:
            stop(process, how)

    def log(self, number: int) -> str:
        """What the operator has logged."""
        return (self.folder / f"operator-{number}.log").read_text(errors="replace")[-4000:]

    def act(self) -> None:
        """Agents take a turn; every pod that is not ready becomes it."""
        for agent in self.agents:
            agent.step(most=1)
        for pod in self.gateway.list(POD, self.namespace).items:
            conditions = pod.get("status", {}).get("conditions", [])
            if "deletionTimestamp" in pod["metadata"] or any(
                c["type"] == "Ready" and c["status"] == "True" for c in conditions
            ):
                continue
            meta = {"name": pod["metadata"]["name"], "namespace": self.namespace}
            status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            self.gateway.apply_status(
                {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}, manager="kubelet"
            )

    def until(self, what: str, done: Callable[[], Any], number: int, seconds: float = 60.0) -> Any:
        """Lets everybody act until `done` says something true."""
        end = time.monotonic() + seconds
        while not (found := done()):
            assert time.monotonic() < end, f"not {what}: {self.status()}\n{self.log(number)}"
            self.act()
            time.sleep(0.2)
        return found

    def status(self) -> Any:
        """The status of the deployment."""
        obj = self.gateway.get(DIFFUSION_DEPLOYMENT, "digits", self.namespace)
        return None if obj is None else obj.get("status")

    def ready(self) -> bool:
        """See `ready_everywhere`."""
        return ready_everywhere(self.gateway.get(DIFFUSION_DEPLOYMENT, "digits", self.namespace))

    def writes(self, since: int) -> list[tuple[str, str, str]]:
        """The operator's writes after the audit log's line `since`, renewals of its own Lease aside."""
        return [
            (entry["verb"], entry["objectRef"]["resource"], entry["objectRef"].get("name", ""))
            for entry in self.server.audit()[since:]
            if entry["verb"] in WRITES
            and entry.get("userAgent", "").startswith(("dlo-operator", "kopf"))
            and entry.get("objectRef", {}).get("name") != "dlo-operator-leader"
        ]

    def template(self) -> Object:
        """The pod template of the child Deployment."""
        obj = self.gateway.get(DEPLOYMENT, "digits", self.namespace)
        assert obj is not None
        found: Object = obj["spec"]["template"]
        return found


@pytest.fixture
def stage(own_server: ApiServer, tmp_path: Path) -> Iterator[Stage]:
    """A server of its own, so that every write is about this stage; two nodes, two agents."""
    gateway = own_server.gateway()
    for name in (SYSTEM, "stage"):
        gateway.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield Stage(own_server, gateway, "stage", tmp_path)
    gateway.close()


def test_the_whole_loop(stage: Stage) -> None:
    """Ready; then no write; killed and started again: no write; a new model rolls; deleted: nothing is left."""
    server, gateway, namespace = stage.server, stage.gateway, stage.namespace
    with server.controllers(*CONTROLLERS):
        with stage.operator(1, signal.SIGKILL):
            gateway.create(
                manifest(
                    {
                        "metadata.namespace": namespace,
                        "spec.engine.device": "Cpu",
                        "spec.parallelism.tensor": 2,
                        "spec.replicas": 2,
                        # The server keeps it as 500m, which must not look like somebody's change.
                        "spec.engine.resources": {"requests": {"cpu": "0.5"}},
                        "spec.placement.nodeSelector": {"stage": namespace},
                        # The server taints new nodes, and nothing here says that they are ready.
                        "spec.placement.tolerations": [{"operator": "Exists"}],
                    }
                )
            )
            stage.until("ready", stage.ready, 1)
            quiet_from = _quiet(stage, 1)
            assert stage.writes(quiet_from) == []
        with stage.operator(2):
            since = len(server.audit())
            stage.until("leading", lambda: _holder(gateway) == "operator-2", 2)
            time.sleep(5)
            written = stage.writes(since)
            assert not written, written
            before = stage.template()
            gateway.apply(
                {
                    "apiVersion": DIFFUSION_DEPLOYMENT.api_version,
                    "kind": DIFFUSION_DEPLOYMENT.kind,
                    "metadata": {"name": "digits", "namespace": namespace},
                    "spec": {"model": {"source": {"directory": {"root": "samples", "path": "digits-2"}}}},
                },
                manager="user",
            )
            stage.until("rolled", lambda: stage.ready() and stage.template() != before, 2)
            obj = gateway.get(DIFFUSION_DEPLOYMENT, "digits", namespace)
            assert obj is not None
            assert obj["metadata"].get("finalizers") is None
            assert not [key for key in obj["metadata"].get("annotations", {}) if "kopf" in key]
            gateway.delete(DIFFUSION_DEPLOYMENT, "digits", namespace, uid=obj["metadata"]["uid"])
            kinds = (DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET)
            stage.until("gone", lambda: not any(gateway.get(kind, "digits", namespace) for kind in kinds), 2)
            stage.until(
                "emptied", lambda: not any(_entries(gateway, agent.node) for agent in stage.agents), 2
            )
        assert _holder(gateway) == ""


def _quiet(stage: Stage, number: int) -> int:
    """A place in the audit log after which nothing should be written: the last write is five seconds ago."""
    stage.until("quiet", lambda: _no_writes_for(stage, 5.0), number)
    since = len(stage.server.audit())
    time.sleep(5)
    return since


def _no_writes_for(stage: Stage, seconds: float) -> bool:
    since = len(stage.server.audit())
    time.sleep(seconds)
    return not stage.writes(since)


def _holder(gateway: ClusterGateway) -> str | None:
    lease = gateway.get(LEASE, "dlo-operator-leader", SYSTEM)
    return None if lease is None else (lease["spec"].get("holderIdentity") or "")


def _entries(gateway: ClusterGateway, node: str) -> list[Any]:
    cache = gateway.get(NODE_WEIGHT_CACHE, node)
    assert cache is not None
    found: list[Any] = cache.get("spec", {}).get("entries", [])
    return found
