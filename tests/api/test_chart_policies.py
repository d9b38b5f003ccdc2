"""The chart on a real API server: installed by helm, its rights and admission policies tried with its own accounts.

No kubelet runs, so no pod does: tokens are bound to pods that a test puts on nodes, as a kubelet asks for them.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from api.charted import (
    AGENT,
    AGENTS,
    OPERATOR,
    ROOT,
    SYSTEM,
    Agents,
    Cluster,
    bare,
    beat,
    report,
)
from clusterbin import binary
from dlo_api.names import AGENT_FIELD_MANAGER, OPERATOR_FIELD_MANAGER
from dlo_kube.client import ClusterGateway
from dlo_kube.errors import Denied
from dlo_kube.gateway import Object
from dlo_kube.kinds import (
    DIFFUSION_DEPLOYMENT,
    LEASE,
    NODE,
    NODE_WEIGHT_CACHE,
    PERSISTENT_VOLUME,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    SECRET,
)
from dlo_operator import nodes
from dlo_operator.reconcile.record import Claim
from dlo_operator.reconcile.volumes import pair


def test_agent_writes_for_its_own_node(cluster: Cluster, agents: Agents) -> None:
    """Status and heartbeat, each by its own token."""
    for number, gateway in enumerate(agents, 1):
        beat(gateway, f"node-{number}")
        report(gateway, f"node-{number}", f"v{number}")
        found = cluster.admin.get(NODE_WEIGHT_CACHE, f"node-{number}")
        assert found is not None
        assert found["status"]["agentVersion"] == f"v{number}"


def test_agent_does_not_write_for_another_node(agents: Agents) -> None:
    """Refused by the policy, which names the node of the token."""
    with pytest.raises(Denied, match="the agent of node node-1 may not write leases node-2"):
        beat(agents[0], "node-2")
    with pytest.raises(Denied, match="the agent of node node-2 may not write nodeweightcaches node-1"):
        report(agents[1], "node-1", "forged")


def test_token_without_a_node_writes_nothing(cluster: Cluster, agents: Agents) -> None:
    """A token that nobody's pod holds is no agent's."""
    loose = cluster.by(AGENTS, AGENT)
    with pytest.raises(Denied, match="must be bound to a pod on a node"):
        report(loose, "node-1", "forged")
    loose.close()


def test_agent_renews_its_lease_and_nothing_else_of_it(agents: Agents) -> None:
    """A finalizer would make it outlive the node."""
    with pytest.raises(Denied, match="leaves its finalizers, owners and labels alone"):
        beat(agents[0], "node-1", finalizers=["dlo.dev/mine"])
    with pytest.raises(Denied, match="leaves its finalizers, owners and labels alone"):
        beat(agents[0], "node-1", labels={"forged": "yes"})


def test_agent_has_no_right_to_specs_secrets_or_nodes(cluster: Cluster, agents: Agents) -> None:
    """What its role does not give, no policy needs to refuse."""
    agent = agents[0]
    cluster.admin.create({**bare(SECRET, "dlo-source-1", AGENTS), "stringData": {"token": "word"}})
    assert agent.get(SECRET, "dlo-source-1", AGENTS) is not None
    node = cluster.admin.get(NODE, "node-1")
    cache = cluster.admin.get(NODE_WEIGHT_CACHE, "node-1")
    assert node is not None
    assert cache is not None
    for attempt in (
        lambda: agent.list(SECRET, AGENTS),
        lambda: agent.list(SECRET),
        lambda: agent.get(SECRET, "any", SYSTEM),
        lambda: agent.get(SECRET, "any", "kube-system"),
        lambda: agent.get(NODE, "node-1"),
        lambda: agent.apply(nodes.cache_object(node, Claim()), manager=AGENT_FIELD_MANAGER),
        lambda: agent.delete(NODE_WEIGHT_CACHE, "node-1", uid=cache["metadata"]["uid"]),
        lambda: agent.list(DIFFUSION_DEPLOYMENT),
    ):
        with pytest.raises(Denied, match="is forbidden: User"):
            attempt()


def test_policy_holds_where_rights_are_too_wide(cluster: Cluster, agents: Agents) -> None:
    """Bound to cluster-admin by somebody's mistake, an agent still makes and deletes no cache or Lease."""
    cluster.server.kubectl(
        "create", "clusterrolebinding", "mistake", "--clusterrole=cluster-admin", f"--serviceaccount={AGENTS}:{AGENT}"
    )  # fmt: skip
    try:
        node, lease = cluster.admin.get(NODE, "node-1"), cluster.admin.get(LEASE, "node-1", SYSTEM)
        assert node is not None
        assert lease is not None
        end = time.monotonic() + 30
        while "is forbidden: User" in str(refusal(lambda: agents[0].list(SECRET))):
            assert time.monotonic() < end
            time.sleep(0.2)
        with pytest.raises(Denied, match="writes the status of a NodeWeightCache alone"):
            agents[0].apply({**bare(NODE_WEIGHT_CACHE, "node-1", labels={"forged": "yes"})}, manager="x")
        with pytest.raises(Denied, match="makes and deletes nothing"):
            agents[0].delete(LEASE, "node-1", SYSTEM, uid=lease["metadata"]["uid"])
        with pytest.raises(Denied, match="makes and deletes nothing"):
            agents[0].create(bare(LEASE, "node-3", SYSTEM))
        with pytest.raises(Denied, match="makes and deletes nothing"):
            beat(agents[0], "node-1", "default")
    finally:
        cluster.server.kubectl("delete", "clusterrolebinding", "mistake")


def refusal(attempt: Any) -> Denied | None:
    """Why it was refused; None where it was not."""
    try:
        attempt()
    except Denied as error:
        return error
    return None


@pytest.fixture
def operator(cluster: Cluster, agents: Agents) -> Iterator[ClusterGateway]:
    """The operator's account."""
    gateway = cluster.by(SYSTEM, OPERATOR)
    yield gateway
    gateway.close()


def test_operator_labels_nodes_and_changes_nothing_else(cluster: Cluster, operator: ClusterGateway) -> None:
    """Labels of ours come and go; anything else of a Node is refused, by name."""
    name = cluster.admin.create(bare(NODE, "labelled", labels={"zone": "a"}))["metadata"]["name"]
    node = cluster.admin.get(NODE, name)
    assert node is not None
    for labels, there in (({"dlo.dev/warm-1"}, True), (set(), False)):
        operator.apply(nodes.label_object(node, labels), manager=OPERATOR_FIELD_MANAGER)
        found = cluster.admin.get(NODE, name)
        assert found is not None
        assert ("dlo.dev/warm-1" in found["metadata"]["labels"]) is there
        assert found["metadata"]["labels"]["zone"] == "a"
    only = "changes labels dlo.dev/… of a Node alone"
    more = "changes labels dlo.dev/… of a Node and nothing else"
    for change, message in (
        ({"metadata": {"labels": {"zone": "b"}}}, only),
        ({"metadata": {"labels": {"new": "b"}}}, only),
        ({"metadata": {"labels": {"dlo.dev.evil/x": "b"}}}, only),
        ({"metadata": {"labels": {"zone": None}}}, only),
        ({"metadata": {"annotations": {"some": "thing"}}}, more),
        ({"metadata": {"finalizers": ["some/thing"]}}, more),
        ({"spec": {"taints": [{"key": "some", "effect": "NoSchedule"}]}}, more),
        ({"spec": {"unschedulable": True}}, more),
    ):
        config = cluster.kubeconfig(
            cluster.server.folder / "operator.kubeconfig", cluster.token(SYSTEM, OPERATOR)
        )
        done = subprocess.run(
            [
                *(str(binary("kubectl")), "--kubeconfig", str(config)),
                *("patch", "node", name, "--type=merge", "-p", json.dumps(change)),
            ],
            capture_output=True,
            text=True,
            env=cluster.env,
        )
        assert done.returncode != 0, change
        assert message in done.stderr, (change, done.stderr)
    assert cluster.admin.get(NODE, name) == found


def test_operator_makes_volumes_of_cache_roots_alone(cluster: Cluster, operator: ClusterGateway) -> None:
    """The pair that it makes is taken; the node's root folder, or somebody's volume, is not."""
    cluster.server.kubectl("create", "namespace", "team-volumes")
    for obj in pair("team-volumes", ROOT, None):
        operator.apply(obj, manager=OPERATOR_FIELD_MANAGER)
    _, evil = pair("team-volumes", "/etc", None)
    with pytest.raises(Denied, match="volumes of cache roots"):
        operator.apply(evil, manager=OPERATOR_FIELD_MANAGER)
    changes: tuple[dict[str, Any], ...] = (
        {"accessModes": ["ReadWriteMany"]},
        {"mountOptions": []},
        {"mountOptions": ["noatime"]},
        {"mountOptions": ["ro", "rw"]},
        {"local": None, "nodeAffinity": None, "mountOptions": None, "hostPath": {"path": ROOT}},
    )
    for change in changes:
        _, wrong = pair("team-volumes-2", ROOT, None)
        spec = {**wrong["spec"], **change}
        wrong["spec"] = {key: value for key, value in spec.items() if value is not None}
        with pytest.raises(Denied, match="volumes of cache roots"):
            operator.apply(wrong, manager=OPERATOR_FIELD_MANAGER)
    theirs = cluster.admin.create(
        {
            **bare(PERSISTENT_VOLUME, "theirs"),
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "1Gi"},
                "hostPath": {"path": "/data"},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        }
    )
    with pytest.raises(Denied, match="touches no volume but its own"):
        operator.delete(PERSISTENT_VOLUME, "theirs", uid=theirs["metadata"]["uid"])


def test_operator_touches_no_claim_but_its_own(cluster: Cluster, operator: ClusterGateway) -> None:
    """Claims hold data: neither removed nor changed nor made, whatever the operator is led to believe."""
    cluster.server.kubectl("create", "namespace", "team-claims")
    claim, _ = pair("team-claims", ROOT, None)
    theirs = cluster.admin.create({**claim, "metadata": {"name": "data", "namespace": "team-claims"}})
    forged = bare(
        PERSISTENT_VOLUME_CLAIM,
        "data",
        "team-claims",
        labels={"app.kubernetes.io/managed-by": "dlo-operator"},
    )
    other = {**claim, "metadata": {**claim["metadata"], "name": "other"}}
    for attempt in (
        lambda: operator.delete(
            PERSISTENT_VOLUME_CLAIM, "data", "team-claims", uid=theirs["metadata"]["uid"]
        ),
        lambda: operator.apply(forged, manager=OPERATOR_FIELD_MANAGER),
        lambda: operator.apply(other, manager=OPERATOR_FIELD_MANAGER),
    ):
        with pytest.raises(Denied, match="touches no claim but its own"):
            attempt()
    made = operator.apply(claim, manager=OPERATOR_FIELD_MANAGER)
    name, uid = made["metadata"]["name"], made["metadata"]["uid"]
    assert operator.delete(PERSISTENT_VOLUME_CLAIM, name, "team-claims", uid=uid)


def test_no_pod_may_write_a_cache_root(cluster: Cluster, agents: Agents) -> None:
    """Whoever makes it: a claim of a root is mounted read-only; other claims, and other pods, are nobody's business."""
    cluster.server.kubectl("create", "namespace", "team-pods")
    claim, _ = pair("team-pods", ROOT, None)
    name = claim["metadata"]["name"]

    def tried(pod: str, volume: Object) -> str:
        text = json.dumps(
            {
                **bare(POD, pod, "team-pods"),
                "spec": {
                    "automountServiceAccountToken": False,
                    "containers": [{"name": "any", "image": "none"}],
                    "volumes": [volume] if volume else [],
                },
            }
        )
        return cluster.server.kubectl("create", "--dry-run=server", "-f", "-", text=text, check=False)

    cluster.server.kubectl("-n", "team-pods", "create", "serviceaccount", "default", check=False)
    for given in ({}, {"readOnly": False}):
        said = tried("any", {"name": "cache", "persistentVolumeClaim": {"claimName": name, **given}})
        assert "readOnly true alone" in said, said
    ephemeral: Object = {"volumeClaimTemplate": {"spec": claim["spec"]}}
    assert "named like a claim of a cache root" in tried("dlo", {"name": name[4:], "ephemeral": ephemeral})
    for volume in (
        {},
        {"name": "cache", "persistentVolumeClaim": {"claimName": name, "readOnly": True}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "scratch", "ephemeral": ephemeral},
        {"name": "empty", "emptyDir": {}},
    ):
        said = tried("any", volume)
        assert "(server dry run)" in said, said


def test_operator_reads_no_secret_until_a_team_lets_it(cluster: Cluster, operator: ClusterGateway) -> None:
    """As NOTES says: the team binds `dlo-secret-reader` in its own namespace."""
    cluster.server.kubectl("create", "namespace", "team")
    cluster.admin.create({**bare(SECRET, "hf", "team"), "stringData": {"token": "word"}})
    assert refusal(lambda: operator.get(SECRET, "hf", "team"))
    cluster.server.kubectl(
        "-n", "team", "create", "rolebinding", "dlo-secret-reader", "--clusterrole=dlo-secret-reader",
        f"--serviceaccount={SYSTEM}:{OPERATOR}",
    )  # fmt: skip
    end = time.monotonic() + 30
    while refusal(lambda: operator.get(SECRET, "hf", "team")):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert refusal(lambda: operator.list(SECRET, "team"))
    assert refusal(lambda: operator.get(SECRET, "hf", "default"))


def test_pods_are_let_into_their_namespaces(cluster: Cluster) -> None:
    """H17, by the server's own Pod Security: operator and Job under `restricted`, agents under `privileged` alone."""
    for kind, name, namespace in (
        ("deployment", "dlo-operator", SYSTEM),
        ("daemonset", "dlo-operator-agent-default", AGENTS),
    ):
        made = json.loads(cluster.server.kubectl("-n", namespace, "get", kind, name, "-o", "json"))
        template = made["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"tried-{kind}", "labels": template["metadata"]["labels"]},
            "spec": template["spec"],
        }
        for where, taken in ((namespace, True), (SYSTEM, kind == "deployment")):
            text = json.dumps({**pod, "metadata": {**pod["metadata"], "namespace": where}})
            said = cluster.server.kubectl("create", "--dry-run=server", "-f", "-", text=text, check=False)
            assert ("violates PodSecurity" not in said) is taken, said
            assert ("(server dry run)" in said) is taken, said
