"""What is written and what is not: statuses beside foreign owners, words that move, and nodes that lose entries."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
from dlo_api.names import OPERATOR_FIELD_MANAGER
from dlo_kube.gateway import Object, Served
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, POD
from dlo_operator import handlers
from dlo_operator.app import assemble
from dlo_operator.events import urgent
from dlo_operator.executor import status_differs
from dlo_operator.feed import Feed
from dlo_operator.keys import deployment_key, node_key
from dlo_operator.metrics import Metrics
from dlo_operator.pace import Pace
from fakes.kube import Call
from prometheus_client import CollectorRegistry, Counter
from unit.operator.world import NAMESPACE, SETTINGS, World

CONDITION: Object = {"type": "Ready", "status": "True", "reason": "Ready", "message": "one"}
INTENT: Object = {"phase": "Ready", "cache": {"summary": "1/1"}, "conditions": [CONDITION]}
OWNED: Object = {
    "f:phase": {},
    "f:cache": {"f:summary": {}},
    "f:conditions": {'k:{"type":"Ready"}': {".": {}, "f:type": {}, "f:status": {}, "f:message": {}}},
}


def stored(status: Object, owned: Object | None = None, manager: str = OPERATOR_FIELD_MANAGER) -> Object:
    """An object as the server has it, with the record of who owns what of its status."""
    entry = {
        "manager": manager,
        "operation": "Apply",
        "subresource": "status",
        "fieldsV1": {"f:status": OWNED if owned is None else owned},
    }
    return {"metadata": {"name": "a", "managedFields": [entry]}, "status": status}


@pytest.mark.parametrize(
    ("obj", "differs"),
    [
        (stored(INTENT), False),
        (stored({**INTENT, "offload": {"mode": "Foreign"}}), False),
        (stored({**INTENT, "conditions": [CONDITION, {"type": "Theirs", "status": "True"}]}), False),
        (stored({**INTENT, "conditions": [{**CONDITION, "theirs": 1}]}), False),
        (stored({**INTENT, "phase": "Foreign"}), True),
        (stored({**INTENT, "conditions": []}), True),
        (stored({**INTENT, "conditions": [{**CONDITION, "message": "two"}]}), True),
        (stored({"conditions": [CONDITION], "phase": "Ready"}), True),
        (stored({**INTENT, "offload": {"mode": "Ours"}}, {**OWNED, "f:offload": {"f:mode": {}}}), True),
        (stored({**INTENT, "offload": {"mode": "x"}}, {"f:offload": {"f:mode": {}}}, "someone"), False),
        (
            stored(
                {**INTENT, "conditions": [CONDITION, {"type": "Old", "status": "True"}]},
                {**OWNED, "f:conditions": {'k:{"type":"Old"}': {"f:status": {}}}},
            ),
            True,
        ),
    ],
    ids=[
        "same",
        "foreign field",
        "foreign condition",
        "foreign member",
        "taken over",
        "condition gone",
        "other words",
        "field gone",
        "ours, not meant any more",
        "another's",
        "our old condition",
    ],
)
def test_only_what_an_apply_would_change_is_written(obj: Object, differs: bool) -> None:
    """What others own and we do not mean is no reason to write at every look; what we own and mean no more is."""
    before = copy.deepcopy(obj)
    assert status_differs(obj, INTENT) is differs
    assert obj == before


@pytest.mark.parametrize(
    ("change", "is_urgent"),
    [
        ({"observedGeneration": 2}, True),
        ({"conditions": [{**CONDITION, "status": "False", "reason": "Warming"}]}, True),
        ({"conditions": [CONDITION, {"type": "CacheReady", "status": "False", "reason": "DiskFull"}]}, True),
        ({"conditions": [CONDITION, {"type": "CacheReady", "status": "False", "reason": "Warming"}]}, False),
        ({"conditions": [CONDITION, {"type": "CacheReady", "status": "True", "reason": "Warm"}]}, False),
        ({"conditions": [{**CONDITION, "message": "two"}]}, False),
        ({"conditions": [CONDITION, {"type": "example.com/Theirs", "status": "False"}]}, False),
        ({"cache": {"summary": "1/2"}}, False),
        ({"readyReplicas": 1}, False),
    ],
    ids=str,
)
def test_what_somebody_waits_for_is_urgent(change: dict[str, Any], is_urgent: bool) -> None:
    """That a spec was seen, readiness, a fault; words, counts and steps on the ordinary way are not."""
    assert urgent(INTENT, {**INTENT, **change}) is is_urgent


def test_a_fault_that_ends_is_urgent() -> None:
    """It must not be told for longer than it lasts."""
    before = {"conditions": [{"type": "CacheReady", "status": "False", "reason": "DiskFull"}]}
    assert urgent(before, {"conditions": [{"type": "CacheReady", "status": "False", "reason": "Warming"}]})


def test_a_burst_of_claims_takes_one_write_of_a_node() -> None:
    """What many deployments need of a node within moments is written once, and what comes later soon after."""
    world = World(nodes=1)
    world.settle()
    world.operator = assemble(
        world.cluster, SETTINGS, clock=world.time, engines=world.reports, rng=random.Random(1)
    )
    for number in range(5):
        world.create(f"model-{number}", {"spec.model.source.directory.path": f"model-{number}"})

    def look() -> tuple[int, int]:
        """Works off what is due; writes so far, and sources that the node is told of."""
        while (taken := world.operator.queue.take(timeout=0)) is not None:
            world.operator.work(taken)
        told = world.object(NODE_WEIGHT_CACHE, "node-1")["spec"]["sources"]
        return world.cluster.writes["apply", NODE_WEIGHT_CACHE.kind], len(told)

    before = look()[0]
    world.operator.heartbeats.refresh()
    world.operator.resync()
    assert look() == (before + 1, 5)
    world.create("late", {"spec.model.source.directory.path": "late"})
    world.hear()
    world.operator.queue.add(deployment_key(NAMESPACE, "late"))
    assert look() == (before + 1, 5)
    world.time.seconds += 1.9
    assert look() == (before + 1, 5)
    world.time.seconds += 0.2
    assert look() == (before + 2, 6)


def test_a_changed_spec_is_looked_at_at_once() -> None:
    """Other news waits a moment for more of its kind."""
    world = World()
    world.create()
    world.settle()
    world.operator = assemble(
        world.cluster, SETTINGS, clock=world.time, engines=world.reports, rng=random.Random(1)
    )
    world.operate()
    world.operator.tell(world.cluster.objects(POD)[0], deleted=False)
    assert world.operator.queue.take(timeout=0) is None
    world.change("spec.replicas", 1)
    world.operator.tell(world.object(DIFFUSION_DEPLOYMENT), deleted=False)
    taken = world.operator.queue.take(timeout=0)
    assert taken is not None
    assert taken.key == deployment_key(NAMESPACE, "digits")


def test_progress_is_written_once_in_a_while() -> None:
    """A status in which only progress has moved waits, and is written when it is due."""
    world = World()
    world.operator = assemble(
        world.cluster,
        SETTINGS,
        clock=world.time,
        engines=world.reports,
        rng=random.Random(1),
        pace=Pace(calm=10.0, settle=0.0, node=0.0),
    )
    world.create(changes={"spec.parallelism.tensor": 1, "spec.cache.prewarm.minReadyNodes": 2})
    for agent in world.agents.values():
        agent.idle = True
    for _ in range(4):
        world.turn()
    key = deployment_key(NAMESPACE, "digits")
    told = world.message("CacheReady")
    world.agents["node-1"].idle = False
    world.agents["node-1"].step()
    world.hear()
    waits: list[float | None] = []
    assert world.writes(lambda: waits.append(world.operator.controller.reconcile(key))) == 0
    assert waits[0] == pytest.approx(10.0)
    assert world.message("CacheReady") == told
    world.time.seconds += 10
    world.hear()
    world.operator.controller.reconcile(key)
    assert world.message("CacheReady") != told
    world.agents["node-2"].idle = False
    world.agents["node-2"].step()
    world.hear()
    # A step on the ordinary way waits too, for twice as long the second time; it comes with the next write.
    assert world.operator.controller.reconcile(key) == pytest.approx(20.0)
    world.time.seconds += 20
    world.hear()
    world.operator.controller.reconcile(key)
    assert world.condition("CacheReady") == ("True", "Warm")


def test_an_entry_that_an_unknown_pod_uses_stays() -> None:
    """H3: the mirror has not heard of a pod, and of what its deployment needs; a fresh look keeps its entries."""
    world = World()
    world.create()
    world.settle()
    (pod, *_) = world.cluster.objects(POD)
    node = pod["spec"]["nodeName"]
    used = world.node_entries(node)
    # The deployment is gone, its pods are still ending, and only the first of both was heard of.
    world.cluster.remove(DIFFUSION_DEPLOYMENT, "digits", NAMESPACE)
    world.hear()
    for gone in world.cluster.objects(POD):
        world.operator.mirror.take(
            {**gone, "metadata": {**gone["metadata"], "resourceVersion": "999999"}}, deleted=True
        )
    world.operator.controller.reconcile(deployment_key(NAMESPACE, "digits"))
    assert world.operator.controller.reconcile(node_key(node)) is not None
    assert world.node_entries(node) == used
    world.cluster.collect()
    assert world.operator.controller.reconcile(node_key(node)) is None
    assert world.node_entries(node) == set()


def test_a_node_loses_entries_only_at_the_version_that_was_looked_at() -> None:
    """Somebody changes the object between the look and the write: the write is refused, and tried from a new look."""
    world = World()
    world.create()
    world.settle()
    world.delete()
    world.hear()
    world.operator.controller.reconcile(deployment_key(NAMESPACE, "digits"))
    raced: list[Call] = []

    def race(call: Call) -> None:
        if (call.verb, call.kind) == ("apply", NODE_WEIGHT_CACHE.kind) and not raced:
            raced.append(call)
            world.cluster.edit(
                NODE_WEIGHT_CACHE, call.name, lambda obj: obj["metadata"].update(labels={"a": "b"})
            )

    world.cluster.before.append(race)
    with pytest.raises(Exception, match="does not match"):
        world.operator.controller.reconcile(node_key("node-1"))
    assert raced
    assert world.node_entries("node-1")
    world.operator.controller.reconcile(node_key("node-1"))
    assert world.node_entries("node-1") == set()


def test_a_changed_spec_counts_as_an_unknown_need() -> None:
    """Its new needs were not planned yet, so nothing is taken from a node meanwhile."""
    world = World()
    world.create()
    world.create("other", {"spec.model.source.directory.path": "other"})
    world.settle()
    before = world.node_entries("node-1")
    world.delete("other")
    world.change("spec.cache.retentionSeconds", 5)
    world.hear()
    world.operator.controller.reconcile(deployment_key(NAMESPACE, "other"))
    assert world.operator.controller.reconcile(node_key("node-1")) is not None
    assert world.node_entries("node-1") == before
    world.settle()
    assert len(world.node_entries("node-1")) == 3


def test_an_entry_that_becomes_ready_wakes_only_those_that_wait_for_it() -> None:
    """A thousand nodes that warm up must not make every unsettled deployment be looked at for each of them."""
    asked: list[bool] = []

    def interested(node: str, wide: bool) -> list[Any]:
        asked.append(wide)
        return []

    feed = Feed(interested, list)
    cache: Object = {
        "kind": "NodeWeightCache",
        "metadata": {"name": "n", "uid": "1"},
        "status": {"root": {"path": "/c"}, "entries": []},
    }
    feed.keys(cache, deleted=False)
    cache["status"]["entries"] = [{"id": "1", "phase": "Ready"}]
    feed.keys(cache, deleted=False)
    cache["status"]["conditions"] = [
        {"type": "StorageHealthy", "status": "False", "reason": "RootNotMounted"}
    ]
    feed.keys(cache, deleted=False)
    feed.keys(cache, deleted=True)
    assert asked == [True, False, True, True]


def test_our_own_warm_label_is_no_news() -> None:
    """It changes when entries become ready, on every node; a user's label is news for placement."""
    feed = Feed(lambda *_: [], lambda: [deployment_key("t", "a")])
    node: Object = {"kind": "Node", "metadata": {"name": "n", "uid": "1", "labels": {}}}
    assert feed.keys(node, deleted=False)
    node["metadata"]["labels"] = {"dlo.dev/warm-0123456789": "true"}
    assert feed.keys(node, deleted=False) == set()
    node["metadata"]["labels"]["pool"] = "a"
    assert feed.keys(node, deleted=False) == {node_key("n"), deployment_key("t", "a")}


def test_an_echo_of_what_a_list_has_shown_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first list, kopf tells every object again: nothing is queued for it."""
    world = World()
    world.create()
    world.settle()
    world.start()
    world.operator.resync()
    while world.operator.queue.take(timeout=0) is not None:
        pass
    world.operator.queue.close()
    queued: list[Any] = []
    monkeypatch.setattr(world.operator, "enqueue", lambda keys, _delay: queued.extend(keys))
    for kind in (DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, POD):
        for found in world.cluster.objects(kind):
            world.operator.tell(found, deleted=False)
    assert queued == []
    (found,) = world.cluster.objects(DIFFUSION_DEPLOYMENT)
    world.change("spec.replicas", 1)
    (found,) = world.cluster.objects(DIFFUSION_DEPLOYMENT)
    world.operator.tell(found, deleted=False)
    assert queued == [deployment_key(NAMESPACE, "digits")]


def test_calls_are_metrics() -> None:
    """By verb, resource and code; how long they took by verb and resource."""
    metrics = Metrics(CollectorRegistry())
    metrics.served(Served("get", "nodes", "ok", 0.03))
    metrics.served(Served("get", "nodes", "Unavailable", 3.0))
    value = metrics.registry.get_sample_value
    assert value("dlo_api_requests_total", {"verb": "get", "resource": "nodes", "code": "Unavailable"}) == 1
    labels = {"verb": "get", "resource": "nodes"}
    assert value("dlo_api_request_duration_seconds_bucket", {**labels, "le": "0.05"}) == 1
    assert value("dlo_api_request_duration_seconds_count", labels) == 2


def test_watches_that_begin_anew_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """kopf says so in words alone, and only where debugging is on; nothing of that reaches the log."""
    registry = CollectorRegistry()
    counter = Counter("dlo_watch_reconnects", "Test.", ["kind", "cause"], registry=registry)
    handlers.count_reconnects(counter)
    handlers.count_reconnects(counter)
    log = logging.getLogger("kopf._cogs.clients.watching")
    resource = "nodeweightcaches.v1alpha1.dlo.dev"
    log.debug(f"Restarting the watch-stream for {resource} cluster-wide.")
    log.debug(f"Watch-stream for {resource} cluster-wide is inactive, reconnecting.")
    log.debug(f"Starting the watch-stream for {resource} cluster-wide.")
    log.warning("Ignoring an unsupported event type")
    for cause in ("Expired", "Silent"):
        labels = {"kind": "NodeWeightCache", "cause": cause}
        assert registry.get_sample_value("dlo_watch_reconnects_total", labels) == 1
    assert [record.message for record in caplog.records] == ["Ignoring an unsupported event type"]


def test_the_words_that_are_counted_are_kopfs() -> None:
    """A kopf that says it otherwise must be noticed here, not by a metric that stays at zero."""
    import inspect

    from kopf._cogs.clients import watching

    source = inspect.getsource(watching)
    assert watching.logger.name == "kopf._cogs.clients.watching"
    assert 'f"Restarting the watch-stream for {resource} {where}."' in source
    assert 'f"Watch-stream for {resource} {where} is inactive, reconnecting."' in source


def test_a_listing_without_news_says_that_a_quiet_watch_works() -> None:
    """Its activity moves; where listings twice show what a silent watch should have told, the probe says so."""
    world = World(nodes=1)
    world.create()
    world.settle()

    def activity() -> float | None:
        return world.operator.metrics.registry.get_sample_value(
            "dlo_watch_last_activity_timestamp_seconds", {"kind": "DiffusionDeployment"}
        )

    world.time.seconds = 100
    world.operator.resync()
    quiet = activity()
    assert quiet is not None
    for number, problem in ((1, False), (2, True)):
        world.time.seconds += 10
        world.change("spec.replicas", 2 + number)
        world.operator.resync()
        assert activity() == quiet
        assert ("DiffusionDeployment" in world.operator.problem()) is problem
    world.change("spec.replicas", 9)
    world.operator.tell(world.object(DIFFUSION_DEPLOYMENT), deleted=False)
    world.operator.resync()
    assert activity() == quiet + 20
    assert "asleep" not in world.operator.problem()


def test_a_start_does_not_forget_what_engines_said() -> None:
    """A fresh operator has asked and has no answer yet: the status stands, for ten seconds at most."""
    world = World()
    world.create()
    world.settle()
    assert world.condition("UsingCache") == ("True", "AsAsked")
    world.reports.slow = True
    world.operator = assemble(
        world.cluster, SETTINGS, clock=world.time, engines=world.reports, rng=random.Random(1)
    )
    assert world.writes(world.operate) == 0
    world.time.seconds += 9
    assert world.writes(world.operate) == 0
    world.time.seconds += 2
    world.operate()
    assert world.condition("UsingCache") == ("Unknown", "Unreported")
    world.change("spec.retentionSeconds", 7)
    world.operate()
    generation = world.object(DIFFUSION_DEPLOYMENT)["metadata"]["generation"]
    assert world.object(DIFFUSION_DEPLOYMENT)["status"]["observedGeneration"] == generation
