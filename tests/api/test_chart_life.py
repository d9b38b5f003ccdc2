"""The life of a release on a real API server: the operator on the chart's rights, upgraded, uninstalled, back again.

Agents are simulated, with the tokens of their own account; no pod runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from api.apiserver import ApiServer
from api.charted import (
    AGENTS,
    CHART,
    FLAGS,
    OPERATOR,
    ROOT,
    SYSTEM,
    Agents,
    Cluster,
    beat,
)
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    EVENT,
    LEASE,
    NODE,
    NODE_WEIGHT_CACHE,
    PERSISTENT_VOLUME,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
)
from dlo_operator import nodes
from unit.api.manifests import manifest
from unit.operator.simulated import Agent, Content

VOLUMES = (PERSISTENT_VOLUME, PERSISTENT_VOLUME_CLAIM)


def test_operator_lives_on_the_charts_rights(cluster: Cluster, agents: Agents, tmp_path: Path) -> None:
    """The real process, kopf included, under its own account: a deployment is taken up, and nothing is forbidden."""
    config = cluster.kubeconfig(tmp_path / "kubeconfig", cluster.token(SYSTEM, OPERATOR))
    flags = {
        "--namespace": SYSTEM,
        "--agent-namespace": AGENTS,
        "--engine-image": "engine:1",
        "--agent-image": "agent:1",
        "--identity": "tried",
        "--metrics-port": "0",
        "--health-port": "0",
        "--heartbeat-seconds": "1",
        "--kubeconfig": str(config),
    }
    cluster.server.kubectl("create", "namespace", "lives")
    for name, mount in (("digits", "HostPath"), ("claimed", "PersistentVolume")):
        changes = {
            "metadata.namespace": "lives",
            "metadata.name": name,
            "spec.engine.device": "Cpu",
            "spec.replicas": 2,
            "spec.cache.mount": mount,
            # The server taints new nodes, and nothing here says that they are ready.
            "spec.placement.tolerations": [{"operator": "Exists"}],
        }
        cluster.admin.create(manifest(changes))
    # One that is refused, since people are told of what fails by an Event.
    refused = {"huggingFace": {"repo": "org/name", "endpoint": "unlisted"}}
    meta = {"metadata.namespace": "lives", "metadata.name": "refused"}
    cluster.admin.create(manifest({**meta, "spec.model.source": refused}))
    content = Content()
    simulated = [
        Agent(gateway, f"node-{number}", content, SYSTEM, root=ROOT)
        for number, gateway in enumerate(agents, 1)
    ]
    user = f"system:serviceaccount:{SYSTEM}:{OPERATOR}"
    since = len(cluster.server.audit())
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dlo_operator", *(word for pair in flags.items() for word in pair)],
            stdout=log,
            stderr=log,
        )
    try:
        end = time.monotonic() + 90
        while not all(cluster.admin.get(DEPLOYMENT, name, "lives") for name in ("digits", "claimed")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
            for agent in simulated:
                agent.step()
            time.sleep(0.5)
        time.sleep(3)
    finally:
        process.terminate()
        process.wait(30)
    calls = {
        (entry["verb"], entry["objectRef"]["resource"], entry.get("responseStatus", {}).get("code"))
        for entry in cluster.server.audit()[since:]
        if entry["user"]["username"] == user and "objectRef" in entry
    }
    done = {(verb, resource) for verb, resource, code in calls if code in (200, 201)}
    assert {("watch", kind.plural) for kind in (DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, NODE, POD)} <= done
    assert {
        ("patch", kind.plural)
        for kind in (
            *(DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, NODE, LEASE),
            *(DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET, PERSISTENT_VOLUME, PERSISTENT_VOLUME_CLAIM),
        )
    } <= done
    assert ("create", EVENT.plural) in done
    assert {call for call in calls if call[2] in (401, 403)} == set()


def test_upgraded_and_rolled_back(cluster: Cluster, agents: Agents) -> None:
    """Switches make and remove what they name; definitions and objects of both kinds live on."""
    before = [obj["metadata"]["uid"] for obj in cluster.admin.list(NODE_WEIGHT_CACHE).items]
    budget = ("dlo-operator", SYSTEM)
    changed = ("--set", "operator.replicas=2,networkPolicy.enabled=true")
    cluster.helm("upgrade", "dlo-operator", str(CHART), "-n", SYSTEM, "--reuse-values", *changed)
    assert cluster.admin.get(POD_DISRUPTION_BUDGET, *budget) is not None
    made = cluster.admin.get(DEPLOYMENT, *budget)
    assert made is not None
    assert made["spec"]["replicas"] == 2
    cluster.helm("rollback", "dlo-operator", "1", "-n", SYSTEM)
    assert cluster.admin.get(POD_DISRUPTION_BUDGET, *budget) is None
    after = [obj["metadata"]["uid"] for obj in cluster.admin.list(NODE_WEIGHT_CACHE).items]
    assert len(before) >= 2
    assert after == before
    for number, gateway in enumerate(agents, 1):
        beat(gateway, f"node-{number}")


def test_uninstalled_by_its_own_job_and_installed_under_another_name(
    cluster: Cluster, agents: Agents
) -> None:
    """The Job's account removes what the operator made; CRDs and people's objects stay; NOTES says how to go on.

    Here the Job's command runs outside a pod, with a token of the account that the hook has made.
    """
    admin, server = cluster.admin, cluster.server
    server.kubectl("create", "namespace", "keeps")
    server.kubectl("delete", "ddep", "--all", "-n", "lives")
    volumes = admin.list(PERSISTENT_VOLUME).items
    admin.create(manifest({"metadata.namespace": "keeps"}))
    uninstall = subprocess.Popen(
        cluster.command("uninstall", "dlo-operator", "-n", SYSTEM, "--timeout", "90s"),
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        account, job = "dlo-operator-cleanup", None
        end = time.monotonic() + 60
        while job is None:
            assert time.monotonic() < end, "the hook's Job did not come"
            assert uninstall.poll() is None, uninstall.communicate()[0]
            said = server.kubectl("-n", SYSTEM, "get", "job", account, "-o", "json", check=False)
            job = json.loads(said) if said.startswith("{") else None
            time.sleep(0.2)
        gone = server.kubectl("get", "clusterrole,clusterrolebinding,validatingadmissionpolicy", "-o", "name")
        assert [line for line in gone.splitlines() if "dlo-operator-operator" in line] == []
        container = job["spec"]["template"]["spec"]["containers"][0]
        config = cluster.kubeconfig(server.folder / "cleanup.kubeconfig", cluster.token(SYSTEM, account))
        done = subprocess.run(
            [sys.executable, "-m", "dlo_operator", *container["args"], "--kubeconfig", str(config)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        finish(server, account)
        assert uninstall.wait(60) == 0, uninstall.communicate()[0]
    finally:
        uninstall.kill()
        uninstall.communicate()
    for kind, namespace in ((NODE_WEIGHT_CACHE, None), (LEASE, SYSTEM)):
        assert [obj["metadata"]["name"] for obj in admin.list(kind, namespace).items] == []
    assert not any(nodes.warm_labels(node) for node in admin.list(NODE).items)
    assert admin.get(DIFFUSION_DEPLOYMENT, "digits", "keeps") is not None
    kinds = "serviceaccounts,roles,rolebindings,jobs,deployments,daemonsets,services,configmaps,leases"
    named = server.kubectl("get", kinds, "-A", "-o", "name") + server.kubectl(
        "get", "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings",
        "-o", "name",
    )  # fmt: skip
    assert [line for line in named.splitlines() if "dlo" in line] == []
    # Their protection's finalizer is a controller's to take off, and none runs here.
    assert ("removed 1 PersistentVolumes" in done.stdout) is (len(volumes) == 1), done.stdout
    left = [obj["metadata"] for kind in VOLUMES for obj in admin.list(kind).items]
    assert [meta["name"] for meta in left if "deletionTimestamp" not in meta] == []

    other = ("install", "weights", str(CHART), "-n", SYSTEM, *FLAGS)
    refused = cluster.helm(*other, "--dry-run=server", check=False)
    assert "cannot be imported into the current release" in refused
    cluster.helm(*other, "--take-ownership")
    cluster.helm("uninstall", "weights", "-n", SYSTEM, "--no-hooks")
    cluster.helm(*other, "--set", "crds.enabled=false")
    assert admin.get(DIFFUSION_DEPLOYMENT, "digits", "keeps") is not None


def finish(server: ApiServer, job: str) -> None:
    """Says of a Job what its controller says when its pod has succeeded."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now, "lastProbeTime": now}
        for kind in ("SuccessCriteriaMet", "Complete")
    ]
    status = {"startTime": now, "completionTime": now, "succeeded": 1, "conditions": conditions}
    server.kubectl(
        "-n", SYSTEM, "patch", "job", job, "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": {**status, "uncountedTerminatedPods": {}}}),
    )  # fmt: skip
