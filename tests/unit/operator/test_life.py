"""The whole life of a deployment against a cluster in memory, with simulated agents and kubelets."""

from __future__ import annotations

import pytest
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    EVENT,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Kind,
)
from dlo_operator.keys import deployment_key
from unit.operator.world import NAMESPACE, World


def revision(world: World) -> str:
    """The revision in the Deployment's template."""
    label: str = world.object(DEPLOYMENT)["spec"]["template"]["metadata"]["labels"]["dlo.dev/revision"]
    return label


def test_a_deployment_becomes_ready() -> None:
    """Resolved on one node, pinned for all, built, then served; every condition says so."""
    world = World()
    world.create()
    world.settle()
    status = world.object(DIFFUSION_DEPLOYMENT)["status"]
    assert world.condition("Ready") == ("True", "Ready")
    assert world.condition("Accepted") == ("True", "Accepted")
    assert world.condition("SourceResolved") == ("True", "Resolved")
    assert world.condition("CapacitySufficient") == ("True", "Sufficient")
    assert world.condition("CacheReady") == ("True", "Warm")
    assert world.condition("EngineAvailable") == ("True", "Available")
    assert world.condition("UsingCache") == ("True", "AsAsked")
    assert world.condition("Progressing") == ("False", "Complete")
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert status["cache"]["summary"] == "2/2"
    assert (status["replicas"], status["updatedReplicas"], status["readyReplicas"]) == (2, 2, 2)
    assert status["revision"]["current"] == revision(world)
    assert "updating" not in status["revision"]
    assert {entry.get("coordinate") for entry in status["cache"]["entries"]} == {"0/2", "1/2", None}
    assert world.kubelets.started_cold == []
    pins = {
        world.object(NODE_WEIGHT_CACHE, node)["spec"]["sources"][0]["pin"]["digest"] for node in world.agents
    }
    assert pins == {world.content.digest("digits")}


def test_engines_come_after_the_cache() -> None:
    """No Deployment before enough nodes hold every entry; one node resolves before anybody builds."""
    world = World()
    world.create()
    order: list[str] = []
    for _ in range(60):
        if not world.turn():
            break
        specs = {node: world.object(NODE_WEIGHT_CACHE, node)["spec"] for node in world.agents}
        unpinned = [n for n, s in specs.items() if any(not x["pin"].get("digest") for x in s["sources"])]
        if unpinned and "resolving" not in order:
            assert len(unpinned) == 1
            assert not any(agent.builds for agent in world.agents.values())
            order.append("resolving")
        if world.condition("CacheReady")[0] == "True" and "warm" not in order:
            order.append("warm")
        if world.cluster.get(DEPLOYMENT, "digits", NAMESPACE) is not None and "engines" not in order:
            order.append("engines")
    assert order == ["resolving", "warm", "engines"]


def test_one_warm_node_is_not_enough_where_two_are_asked_for() -> None:
    """`minReadyNodes` holds the first engine back, and the new template too."""
    world = World()
    world.create(changes={"spec.cache.prewarm": {"minReadyNodes": 2, "maxParallelNodes": 1}})
    warm: list[int] = []
    for path in ("digits", "digits-2"):
        world.change("spec.model.source.directory.path", path)
        before = world.cluster.get(DEPLOYMENT, "digits", NAMESPACE)
        for _ in range(60):
            world.turn()
            counts = world.object(DIFFUSION_DEPLOYMENT)["status"]["cache"].get("nodes", {})
            now = world.cluster.get(DEPLOYMENT, "digits", NAMESPACE)
            templates = [None if obj is None else obj["spec"]["template"] for obj in (before, now)]
            if templates[0] != templates[1]:
                warm.append(counts["ready"])
                break
        world.settle()
    assert warm == [2, 2]


def test_an_old_revision_keeps_its_entries_where_its_pods_may_come() -> None:
    """Its pods are gone for a moment, the new revision cannot be built: the old entries stay listed."""
    world = World()
    world.create()
    world.settle()
    old = world.node_entries("node-1")
    for agent in world.agents.values():
        agent.broken = "BuildFailed"
    world.change("spec.model.source.directory.path", "digits-2")
    world.kubelets.refuse = "no room"
    for pod in world.cluster.objects(POD):
        world.cluster.remove(POD, pod["metadata"]["name"], NAMESPACE)
    world.settle()
    assert world.cluster.objects(POD) == ()
    assert all(old <= world.node_entries(node) for node in world.agents)


def test_transition_times_move_with_the_status_alone() -> None:
    """Not with the reason, the words or the generation."""
    world = World()
    world.create()
    world.settle()

    def times() -> dict[str, str]:
        conditions = world.object(DIFFUSION_DEPLOYMENT)["status"]["conditions"]
        return {condition["type"]: condition["lastTransitionTime"] for condition in conditions}

    before = times()
    world.time.seconds += 60
    world.change("spec.replicas", 0)
    world.settle()
    assert world.condition("EngineAvailable") == ("True", "ScaledToZero")
    assert times()["EngineAvailable"] == before["EngineAvailable"]
    world.change("spec.suspend", True)
    world.settle()
    assert times()["EngineAvailable"] != before["EngineAvailable"]


def test_a_settled_cluster_is_left_alone() -> None:
    """Nothing is written when nothing changes, by the same operator or by one that was just started."""
    world = World()
    world.create()
    world.settle()
    assert world.writes(world.operate) == 0
    world.time.seconds += 60
    world.start()
    assert world.writes(world.operate) == 0


def test_a_new_model_is_warmed_then_rolled() -> None:
    """The old revision serves until the new one's entries are ready; its entries go with its last pod."""
    world = World()
    world.create()
    world.settle()
    first, old_entries = revision(world), world.node_entries("node-1")
    world.change("spec.model.source.directory.path", "digits-2")
    seen_both = False
    for _ in range(60):
        if not world.turn():
            break
        pods = [pod["metadata"]["labels"]["dlo.dev/revision"] for pod in world.cluster.objects(POD)]
        updating = world.object(DIFFUSION_DEPLOYMENT)["status"]["revision"].get("updating")
        if world.condition("CacheReady")[0] != "True":
            assert revision(world) == first
            assert world.condition("Ready")[0] == "False"
        if first in pods:
            assert all(
                old_entries <= world.node_entries(pod["spec"]["nodeName"])
                for pod in world.cluster.objects(POD)
                if pod["metadata"]["labels"]["dlo.dev/revision"] == first
            )
            seen_both = seen_both or (len(set(pods)) == 2 and updating not in (None, first))
    assert seen_both
    assert revision(world) != first
    assert world.condition("Ready") == ("True", "Ready")
    assert world.kubelets.started_cold == []
    assert not world.node_entries("node-1") & old_entries
    assert world.object(DIFFUSION_DEPLOYMENT)["status"]["revision"] == {
        "current": revision(world),
        "sourceDigest": world.content.digest("digits-2"),
    }


def test_rolling_back_builds_nothing() -> None:
    """The entries of the earlier revision still lie on the nodes; the template comes back as it was."""
    world = World()
    world.create()
    world.settle()
    first = world.object(DEPLOYMENT)["spec"]["template"]
    world.change("spec.model.source.directory.path", "digits-2")
    world.settle()
    built = {name: list(agent.builds) for name, agent in world.agents.items()}
    world.change("spec.model.source.directory.path", "digits")
    world.settle()
    assert {name: agent.builds for name, agent in world.agents.items()} == built
    assert world.object(DEPLOYMENT)["spec"]["template"] == first
    assert world.condition("Ready") == ("True", "Ready")


def test_deleting_leaves_nothing() -> None:
    """Children go by their owner, the nodes' lists are emptied, and nothing is made again."""
    world = World()
    world.create()
    world.settle()
    world.delete()
    world.settle()
    for kind in (DIFFUSION_DEPLOYMENT, DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET, POD):
        assert world.cluster.objects(kind) == ()
    assert world.claimed() == set()
    assert all(
        not key.startswith("dlo.dev/")
        for node in world.cluster.objects(NODE)
        for key in node["metadata"]["labels"]
    )


def test_nothing_is_made_for_what_is_being_deleted() -> None:
    """Foreground deletion: the object is marked, its children go, and the operator does not bring them back."""
    world = World()
    world.create()
    world.settle()
    world.cluster.edit(
        DIFFUSION_DEPLOYMENT,
        "digits",
        lambda obj: obj["metadata"].update(finalizers=["foregroundDeletion"]),
        NAMESPACE,
    )
    world.cluster.remove(DIFFUSION_DEPLOYMENT, "digits", NAMESPACE)
    world.cluster.remove(DEPLOYMENT, "digits", NAMESPACE)
    world.operate()
    assert world.cluster.objects(DEPLOYMENT) == ()


def test_a_lost_node_is_told() -> None:
    """With its heartbeat late, the cache is Unknown where too few others are warm."""
    world = World(nodes=1)
    world.create(changes={"spec.replicas": 1})
    world.settle()
    world.silence("node-1")
    assert world.condition("CacheReady") == ("Unknown", "NodeLost")
    assert world.condition("Ready") == ("False", "NodeLost")
    assert world.object(DIFFUSION_DEPLOYMENT)["status"]["problems"][0]["reason"] == "NodeLost"
    world.agents["node-1"].alive = True
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


def test_a_lost_node_is_replaced() -> None:
    """Another node is warmed instead."""
    world = World(nodes=3)
    world.create(changes={"spec.replicas": 1, "spec.cache.prewarm": {"spareNodes": 0}})
    world.settle()
    (first,) = world.claimed()
    pod = world.cluster.objects(POD)[0]
    world.cluster.remove(POD, pod["metadata"]["name"], NAMESPACE)
    world.silence(first)
    world.agents[first].disk.clear()
    world.settle()
    assert len(world.claimed() - {first}) == 1


def test_scaled_to_zero_is_ready_and_suspended_is_not() -> None:
    """Entries stay in both cases, and engines come back without a build."""
    world = World()
    world.create()
    world.settle()
    entries, builds = world.node_entries("node-1"), sum(len(a.builds) for a in world.agents.values())
    world.change("spec.replicas", 0)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert world.condition("EngineAvailable") == ("True", "ScaledToZero")
    assert world.cluster.objects(POD) == ()
    assert world.cluster.objects(POD_DISRUPTION_BUDGET) == ()
    world.change("spec.replicas", 2)
    world.change("spec.suspend", True)
    world.settle()
    assert world.condition("Ready") == ("False", "Suspended")
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert world.node_entries("node-1") == entries
    world.change("spec.suspend", False)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert len(world.cluster.objects(POD_DISRUPTION_BUDGET)) == 1
    assert sum(len(agent.builds) for agent in world.agents.values()) == builds


def test_suspended_while_a_new_revision_warms() -> None:
    """The old template is kept as it is, at no replicas."""
    world = World()
    world.create()
    world.settle()
    first = revision(world)
    for agent in world.agents.values():
        agent.broken = "BuildFailed"
    world.change("spec.model.source.directory.path", "digits-2")
    world.settle()
    world.change("spec.suspend", True)
    world.settle()
    assert world.object(DEPLOYMENT)["spec"]["replicas"] == 0
    assert revision(world) == first
    world.change("spec.suspend", False)
    world.settle()
    assert revision(world) == first
    assert len(world.cluster.objects(POD)) == 2


def test_events_tell_transitions_only() -> None:
    """One when it is ready, one when something fails for a reason that is news, one when that has ended."""
    world = World()
    world.create()
    world.settle()
    told = [(event["type"], event["reason"]) for event in world.cluster.objects(EVENT)]
    assert told == [("Normal", "Ready")]
    world.silence("node-1", "node-2")
    world.operate()
    told = [(event["type"], event["reason"]) for event in world.cluster.objects(EVENT)]
    assert told.count(("Warning", "NodeLost")) == 1
    for agent in world.agents.values():
        agent.alive = True
    world.settle()
    told = [(event["type"], event["reason"]) for event in world.cluster.objects(EVENT)]
    assert told.count(("Normal", "Warm")) == 1


def test_foreign_conditions_and_labels_survive() -> None:
    """What others write into status and labels is theirs."""
    world = World()
    world.create()
    world.settle()
    foreign = {
        "type": "example.com/Audited",
        "status": "True",
        "reason": "Seen",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    world.cluster.edit(
        DIFFUSION_DEPLOYMENT, "digits", lambda obj: obj["status"]["conditions"].append(foreign), NAMESPACE
    )
    world.change("spec.replicas", 1)
    world.settle()
    assert foreign in world.object(DIFFUSION_DEPLOYMENT)["status"]["conditions"]
    assert world.object(NODE, "node-1")["metadata"]["labels"]["kubernetes.io/hostname"] == "node-1"


@pytest.mark.parametrize("kind", [DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET], ids=lambda kind: kind.kind)
def test_a_child_that_somebody_deleted_comes_back(kind: Kind) -> None:
    """Level, not edge."""
    world = World()
    world.create()
    world.settle()
    world.cluster.remove(kind, "digits", NAMESPACE)
    world.settle()
    assert world.cluster.get(kind, "digits", NAMESPACE) is not None


def test_a_cache_deleted_by_hand_is_made_anew() -> None:
    """Its Node still carries our labels, which are to go until it has been told again what is on its disk."""
    world = World()
    world.create()
    world.settle()
    world.cluster.remove(NODE_WEIGHT_CACHE, "node-1")
    world.settle()
    assert world.claimed() == {"node-1", "node-2"}
    assert world.condition("Ready") == ("True", "Ready")
    assert len(world.agents["node-1"].builds) == len(world.agents["node-1"].disk)


def test_a_node_made_anew_under_its_name_is_taken_up() -> None:
    """Cache and heartbeat go with the old Node, by their owner; the agent comes back with its disk."""
    world = World()
    world.create()
    world.settle()
    world.cluster.remove(NODE, "node-1")
    world.cluster.collect()
    world.add_node("node-1", metadata={"name": "node-1", "labels": {"kubernetes.io/hostname": "node-1"}})
    world.settle()
    (owner,) = world.object(NODE_WEIGHT_CACHE, "node-1")["metadata"]["ownerReferences"]
    assert owner["uid"] == world.object(NODE, "node-1")["metadata"]["uid"]
    assert world.condition("Ready") == ("True", "Ready")
    assert world.claimed() == {"node-1", "node-2"}


def test_a_deployment_deleted_and_made_again_waits_for_the_old_children() -> None:
    """Nobody has to do anything, so that it is not stalled, and nothing of the old one is touched."""
    world = World()
    world.create()
    world.settle()
    old = world.object(DEPLOYMENT)
    world.cluster.remove(DIFFUSION_DEPLOYMENT, "digits", NAMESPACE)
    world.create()
    world.operate()
    assert world.condition("Accepted") == ("Unknown", "UnsupportedCombination")
    assert "of the deleted DiffusionDeployment of this name are not gone yet" in world.message("Accepted")
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert world.condition("Ready")[0] == "False"
    assert world.object(DEPLOYMENT) == old
    assert world.operator.controller.reconcile(deployment_key(NAMESPACE, "digits")) == 5
    world.cluster.collect()
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert world.object(DEPLOYMENT)["metadata"]["uid"] != old["metadata"]["uid"]
