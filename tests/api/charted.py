"""The chart installed by helm on a real API server, and gateways with the tokens of its own accounts."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api.apiserver import ApiServer
from clusterbin import binary, missing
from dlo_api.names import AGENT_FIELD_MANAGER, OPERATOR_FIELD_MANAGER
from dlo_kube.client import ClusterGateway
from dlo_kube.errors import Denied
from dlo_kube.gateway import Object
from dlo_kube.kinds import LEASE, NODE, NODE_WEIGHT_CACHE
from dlo_operator import nodes
from dlo_operator.reconcile.record import Claim

CHART = Path(__file__).parents[2] / "charts" / "dlo-operator"
SYSTEM, AGENTS, ROOT = "dlo-system", "dlo-agents", "/var/lib/dlo/cache"
OPERATOR, AGENT = "dlo-operator-operator", "dlo-operator-agent"
FLAGS = ("--set", f"image.registry=localhost,agent.namespace={AGENTS}")


@dataclass(frozen=True)
class Cluster:
    """A server with the chart installed as `dlo-operator` in `dlo-system`."""

    server: ApiServer
    admin: ClusterGateway

    def helm(self, *words: str, check: bool = True) -> str:
        """What helm says."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=120, env=self.env)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def command(self, *words: str) -> list[str]:
        """A command line of helm."""
        return [str(binary("helm")), "--kubeconfig", str(self.server.kubeconfig), *words]

    @property
    def env(self) -> dict[str, str]:
        """Nothing of the person who runs the tests."""
        return {"HOME": str(self.server.folder), "PATH": "/usr/bin:/bin"}

    def token(self, namespace: str, account: str, pod: str = "") -> str:
        """A token of a service account, bound to a pod where one is named."""
        bound = ("--bound-object-kind=Pod", f"--bound-object-name={pod}") if pod else ()
        return self.server.kubectl("create", "token", "-n", namespace, account, *bound).strip()

    def by(self, namespace: str, account: str, pod: str = "") -> ClusterGateway:
        """A gateway with such a token."""
        return self.server.gateway(self.token(namespace, account, pod))

    def kubeconfig(self, file: Path, token: str) -> Path:
        """A kubeconfig with a token."""
        config = json.loads(self.server.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        file.write_text(json.dumps(config))
        file.chmod(0o600)
        return file

    def node(self, name: str) -> str:
        """A node with its cache, its heartbeat, and a pod of the agent on it; the pod's name."""
        node = self.admin.create({**bare(NODE, name), "spec": {}})
        self.admin.apply(nodes.cache_object(node, Claim()), manager=OPERATOR_FIELD_MANAGER)
        self.admin.apply(nodes.lease_object(node, SYSTEM), manager=OPERATOR_FIELD_MANAGER)
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"agent-{name}", "namespace": AGENTS},
            "spec": {
                "nodeName": name,
                "serviceAccountName": AGENT,
                "containers": [{"name": "agent", "image": "none"}],
            },
        }
        self.admin.create(pod)
        return f"agent-{name}"


def bare(kind: Any, name: str, namespace: str = "", **meta: Any) -> Object:
    """An object with nothing but its name."""
    where = {"namespace": namespace} if namespace else {}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name, **where, **meta}}


Agents = tuple[ClusterGateway, ClusterGateway]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Installed by helm into a namespace that enforces `restricted`, CRDs included."""
    if missing(("helm",)):
        reason = "helm not built: run python tests/clusterbin.py helm (needs Go)"
        if os.environ.get("DLO_REQUIRE_API") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with ApiServer(tmp_path_factory.mktemp("chart")) as server:
        gateway = server.gateway()
        made = Cluster(server, gateway)
        for namespace, level in ((SYSTEM, "restricted"), (AGENTS, "privileged")):
            server.kubectl("create", "namespace", namespace)
            server.kubectl("label", "namespace", namespace, f"pod-security.kubernetes.io/enforce={level}")
        made.helm("install", "dlo-operator", str(CHART), "-n", SYSTEM, *FLAGS)
        server.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
        yield made
        gateway.close()


@pytest.fixture(scope="module")
def agents(cluster: Cluster) -> Iterator[tuple[ClusterGateway, ClusterGateway]]:
    """The agents of two nodes. The policies take effect some time after they are made: this waits for it."""
    pods = [cluster.node(name) for name in ("node-1", "node-2")]
    one, two = (cluster.by(AGENTS, AGENT, pod) for pod in pods)
    end = time.monotonic() + 60
    while True:
        try:
            beat(one, "node-2")
        except Denied as error:
            if "may not write" in str(error):
                break
        assert time.monotonic() < end, "the policies did not take effect"
        time.sleep(0.5)
    yield one, two
    one.close()
    two.close()


def beat(gateway: ClusterGateway, node: str, namespace: str = SYSTEM, **meta: Any) -> None:
    """What an agent's heartbeat writes."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
    lease = bare(LEASE, node, namespace, **meta)
    gateway.apply(
        {**lease, "spec": {"holderIdentity": node, "renewTime": stamp}}, manager=AGENT_FIELD_MANAGER
    )


def report(gateway: ClusterGateway, node: str, version: str) -> None:
    """What an agent writes into a status."""
    status = {"agentVersion": version}
    gateway.apply_status({**bare(NODE_WEIGHT_CACHE, node), "status": status}, manager=AGENT_FIELD_MANAGER)
