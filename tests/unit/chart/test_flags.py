"""Every flag that the chart renders is one that the program takes: parsed by the programs' own parsers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dlo_agent import __main__ as agent
from dlo_agent.settings import parse_endpoints, parse_size, parse_source_roots
from dlo_api.names import SAMPLES_ROOT
from dlo_operator.cleanup import parse_cleanup
from dlo_operator.metrics import Metrics
from dlo_operator.settings import parse
from prometheus_client import CollectorRegistry, start_http_server
from unit.chart.rendering import Object, containers, of_kind, one, pods, rendered

NAMES = ("default", "minimal", "monitoring", "production")


def words(container: Object) -> list[str]:
    """The arguments as the container gets them: `$(NAME)` is filled in as a kubelet does."""
    values = {item["name"]: item.get("value") or f"some-{item['name'].lower()}" for item in container["env"]}

    def fill(text: str) -> str:
        return re.sub(r"\$\(([A-Z_]+)\)", lambda found: values[found[1]].replace("_", "-"), text)

    return [fill(word) for word in container["args"]]


@pytest.mark.parametrize("name", NAMES)
def test_operator_takes_its_flags(name: str) -> None:
    """And finds in them what the values say."""
    deployment = one(rendered(name), "Deployment", "dlo-operator")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["dlo-operator"]
    settings = parse(words(container))
    assert settings.identity == "some-dlo-pod-name"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (settings.metrics_port, settings.health_port) == (ports["metrics"], ports["health"])
    plan = settings.plan
    if name == "production":
        assert plan.agent_namespace == "dlo-agents"
        assert plan.images.agent == f"localhost:5000/mirror/dlo/agent@sha256:{'2' * 64}"
        assert plan.images.engine == "localhost:5000/mirror/dlo/engine:0.1.0-cuda"
        assert (plan.images.pull_policy, plan.images.pull_secrets) == ("Always", ("mirror",))
        assert plan.hub_endpoints == {"default"}
        assert plan.s3_endpoints == {"default", "archive"}
    else:
        assert plan.agent_namespace == plan.namespace == "dlo-system"
        assert plan.images.engine == "localhost/dlo/engine:0.1.0"
        assert plan.hub_endpoints == plan.s3_endpoints == frozenset()


@pytest.mark.parametrize("name", NAMES)
def test_agent_takes_its_flags(name: str) -> None:
    """One DaemonSet a node class, each with its own root."""
    for daemon_set in of_kind(rendered(name), "DaemonSet"):
        pod = daemon_set["spec"]["template"]["spec"]
        container = pod["containers"][0]
        assert container["command"] == ["dlo-agent"]
        given = agent._parser({}).parse_args(words(container))
        assert given.node == "some-dlo-node-name"
        assert given.port == container["ports"][0]["containerPort"]
        assert given.namespace == "dlo-system"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert str(given.root) == mounts["cache"]
        assert str(given.host_root) == volumes["cache"]["hostPath"]["path"]
        assert parse_size(given.warm_budget) >= 0
        assert parse_size(given.headroom) >= 0
        roots = parse_source_roots(given.source_roots)
        assert roots.pop(SAMPLES_ROOT) == Path("/opt/dlo/samples")
        assert {f"source-{root}": str(folder) for root, folder in roots.items()} == {
            mount: path for mount, path in mounts.items() if mount.startswith("source-")
        }


def test_agent_is_told_endpoints_layouts_and_where_credentials_lie() -> None:
    """The names are those that the operator is told."""
    for daemon_set in of_kind(rendered("production"), "DaemonSet"):
        given = agent._parser({}).parse_args(words(daemon_set["spec"]["template"]["spec"]["containers"][0]))
        assert given.secrets_namespace == "dlo-agents"
        assert parse_endpoints("--hub-endpoint", given.hub_endpoints) == {"default": "https://hub.internal"}
        assert parse_endpoints("--s3-endpoint", given.s3_endpoints) == {
            "default": "https://s3.internal",
            "archive": "https://archive.internal:9000",
        }
        # The files are there in a pod alone; their text is tested with the ConfigMap.
        assert given.layouts == ["my-model=/etc/dlo/layouts/my-model.json"]


def test_init_root_takes_its_flags() -> None:
    """It makes the root for the user that the agent runs as."""
    found = 0
    for name in NAMES:
        for _, pod in pods(rendered(name)):
            for container in pod.get("initContainers", []):
                found += 1
                assert container["command"] == ["dlo-agent"]
                given = agent._parser({}).parse_args(container["args"])
                assert (given.uid, given.gid) == (
                    pod["securityContext"]["runAsUser"],
                    pod["securityContext"]["runAsGroup"],
                )
                assert str(given.root) == container["volumeMounts"][0]["mountPath"]
    assert found


@pytest.mark.parametrize("name", ["default", "production"])
def test_cleanup_takes_its_flags(name: str) -> None:
    """The same two namespaces as the operator."""
    job = one(rendered(name), "Job", "cleanup")["spec"]["template"]["spec"]["containers"][0]
    assert (job["command"], job["args"][0]) == (["dlo-operator"], "cleanup")
    settings = parse_cleanup(job["args"][1:])
    assert settings.namespace == "dlo-system"
    assert settings.agent_namespace == ("dlo-agents" if name == "production" else "dlo-system")


def test_test_pod_runs_what_it_says() -> None:
    """The script of `helm test` compiles, and asks the metrics Service."""
    container = containers(one(rendered("default"), "Pod", "test")["spec"])[0]
    script, url = container["args"]
    compile(script, "leads.py", "exec")
    service = one(rendered("default"), "Service", "metrics")
    assert (
        url
        == f"http://{service['metadata']['name']}.dlo-system.svc:{service['spec']['ports'][0]['port']}/metrics"
    )


@contextmanager
def operator_metrics(leads: int) -> Iterator[list[str]]:
    """The command of `helm test` against an operator that leads, or does not."""
    metrics = Metrics(CollectorRegistry())
    metrics.leader.set(leads)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    script = containers(one(rendered("default"), "Pod", "test")["spec"])[0]["args"][0]
    try:
        yield [sys.executable, "-P", "-c", script, f"http://127.0.0.1:{server.server_port}/metrics"]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_test_pod_ends_well_when_the_operator_leads() -> None:
    """The script reads the operator's own metrics."""
    with operator_metrics(leads=1) as command:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "the operator leads\n")


def test_test_pod_waits_while_nobody_leads() -> None:
    """It is not content with an answer."""
    with operator_metrics(leads=0) as command, pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=4)
