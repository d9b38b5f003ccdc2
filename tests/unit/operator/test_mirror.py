"""The mirror: never older, never a ghost for long, own writes seen at once, and all that decisions read."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from dlo_kube.errors import Conflict, Unavailable
from dlo_kube.gateway import Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    NAMESPACE,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    SECRET,
    SERVICE,
    Kind,
)
from dlo_operator import observe
from dlo_operator.facts import Parts
from dlo_operator.gather import Gatherer
from dlo_operator.keys import deployment_key
from dlo_operator.lean import lean
from dlo_operator.mirror import Mirror, kinds
from dlo_operator.reconcile.plan import plan
from dlo_operator.reconcile.shortlist import shortlist_of
from fakes.kube import FakeCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.operator.world import NAMESPACE as TEAM
from unit.operator.world import SETTINGS, World

NAME = "digits"


def obj(version: int, *, uid: str = "1", kind: Kind = DIFFUSION_DEPLOYMENT, name: str = NAME) -> Object:
    """A version of an object; its spec tells which."""
    meta: Object = {"name": name, "uid": uid, "resourceVersion": str(version)}
    if kind.namespaced:
        meta["namespace"] = TEAM
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": {"at": version}}


def mirror(cluster: FakeCluster | None = None) -> Mirror:
    """A mirror of a cluster (default: an empty one), listed once."""
    made = Mirror(cluster or FakeCluster())
    for kind in kinds():
        made.refresh(kind)
    return made


def at(found: Mirror) -> int | None:
    """Which version is known."""
    known = found.get(DIFFUSION_DEPLOYMENT, NAME, TEAM)
    return None if known is None else int(known["spec"]["at"])


@settings(max_examples=200, deadline=None)
@given(
    news=st.lists(
        st.tuples(st.integers(101, 112), st.sampled_from(["event", "write", "deleted"])),
        min_size=1,
        max_size=14,
    )
)
def test_the_newest_version_wins_in_any_order(news: list[tuple[int, str]]) -> None:
    """Whatever order events and answers come in, what is known is what came last in the order of versions."""
    found = mirror()
    newest, gone = 0, False
    for version, what in news:
        if what == "write":
            found.wrote(obj(version))
        else:
            found.take(obj(version), deleted=what == "deleted")
        if version > newest:
            newest, gone = version, what == "deleted"
        elif version == newest and what == "deleted":
            gone = True
        assert at(found) == (None if gone else newest)


def test_late_news_of_what_was_deleted_brings_nothing_back() -> None:
    """The answer to a write comes after the event that the object is gone; a new object of that name is let in."""
    found = mirror()
    found.take(obj(110), deleted=False)
    assert found.take(obj(115), deleted=True)
    found.wrote(obj(112))
    assert at(found) is None
    assert not found.take(obj(113), deleted=False)
    assert found.take(obj(120, uid="2"), deleted=False)
    assert not found.take(obj(115), deleted=True)
    assert at(found) == 120


def test_a_deletion_that_no_watch_told_is_found_by_the_list() -> None:
    """As after a gap of versions: only what exists is told again."""
    cluster = FakeCluster()
    cluster.put(obj(0))
    cluster.put(obj(0, name="other"))
    found = mirror(cluster)
    cluster.remove(DIFFUSION_DEPLOYMENT, NAME, TEAM)
    assert at(found) == 0
    changed, gone = found.refresh(DIFFUSION_DEPLOYMENT)
    assert [ghost["metadata"]["name"] for ghost in gone] == [NAME]
    assert changed == ()
    assert at(found) is None
    assert found.refresh(DIFFUSION_DEPLOYMENT) == ((), ())


def test_what_is_newer_than_the_list_stays() -> None:
    """An object made while the list was under way is not in it, and no ghost."""
    cluster = FakeCluster()
    found = mirror(cluster)
    found.take(obj(100_000), deleted=False)
    assert found.refresh(DIFFUSION_DEPLOYMENT).gone == ()
    assert at(found) == 100_000


def test_own_writes_are_seen_at_once_and_their_echo_is_news_once() -> None:
    """The next look sees the answer; the watch's event of it is told on, since the look before did not know it."""
    found = mirror()
    found.wrote(obj(110))
    assert at(found) == 110
    assert found.take(obj(110), deleted=False)
    assert not found.take(obj(110), deleted=False)
    assert not found.take(obj(109), deleted=False)
    assert at(found) == 110


def test_own_deletion_is_seen_at_once_but_hides_no_later_version() -> None:
    """With a finalizer the object lives on, and the watch tells of it."""
    found = mirror()
    found.take(obj(110), deleted=False)
    found.deleted(obj(110))
    assert at(found) is None
    found.take(obj(111), deleted=False)
    assert at(found) == 111


def test_nothing_is_read_before_the_first_list() -> None:
    """An empty mirror is not an empty cluster."""
    found = Mirror(FakeCluster())
    assert not found.synced
    for look in (
        lambda: found.get(NODE, "n"),
        lambda: found.list(POD, TEAM),
        lambda: found.places(NODE),
    ):
        with pytest.raises(Unavailable, match="not listed yet"):
            look()
    assert mirror().synced


def test_names_that_others_may_hold_are_looked_up_live() -> None:
    """A Service that is not ours is not mirrored; a planner must still see that the name is taken."""
    cluster = FakeCluster()
    found = mirror(cluster)
    cluster.put({**obj(0, kind=SERVICE), "spec": {}})
    assert found.get(SERVICE, NAME, TEAM) is not None
    assert found.list(SERVICE, TEAM).items == ()
    assert found.get(SECRET, NAME, TEAM) is None


def test_that_a_name_is_free_is_remembered_and_made_sure_of() -> None:
    """A child that is not there yet costs no call at each look; before it is made, somebody else's is still seen."""
    world = World()
    world.create()
    for agent in world.agents.values():
        agent.idle = True
    world.turn()
    world.turn()
    before = len(world.cluster.calls)
    for _ in range(3):
        world.operator.controller.reconcile(deployment_key(TEAM, NAME))
    assert len(world.cluster.calls) == before
    world.cluster.put({**obj(0, kind=DEPLOYMENT), "spec": {"theirs": True}})
    for agent in world.agents.values():
        agent.idle = False
        agent.step()
    world.operator.heartbeats.refresh()
    for kind in (NODE_WEIGHT_CACHE, NODE):
        for found in world.cluster.objects(kind):
            world.operator.mirror.take(found, deleted=False)
    with pytest.raises(Conflict, match="made by something else"):
        world.operator.controller.reconcile(deployment_key(TEAM, NAME))
    assert world.object(DEPLOYMENT)["spec"] == {"theirs": True}
    world.operator.controller.reconcile(deployment_key(TEAM, NAME))
    assert world.object(DEPLOYMENT)["spec"] == {"theirs": True}
    assert world.condition("Accepted")[0] == "False"


def test_a_namespace_is_asked_for_once_in_a_while() -> None:
    """Many deployments ask for the same one."""
    cluster, now = FakeCluster(), [0.0]
    cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}})
    found = Mirror(cluster, monotonic=lambda: now[0])
    for _ in range(5):
        assert found.get(NAMESPACE, TEAM) is not None
    assert len(cluster.calls) == 1
    now[0] = 16.0
    found.get(NAMESPACE, TEAM)
    assert len(cluster.calls) == 2


def test_pods_are_found_by_their_deployment() -> None:
    """Through the index: it follows labels that change and pods that go."""
    found = mirror()

    def pod(name: str, version: int, owner: str) -> Object:
        made = obj(version, kind=POD, name=name)
        made["metadata"]["labels"] = {"dlo.dev/deployment": owner, "app.kubernetes.io/name": "dlo-engine"}
        return made

    def names(owner: str) -> list[str]:
        listed = found.list(POD, TEAM, labels={"dlo.dev/deployment": owner}).items
        return [item["metadata"]["name"] for item in listed]

    for number, owner in enumerate(["a", "b", "a"]):
        found.take(pod(f"p{number}", 110 + number, owner), deleted=False)
    assert names("a") == ["p0", "p2"]
    found.take(pod("p0", 120, "b"), deleted=False)
    assert names("a") == ["p2"]
    assert names("b") == ["p0", "p1"]
    found.take(pod("p1", 121, "b"), deleted=True)
    assert names("b") == ["p0"]
    assert [item["metadata"]["name"] for item in found.list(POD).items] == ["p0", "p2"]


def test_a_read_object_is_the_readers_own() -> None:
    """Changing it changes nothing for the next reader."""
    found = mirror()
    found.take(obj(110), deleted=False)
    mine = found.get(DIFFUSION_DEPLOYMENT, NAME, TEAM)
    assert mine is not None
    mine["spec"]["at"] = "changed"
    assert at(found) == 110


def test_views_are_made_once_for_each_version() -> None:
    """Of a thousand nodes only the changed one is parsed again; the gone one goes."""
    made: list[str] = []

    def view(node: Object) -> str:
        made.append(node["metadata"]["name"])
        return str(node["metadata"]["resourceVersion"])

    cluster = FakeCluster()
    for number in range(3):
        cluster.put({**obj(0, kind=NODE, name=f"n{number}"), "spec": {}})
    found = Mirror(cluster, {NODE.kind: view})
    found.refresh(NODE)
    for _ in range(3):
        assert set(found.view(NODE)) == {"n0", "n1", "n2"}
    assert sorted(made) == ["n0", "n1", "n2"]
    found.take(obj(500, kind=NODE, name="n1"), deleted=False)
    assert found.view(NODE)["n1"] == "500"
    assert len(made) == 4
    found.take(obj(501, kind=NODE, name="n2"), deleted=True)
    assert set(found.view(NODE)) == {"n0", "n1"}


def test_equal_parts_of_caches_are_kept_once() -> None:
    """Ten nodes hold the same entries: one value in memory, equal to what was read."""
    world = World(nodes=2)
    world.create(changes={"spec.cache.prewarm.minReadyNodes": 2})
    world.settle()
    parts = Parts()
    first, second = (parts.read_cache(world.object(NODE_WEIGHT_CACHE, f"node-{n}")) for n in (1, 2))
    assert first is not None
    assert second is not None
    assert first == observe.read_cache(world.object(NODE_WEIGHT_CACHE, "node-1"), None)
    assert first.spec.entries
    for mine, theirs in zip(first.spec.entries, second.spec.entries, strict=True):
        assert mine is theirs


def test_what_is_kept_is_a_fraction() -> None:
    """Images of a node, managed fields and most of a pod's spec are dropped."""
    node = obj(1, kind=NODE)
    node["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
    node["status"] = {"allocatable": {"cpu": "8"}, "images": [{"names": ["x" * 100]}] * 50}
    assert lean(node)["status"] == {"allocatable": {"cpu": "8"}}
    assert "managedFields" not in lean(node)["metadata"]
    pod = obj(1, kind=POD)
    pod["spec"] = {"nodeName": "n", "containers": [{"name": "engine"}]}
    assert lean(pod)["spec"] == {"nodeName": "n"}
    given = copy.deepcopy(pod)
    lean(pod)
    assert pod == given


class Live:
    """Reads like a mirror, but whole objects from the server each time."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.get, self.list = cluster.get, cluster.list

    def view(self, kind: Kind) -> dict[str, Any]:
        """As the mirror's."""
        read = observe.read_node if kind == NODE else (lambda cache: observe.read_cache(cache, None))
        return {item["metadata"]["name"]: read(item) for item in self.list(kind).items}

    def changed(self, kind: Kind, since: int) -> tuple[int, frozenset[str]]:
        """As the mirror's: everything, at each look."""
        return since, frozenset(self.view(kind))


STEPS: dict[str, Callable[[World], Any]] = {
    "model": lambda world: world.change("spec.model.source.directory.path", "digits-2"),
    "scale": lambda world: world.change("spec.replicas", 1),
    "zero": lambda world: world.change("spec.replicas", 0),
    "suspend": lambda world: world.change("spec.suspend", True),
    "twin": lambda world: world.create("twin"),
    "broken": lambda world: setattr(world.agents["node-1"], "broken", "IntegrityFailed"),
    "crash": lambda world: setattr(world.kubelets, "crash", "FallbackRefused: no"),
    "node": lambda world: world.add_node(f"node-{len(world.agents) + 1}"),
    "turn": lambda world: world.turn(),
    "settle": lambda world: world.settle(),
}


@pytest.mark.parametrize("seed", range(12))
def test_plans_from_the_mirror_equal_plans_from_the_server(seed: int) -> None:
    """After any step of many lives, for what the mirror keeps of objects and for whole ones read live."""
    world, chance = World(), random.Random(seed)
    world.create()
    for _ in range(6):
        chance.choice(list(STEPS.values()))(world)
        world.hear()
        parts = world.operator.controller._parts
        live = Gatherer(
            world.cluster,
            Live(world.cluster),  # type: ignore[arg-type]
            SETTINGS.plan,
            parts.heartbeats,
            world.reports,
            world.time.now,
        )
        for found in world.cluster.objects(DIFFUSION_DEPLOYMENT):
            kept = parts.mirror.get(DIFFUSION_DEPLOYMENT, found["metadata"]["name"], TEAM)
            assert kept is not None
            inputs = parts.gatherer.deployment(kept).inputs
            assert plan(inputs) == plan(live.deployment(found).inputs)
            # What the index of the fleet picks out is what a look at every node finds.
            assert inputs.shortlist == shortlist_of(inputs)


def test_the_index_follows_caches_that_change_and_go() -> None:
    """By the numbers of changes, also of those that came between two looks; what is gone is in no list."""
    world = World(nodes=3)
    world.create()
    world.settle()
    gatherer = world.operator.controller._parts.gatherer
    found = world.object(DIFFUSION_DEPLOYMENT)
    first = gatherer.deployment(found).inputs
    assert first.shortlist is not None
    node = min(first.shortlist.near)
    world.cluster.remove(NODE_WEIGHT_CACHE, node)
    world.hear()
    second = gatherer.deployment(found).inputs
    assert second.shortlist is not None
    assert second.shortlist.near == first.shortlist.near - {node}
    assert node not in second.caches
    assert node in first.caches
    world.settle()
    last = gatherer.deployment(found).inputs
    assert last.shortlist == shortlist_of(last)


def test_many_threads_read_while_events_come() -> None:
    """No reader ever sees half of a change or an older version than before."""
    found = mirror()
    found.take(obj(101), deleted=False)
    faults: list[str] = []

    def read() -> None:
        last = 0
        for _ in range(2000):
            now = at(found) or 0
            if now < last:
                faults.append(f"{now} after {last}")
            last = now

    readers = [threading.Thread(target=read) for _ in range(3)]
    for thread in readers:
        thread.start()
    for version in range(102, 1500):
        found.take(obj(version), deleted=False)
        found.wrote(obj(version - 1))
    for thread in readers:
        thread.join()
    assert faults == []
    assert at(found) == 1499


def test_child_of_ours_is_read_from_memory() -> None:
    """No call for what the mirror has; the Deployment is kept whole, since intents are compared with it."""
    world = World()
    world.create()
    world.settle()
    world.hear()
    before = len(world.cluster.calls)
    kept = world.operator.mirror.get(DEPLOYMENT, NAME, TEAM)
    assert len(world.cluster.calls) == before
    assert kept is not None
    assert kept["spec"] == world.object(DEPLOYMENT)["spec"]
