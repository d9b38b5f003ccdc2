"""Leadership, feed, engine reports, settings, metrics, secrets: each on its own."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from dlo_kube.errors import Conflict, Denied, Invalid, Unavailable
from dlo_kube.kinds import EVENT, LEASE, NODE_WEIGHT_CACHE, SECRET
from dlo_operator.engines import HttpEngines, ask, read_report
from dlo_operator.errors import LeadershipLost, Response, response_to
from dlo_operator.executor import stands
from dlo_operator.feed import Feed
from dlo_operator.keys import deployment_key, node_key
from dlo_operator.leader import DURATION_SECONDS, GIVE_UP_SECONDS, Leader
from dlo_operator.reconcile.inputs import EngineReport
from dlo_operator.settings import parse
from fakes.kube import FakeCluster
from unit.operator.world import ALL, NAMESPACE, SETTINGS, World

CANARY = "Y2FuYXJ5LXRva2Vu"


def leader(cluster: FakeCluster, identity: str, time: list[float]) -> Leader:
    """A process that wants to lead."""
    return Leader(
        cluster,
        "dlo-system",
        identity,
        monotonic=lambda: time[0],
        now=lambda: datetime.fromtimestamp(1e9 + time[0], UTC),
    )


def test_one_leads_until_it_stops_renewing() -> None:
    """The second waits for the whole time since it saw the Lease move, then takes over; the first must end."""
    cluster, time = FakeCluster(), [0.0]
    first, second = leader(cluster, "one", time), leader(cluster, "two", time)
    assert first.attempt()
    assert not second.attempt()
    time[0] = DURATION_SECONDS - 1
    assert first.attempt()
    time[0] = DURATION_SECONDS + 1
    assert not second.attempt()
    time[0] = 2 * DURATION_SECONDS + 2
    assert second.attempt()
    with pytest.raises(LeadershipLost, match="two leads now"):
        first.attempt()


def test_a_leader_that_goes_in_order_is_followed_at_once() -> None:
    """It empties the Lease."""
    cluster, time = FakeCluster(), [0.0]
    first, second = leader(cluster, "one", time), leader(cluster, "two", time)
    assert first.attempt()
    first.release()
    assert second.attempt()
    assert cluster.objects(LEASE)[0]["spec"]["leaseTransitions"] == 2


@pytest.mark.parametrize("verb", ["create", "apply"])
def test_two_that_take_over_at_once_do_not_both_lead(verb: str) -> None:
    """Each write names the version that it was decided on: of no Lease, and of one that was let go."""
    cluster, time = FakeCluster(), [0.0]
    first, second = leader(cluster, "one", time), leader(cluster, "two", time)
    if verb == "apply":
        assert first.attempt()
        first.release()
    raced: list[bool] = []

    def other_first(call: Any) -> None:
        if (call.verb, call.kind) == (verb, "Lease") and not raced:
            raced.append(True)
            assert second.attempt()

    cluster.before.append(other_first)
    assert not first.attempt()
    assert cluster.objects(LEASE)[0]["spec"]["holderIdentity"] == "two"


def test_a_leader_that_cannot_renew_ends_in_time() -> None:
    """Before another may take over."""
    cluster, time = FakeCluster(), [0.0]
    first = leader(cluster, "one", time)
    assert first.attempt()

    def down(call: Any) -> None:
        raise Unavailable("connection refused")

    def wait(seconds: float) -> bool:
        time[0] += seconds
        return False

    cluster.before.append(down)
    with pytest.raises(LeadershipLost, match="could not renew"):
        first.lead(threading.Event(), wait)
    assert GIVE_UP_SECONDS < time[0] < DURATION_SECONDS


def test_what_an_event_concerns() -> None:
    """A node's heartbeats are no news; its labels are news for all; pods belong to their deployment."""
    key = deployment_key("team", "a")
    feed = Feed(lambda node, _wide: [key] if node == "n" else [], lambda: [key])
    node = {"kind": "Node", "metadata": {"name": "n", "uid": "1", "labels": {}}, "status": {}}
    assert feed.keys(node, deleted=False) == {node_key("n"), key}
    assert feed.keys({**node, "status": {"conditions": [1]}}, deleted=False) == set()
    labelled = {**node, "metadata": {**node["metadata"], "labels": {"a": "b"}}}  # type: ignore[dict-item]
    assert feed.keys(labelled, deleted=False) == {node_key("n"), key}
    cache = {"kind": "NodeWeightCache", "metadata": {"name": "n"}}
    assert feed.keys(cache, deleted=False) == {node_key("n"), key}
    pod = {
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "team", "labels": {"dlo.dev/deployment": "a"}},
    }
    assert feed.keys(pod, deleted=True) == {key}
    assert feed.keys({"kind": "Pod", "metadata": {"name": "p", "namespace": "team"}}, deleted=False) == set()


def test_a_sleeping_watch_is_found_out() -> None:
    """A change that a listing shows twice and no event told; one that is just on its way does not count."""
    feed = Feed(lambda *_: [], list)

    def obj(version: str) -> dict[str, Any]:
        return {
            "kind": "DiffusionDeployment",
            "metadata": {"name": "a", "namespace": "team", "resourceVersion": version},
        }

    feed.keys(obj("1"), deleted=False)
    assert feed.compare("DiffusionDeployment", [obj("1")]) == (0, frozenset())
    assert feed.compare("DiffusionDeployment", [obj("2")])[0] == 1
    assert not feed.asleep
    feed.keys(obj("2"), deleted=False)
    assert feed.compare("DiffusionDeployment", [obj("3")])[0] == 1
    assert not feed.asleep
    assert feed.compare("DiffusionDeployment", [obj("3")])[0] == 1
    assert feed.asleep


def test_an_object_that_vanished_unseen_is_a_ghost() -> None:
    """Its key is looked at, once."""
    feed = Feed(lambda *_: [], list)
    feed.keys(
        {"kind": "DiffusionDeployment", "metadata": {"name": "a", "namespace": "t", "resourceVersion": "1"}},
        deleted=False,
    )
    assert feed.compare("DiffusionDeployment", []) == (1, frozenset({deployment_key("t", "a")}))
    assert feed.compare("DiffusionDeployment", []) == (0, frozenset())
    assert not feed.asleep


@contextmanager
def engine(body: bytes, asked: list[str], pause: float = 0.0) -> Iterator[int]:
    """Something that answers on a port of this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            time.sleep(pause)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ready_pod(uid: str = "1") -> dict[str, Any]:
    """A ready pod on this machine."""
    status = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": "p", "uid": uid}, "status": status}


def test_an_engine_is_asked_once() -> None:
    """Its answer holds for as long as the container runs."""
    asked: list[str] = []
    said = {
        "backing": {"kind": "MappedCache", "fallbackCode": None},
        "offload": {"mode": "DistributedLayerwise"},
    }
    engines = HttpEngines(lambda: 0.0, patience=10)
    with engine(json.dumps(said).encode(), asked) as port:
        for _ in range(3):
            report = engines.report(ready_pod(), port)
            assert report is not None
            assert report.backing == "MappedCache"
    assert asked == ["/v1/engine/status"]


def test_a_silent_engine_is_not_asked_all_the_time() -> None:
    """Not ready: never; no answer, or nonsense: again after a while."""
    asked: list[str] = []
    now = [0.0]
    engines = HttpEngines(lambda: now[0], patience=10)
    with engine(b"[]", asked) as port:
        assert engines.report({"metadata": {"name": "p", "uid": "2"}}, port) is None
        assert asked == []
        assert engines.report(ready_pod(), port) is None
        assert engines.report(ready_pod(), port) is None
        assert len(asked) == 1
        now[0] = 60
        assert engines.report(ready_pod(), port) is None
        assert len(asked) == 2
    assert engines.report(ready_pod("3"), port) is None


def test_nobody_waits_for_a_slow_engine() -> None:
    """Its word comes later, and wakes its deployment; others are not waited for meanwhile, and it is asked once."""
    asked: list[str] = []
    late = threading.Event()
    answered: list[str] = []
    said = json.dumps({"backing": {"kind": "MappedCache"}}).encode()
    engines = HttpEngines(lambda: 0.0, patience=0.05)

    def heard(pod: Any) -> None:
        answered.append(pod["metadata"]["uid"])
        if len(answered) == 2:
            late.set()

    engines.answered = heard
    with engine(said, asked, pause=0.3) as port:
        began = time.monotonic()
        for _ in range(3):
            assert engines.report(ready_pod("4"), port) is None
            assert engines.report(ready_pod("5"), port) is None
            assert engines.asking(ready_pod("5"))
        assert time.monotonic() - began < 0.25
        assert late.wait(5)
        assert not engines.asking(ready_pod("5"))
        for uid in ("4", "5"):
            report = engines.report(ready_pod(uid), port)
            assert report is not None
            assert report.backing == "MappedCache"
    assert sorted(answered) == ["4", "5"]
    assert len(asked) == 2


def test_an_engine_that_drips_is_left_in_time() -> None:
    """An engine is any image that a tenant names: one that sends a byte now and then would hold a worker for days."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        over = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n{")
                while not over.wait(0.05):
                    connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        try:
            assert ask("127.0.0.1", port) is None
            took = time.monotonic() - began
        finally:
            over.set()
            thread.join()
    assert took < 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("mode", "a b"), ("mode", 5), ("transfer", "é"), ("transfer", ["x"]), ("mode", "M" * 65)],
)
def test_words_that_no_status_may_carry_are_left_out(field: str, value: Any) -> None:
    """What an engine says goes into a status and into messages: words, and nothing that only looks like more."""
    found = read_report(
        {"backing": {"kind": "MappedCache", "fallbackCode": "bad code\n"}, "offload": {field: value}}
    )
    assert found == EngineReport(backing="MappedCache")


def test_an_answer_too_deep_to_read_is_none() -> None:
    """Python's parser gives up with an error of another kind."""
    asked: list[str] = []
    with engine(b"[" * 100_000, asked) as port:
        assert HttpEngines(lambda: 0.0).report(ready_pod(), port) is None
    assert asked


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"backing": 1}, {"backing": {"kind": "Magic"}}, {"backing": {"kind": None}}],
    ids=str,
)
def test_nonsense_is_no_report(value: Any) -> None:
    """Whatever an engine answers."""
    assert read_report(value) is None


def test_settings_come_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Needed ones are needed; names of endpoints are sets."""
    needed = ["--namespace", "a", "--agent-namespace", "b", "--engine-image", "e", "--agent-image", "g"]
    found = parse([*needed, "--identity", "me", "--hub-endpoint", "x", "--hub-endpoint", "y"])
    assert found.plan.hub_endpoints == {"x", "y"}
    assert found.plan.images.engine == "e"
    with pytest.raises(SystemExit, match="2"):
        parse(needed)
    assert "--identity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "response"),
    [
        (Conflict("moved"), Response.SOON),
        (Invalid("no"), Response.SLOW),
        (Denied("no"), Response.SLOW),
        (Unavailable("down"), Response.BACK_OFF),
        (RuntimeError("a defect"), Response.BACK_OFF),
    ],
    ids=str,
)
def test_what_a_failure_leads_to(error: Exception, response: Response) -> None:
    """Decided in one place; nothing is given up."""
    assert response_to(error) == response


def test_conditions_are_metrics() -> None:
    """One series for each status by namespace and name, and a count over all; they go with the object."""
    world = World()
    world.create()
    world.settle()
    value = world.operator.metrics.registry.get_sample_value
    labels = {"namespace": NAMESPACE, "name": "digits", "condition": "Ready"}
    assert value("dlo_deployment_condition", {**labels, "status": "True"}) == 1
    assert value("dlo_deployment_condition", {**labels, "status": "False"}) == 0
    counted = {"kind": "DiffusionDeployment", "condition": "Ready", "status": "True"}
    assert value("dlo_resources", counted) == 1
    assert value("dlo_reconcile_total", {"kind": "Deployment", "result": "Done"})
    world.delete()
    world.settle()
    assert value("dlo_deployment_condition", {**labels, "status": "True"}) is None
    assert value("dlo_resources", counted) == 0


def test_a_credential_is_copied_and_goes_again() -> None:
    """One key, into the agents' namespace, under a name of ours; never into status, events or cache specs."""
    world = World()
    world.cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "hub", "namespace": NAMESPACE},
            "data": {"token": CANARY, "other": "bm8="},
        }
    )
    hub = {"repo": "org/name", "tokenSecretRef": {"name": "hub", "key": "token"}}
    world.create(changes={"spec.model.source": {"huggingFace": hub}})
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    (copied,) = [s for s in world.cluster.objects(SECRET) if s["metadata"]["namespace"] != NAMESPACE]
    assert copied["metadata"]["namespace"] == SETTINGS.plan.agent_namespace
    assert copied["data"] == {"token": CANARY}
    (source,) = world.object(NODE_WEIGHT_CACHE, "node-1")["spec"]["sources"]
    assert source["secretName"] == copied["metadata"]["name"]
    for kind in (*ALL, EVENT):
        assert CANARY not in json.dumps(world.cluster.objects(kind))
    assert world.operator.controller.sweep_secrets() == 0
    world.delete()
    world.settle()
    assert world.operator.controller.sweep_secrets() == 1
    assert [s["metadata"]["namespace"] for s in world.cluster.objects(SECRET)] == [NAMESPACE]


def test_a_failed_reconcile_is_tried_again() -> None:
    """The API server refuses for a while; nobody is told, nothing is lost."""
    world = World()
    world.create()
    world.hear()
    failing = [True]

    def down(call: Any) -> None:
        if failing[0]:
            raise Unavailable("overloaded", retry_after=40)

    world.operator.queue.add(deployment_key(NAMESPACE, "digits"))
    world.cluster.before.append(down)
    taken = world.operator.queue.take(timeout=0)
    assert taken is not None
    world.operator.work(taken)
    failing[0] = False
    assert world.operator.queue.take(timeout=0) is None
    world.time.seconds = 41
    assert world.operator.queue.take(timeout=0) is not None
    errors = world.operator.metrics.registry.get_sample_value(
        "dlo_reconcile_errors_total", {"kind": "Deployment", "reason": "Unavailable"}
    )
    assert errors == 1


def test_standing_still_turns_the_probe_red() -> None:
    """A key that nobody takes, and an API server that does not answer; within two minutes."""
    world = World()
    world.create()
    world.settle()
    assert world.operator.problem() == ""
    world.operator.queue.add(node_key("node-1"))
    world.time.seconds += 100
    assert "no worker" in world.operator.problem()
    world.operator.queue.take(timeout=0)
    assert "API server" in world.operator.problem()
    world.operator.look_at_heartbeats()
    world.operator.queue.take(timeout=0)
    assert "API server" not in world.operator.problem()


@pytest.mark.parametrize(
    ("intent", "live", "same"),
    [
        ({"cpu": "0.5"}, {"cpu": "500m"}, True),
        ({"memory": "1024Mi"}, {"memory": "1Gi"}, True),
        ({"cpu": 1}, {"cpu": "1"}, True),
        ({"cpu": "1"}, {"cpu": "2"}, False),
        ({"a": True}, {"a": 1}, True),
        ({"a": False}, {"a": True}, False),
        ({"a": "1Gi"}, {"a": "1G"}, False),
        ({"a": [1]}, {"a": [1, 2]}, False),
        ({"a": {}}, {}, True),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, True),
        ({"a": "x"}, {}, False),
    ],
    ids=str,
)
def test_what_stands_is_not_written_again(intent: Any, live: Any, same: bool) -> None:
    """Others' fields and the server's spelling of amounts are no difference."""
    assert stands(intent, live) is same
