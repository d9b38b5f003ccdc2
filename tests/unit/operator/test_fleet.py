"""Several deployments and nodes that come: shared entries, needs not known yet, a bad one beside good ones."""

from __future__ import annotations

from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, LEASE, NODE, NODE_WEIGHT_CACHE
from dlo_operator.keys import deployment_key, node_key
from fakes.kube import Call
from unit.operator.world import NAMESPACE, World


def test_two_deployments_share_entries() -> None:
    """Entries are merged by id with the longest retention, and stay until the last deployment is gone."""
    world = World()
    world.create()
    world.create("twin", {"spec.cache.retentionSeconds": 200_000})
    world.settle()
    assert world.condition("Ready", "twin") == ("True", "Ready")
    listed = world.object(NODE_WEIGHT_CACHE, "node-1")["spec"]["entries"]
    assert len(listed) == 3
    assert {entry["retentionSeconds"] for entry in listed} == {200_000}
    assert len(world.agents["node-1"].builds) == 3
    world.delete("twin")
    world.settle()
    listed = world.object(NODE_WEIGHT_CACHE, "node-1")["spec"]["entries"]
    assert {entry["retentionSeconds"] for entry in listed} == {86_400}
    world.delete()
    world.settle()
    assert world.claimed() == set()


def test_a_bad_deployment_does_not_block_others() -> None:
    """One that cannot be read, one that breaks a rule: both say so, the good one is ready."""
    world = World()
    world.create("bad", {"spec.parallelism.tensor": 0})
    world.create("worse", {"spec.replicas": "many"})
    world.create()
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert world.condition("Accepted", "bad") == ("False", "InvalidTopology")
    assert world.condition("Accepted", "worse") == ("False", "UnsupportedCombination")
    assert world.condition("Stalled", "bad")[0] == "True"


def test_a_node_that_joins_late_is_served() -> None:
    """It gets a cache object and a heartbeat at once, and entries when its turn comes."""
    world = World(nodes=0)
    world.create()
    world.settle()
    assert world.condition("CapacitySufficient") == ("False", "NoEligibleNodes")
    world.add_node("node-9")
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    cache = world.object(NODE_WEIGHT_CACHE, "node-9")
    node = world.object(NODE, "node-9")
    assert cache["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]
    (lease,) = world.cluster.objects(LEASE)
    assert lease["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]


def test_while_a_need_is_unknown_nothing_is_taken_away() -> None:
    """A fresh operator that has not planned every deployment leaves the nodes' lists as they are."""
    world = World()
    world.create()
    world.create("other", {"spec.model.source.directory.path": "other"})
    world.settle()
    before = world.node_entries("node-1")
    world.start()
    world.operator.heartbeats.refresh()
    world.operator.controller.reconcile(deployment_key(NAMESPACE, "other"))
    assert world.operator.controller.reconcile(node_key("node-1")) is not None
    assert world.node_entries("node-1") == before
    assert len(before) == 6


def test_a_need_that_becomes_known_in_mid_look_counts() -> None:
    """A worker plans the deployment after another has read a node's claims: nothing is taken away and put back."""
    world = World()
    world.create()
    world.settle()
    world.start()
    world.operator.heartbeats.refresh()
    planned: list[Call] = []

    def plan_meanwhile(call: Call) -> None:
        if (call.verb, call.kind) == ("list", DIFFUSION_DEPLOYMENT.kind) and not planned:
            planned.append(call)
            world.operator.controller.reconcile(deployment_key(NAMESPACE, "digits"))

    world.cluster.before.append(plan_meanwhile)
    assert world.writes(lambda: world.look("node-1")) == 0
    assert planned
