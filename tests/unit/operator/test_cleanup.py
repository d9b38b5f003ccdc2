"""What an uninstall takes away, and what it leaves; again after any failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dlo_api.names import API_VERSION
from dlo_kube.errors import Denied, NotFound, Unavailable
from dlo_kube.kinds import (
    DIFFUSION_DEPLOYMENT,
    LEASE,
    NODE,
    NODE_WEIGHT_CACHE,
    PERSISTENT_VOLUME,
    PERSISTENT_VOLUME_CLAIM,
    SECRET,
    Kind,
)
from dlo_operator import __main__ as entry
from dlo_operator import nodes
from dlo_operator.cleanup import CleanupSettings, Step, clean_up, parse_cleanup
from dlo_operator.executor import Executor
from dlo_operator.leader import LEASE_NAME
from dlo_operator.reconcile.record import Claim
from dlo_operator.reconcile.volumes import pair
from fakes.kube import Call, FakeCluster

SETTINGS = CleanupSettings("dlo-system", "dlo-agents")
OURS = {"app.kubernetes.io/managed-by": "dlo-operator"}
KINDS = (
    NODE_WEIGHT_CACHE,
    LEASE,
    NODE,
    SECRET,
    PERSISTENT_VOLUME_CLAIM,
    PERSISTENT_VOLUME,
    DIFFUSION_DEPLOYMENT,
)
IDLE, USED = pair("idle", "/cache", None), pair("team", "/cache", None)
CLAIM, VOLUME, USED_VOLUME = (obj["metadata"]["name"] for obj in (*IDLE, USED[1]))


def thing(kind: Kind, name: str, namespace: str = "", labels: dict[str, str] | None = None) -> dict[str, Any]:
    """An object with nothing in it."""
    meta: dict[str, Any] = {"name": name, "labels": labels or {}}
    if namespace:
        meta["namespace"] = namespace
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta}


@pytest.fixture
def cluster() -> FakeCluster:
    """After an uninstall: the operator's objects, written as it writes them, between other people's."""
    made = FakeCluster()
    executor = Executor(made)
    for number in (1, 2):
        node = made.put(thing(NODE, f"node-{number}", labels={"zone": "a", "dlo.dev/pool": "mine"}))
        executor.apply(nodes.cache_object(node, Claim()), None)
        executor.apply(nodes.lease_object(node, "dlo-system"), None)
        executor.label_node(nodes.label_object(node, {"dlo.dev/warm-1234"}))
    made.put(thing(NODE, "node-3", labels={"zone": "b"}))
    made.put(thing(LEASE, LEASE_NAME, "dlo-system"))
    made.put(thing(LEASE, "others", "dlo-system"))
    made.put(thing(LEASE, "node-1", "kube-node-lease", OURS))
    made.put(thing(SECRET, "dlo-source-1", "dlo-agents", {**OURS, "dlo.dev/source": "1"}))
    made.put(thing(SECRET, "registry", "dlo-agents"))
    made.put(thing(SECRET, "ours-but-no-copy", "dlo-agents", OURS))
    made.put(thing(SECRET, "hf", "team", {**OURS, "dlo.dev/source": "1"}))
    for obj in (*IDLE, *USED):
        executor.apply(obj, None)
    made.put(thing(PERSISTENT_VOLUME, "data"))
    made.put(thing(PERSISTENT_VOLUME_CLAIM, "data", "idle"))
    made.put({**thing(DIFFUSION_DEPLOYMENT, "digits", "team"), "spec": {}, "apiVersion": API_VERSION})
    return made


def left(cluster: FakeCluster) -> dict[str, list[str]]:
    """Names of what there is, by kind."""
    return {kind.kind: [obj["metadata"]["name"] for obj in cluster.objects(kind)] for kind in KINDS}


AFTER = {
    "NodeWeightCache": [],
    "Lease": ["others", "node-1"],
    "Node": ["node-1", "node-2", "node-3"],
    "Secret": ["ours-but-no-copy", "registry", "hf"],
    # Engines in `team` still mount theirs.
    "PersistentVolumeClaim": ["data", CLAIM],
    "PersistentVolume": ["data", USED_VOLUME],
    "DiffusionDeployment": ["digits"],
}


def same(found: dict[str, list[str]]) -> bool:
    """Whether that is what shall be left."""
    return {kind: sorted(names) for kind, names in found.items()} == {
        kind: sorted(names) for kind, names in AFTER.items()
    }


def test_takes_what_the_operator_made_and_leaves_what_people_made(cluster: FakeCluster) -> None:
    """In order: caches, heartbeats, labels, copied credentials, volumes."""
    assert list(clean_up(cluster, SETTINGS)) == [
        Step("NodeWeightCaches", 2),
        Step("Leases", 3),
        Step("labels of Nodes", 2),
        Step("Secrets", 1),
        Step("PersistentVolumeClaims", 1),
        Step("PersistentVolumes", 1),
    ]
    assert same(left(cluster)), left(cluster)
    labels = [node["metadata"]["labels"] for node in cluster.objects(NODE)]
    assert labels == [{"zone": "a", "dlo.dev/pool": "mine"}] * 2 + [{"zone": "b"}]


def test_a_second_time_writes_nothing(cluster: FakeCluster) -> None:
    """A Job that is tried again starts from the beginning."""
    list(clean_up(cluster, SETTINGS))
    cluster.writes.clear()
    assert {step.removed for step in clean_up(cluster, SETTINGS)} == {0}
    assert not cluster.writes


def test_labels_that_somebody_wrote_over_go_too(cluster: FakeCluster) -> None:
    """The label is ours by its name, whoever set it last."""
    node = cluster.objects(NODE)[0]
    cluster.apply(nodes.label_object(node, {"dlo.dev/warm-1234"}), manager="kubectl")
    cluster.apply(nodes.label_object(node, {"dlo.dev/warm-5678"}), manager="restored")
    list(clean_up(cluster, SETTINGS))
    assert cluster.objects(NODE)[0]["metadata"]["labels"] == {"zone": "a", "dlo.dev/pool": "mine"}


def test_a_kind_that_is_denied_does_not_stop_the_others(cluster: FakeCluster) -> None:
    """The problem is told with its kind; everything else goes."""

    def deny(call: Call) -> None:
        if call.verb == "list" and call.kind == "Lease":
            raise Denied("leases is forbidden")

    cluster.before.append(deny)
    steps = {step.what: step for step in clean_up(cluster, SETTINGS)}
    assert steps["Leases"] == Step("Leases", 0, "Forbidden: Leases: leases is forbidden")
    assert [step.what for step in steps.values() if step.problem] == ["Leases"]
    assert left(cluster)["NodeWeightCache"] == []
    assert VOLUME not in left(cluster)["PersistentVolume"]


def test_killed_after_every_write_and_started_again_it_ends_the_same(cluster: FakeCluster) -> None:
    """As many kill points as there are writes."""
    points = 0
    while not same(left(cluster)) or points == 0:
        points += 1
        cluster.fail(1, Unavailable("the connection broke off"), after=True)
        list(clean_up(cluster, SETTINGS))
        cluster.after.clear()
        assert points < 20
    assert points > 1
    assert all(not nodes.warm_labels(node) for node in cluster.objects(NODE))


def test_without_our_kinds_the_rest_goes(cluster: FakeCluster) -> None:
    """`crds.keep=false`: the CustomResourceDefinitions went with the release."""

    def unserved(call: Call) -> None:
        if call.kind in ("NodeWeightCache", "DiffusionDeployment"):
            raise NotFound("the server could not find the requested resource", code="KindNotServed")

    cluster.before.append(unserved)
    steps = list(clean_up(cluster, SETTINGS))
    assert steps[0] == Step("NodeWeightCaches", 0)
    assert not any(step.problem for step in steps)
    # Deployments are gone as well, so nobody mounts a volume any more.
    assert [step.removed for step in steps[-2:]] == [2, 2]


def test_an_object_of_the_same_name_made_meanwhile_is_left(cluster: FakeCluster) -> None:
    """A second install may already be writing: only the object that was seen is deleted."""

    def made_anew(call: Call) -> None:
        if call.verb == "delete" and call.kind == "PersistentVolume":
            cluster.before.clear()
            cluster.remove(PERSISTENT_VOLUME, VOLUME)
            cluster.put(IDLE[1])

    cluster.before.append(made_anew)
    assert list(clean_up(cluster, SETTINGS))[-1] == Step("PersistentVolumes", 0)
    assert VOLUME in left(cluster)["PersistentVolume"]


def test_command_line_names_both_namespaces(capsys: pytest.CaptureFixture[str]) -> None:
    """As the chart's Job calls it; what is missing is named."""
    assert parse_cleanup(["--namespace", "a", "--agent-namespace", "b"]) == CleanupSettings("a", "b")
    with pytest.raises(SystemExit) as ended:
        entry.main(["cleanup", "--namespace", "a"])
    assert ended.value.code == 2
    assert "--agent-namespace" in capsys.readouterr().err


def test_command_without_an_api_server_says_so_in_one_line_a_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, and no traceback."""
    config = tmp_path / "config"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "x", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            }
        )
    )
    words = ["cleanup", "--namespace", "a", "--agent-namespace", "b", "--kubeconfig", str(config)]
    assert entry.main(words) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 6
    assert all(line.startswith("error: Unavailable: ") for line in said), said
