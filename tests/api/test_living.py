"""The gateway and the watcher on a living server: over many rounds, over its restarts, beside its controllers."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from api.apiserver import ApiServer
from contract.gateway import condition, deployment, named, node_cache, types, with_status
from dlo_kube.client import ClusterGateway, Limits
from dlo_kube.errors import Denied, KubeError, NotFound, Unavailable
from dlo_kube.gateway import Object
from dlo_kube.informer import Watcher
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, SECRET, Kind

_OURS = "dlo-operator"


def _wait(ready: Callable[[], bool], what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_h5_foreign_condition_and_label_survive(gateway: ClusterGateway, namespace: str) -> None:
    """A hundred rounds of ours, each with other values, beside what somebody else has put there."""
    wanted = deployment(namespace)
    foreign = {**wanted, "metadata": {**wanted["metadata"], "labels": {"theirs": "1"}}}
    del foreign["spec"]
    gateway.apply(wanted, manager=_OURS)
    gateway.apply(foreign, manager="argocd")
    gateway.apply_status(with_status(wanted, conditions=[condition("Foreign", "False")]), manager="argocd")
    for number in range(100):
        wanted["metadata"]["labels"] = {"round": str(number)}
        gateway.apply(wanted, manager=_OURS)
        ours = [condition("Ready", ("True", "False")[number % 2]), condition("Accepted")]
        status = with_status(wanted, replicas=number, conditions=ours[: 1 + number % 2])
        gateway.apply_status(status, manager=_OURS)
    found = gateway.get(DIFFUSION_DEPLOYMENT, wanted["metadata"]["name"], namespace)
    assert found is not None
    assert found["metadata"]["labels"] == {"round": "99", "theirs": "1"}
    assert types(found) == {"Foreign": "False", "Ready": "False", "Accepted": "True"}
    assert found["metadata"]["generation"] == 1


def test_same_intent_writes_nothing(gateway: ClusterGateway, namespace: str) -> None:
    """H6, the server's half: an apply that says the same again makes no event and no new version."""
    wanted = deployment(namespace, replicas=2)
    status = with_status(wanted, replicas=1, conditions=[condition("Ready")])
    gateway.apply(wanted, manager=_OURS)
    first = gateway.apply_status(status, manager=_OURS)
    for _ in range(5):
        gateway.apply(copy.deepcopy(wanted), manager=_OURS)
        last = gateway.apply_status(copy.deepcopy(status), manager=_OURS)
    assert last["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_a_list_of_many_pages(gateway: ClusterGateway, namespace: str) -> None:
    """More than one page, each object once."""
    for number in range(510):
        meta = {"name": f"s-{number}", "namespace": namespace}
        gateway.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta})
    names = [obj["metadata"]["name"] for obj in gateway.list(SECRET, namespace).items]
    assert len(names) == len(set(names)) == 510


def test_a_kind_that_is_not_served(gateway: ClusterGateway) -> None:
    """Not taken for a cluster without objects, nor for an object that is gone."""
    missing = Kind("dlo.dev/v9", "Thing", "things", False)
    for call in (lambda: gateway.list(missing), lambda: gateway.get(missing, "a")):
        with pytest.raises(NotFound) as failed:
            call()
        assert failed.value.code == "KindNotServed"


def test_a_namespace_that_is_not_there(gateway: ClusterGateway) -> None:
    """Told as such, with its name."""
    with pytest.raises(NotFound, match="absent") as failed:
        gateway.create(deployment("absent"))
    assert failed.value.code == "NotFound"


def test_strangers_are_denied(server: ApiServer) -> None:
    """A token that nobody knows."""
    stranger = server.gateway(token="unknown")
    with pytest.raises(Denied) as failed:
        stranger.list(NODE_WEIGHT_CACHE)
    assert failed.value.code == "Unauthorized"
    stranger.close()


def test_silent_watch_ends_in_time(gateway: ClusterGateway, namespace: str) -> None:
    """Nothing happens and no bookmark need come; the end in order is what shows that the server lives."""
    version = gateway.list(DIFFUSION_DEPLOYMENT, namespace).resource_version
    began = time.monotonic()
    stream = gateway.watch(
        DIFFUSION_DEPLOYMENT, namespace=namespace, resource_version=version, timeout_seconds=2
    )
    assert {event.type for event in stream} <= {"BOOKMARK"}
    assert 1 < time.monotonic() - began < 5


class _Seen:
    """A watcher in a thread, and what it told."""

    def __init__(self, gateway: ClusterGateway, name: str) -> None:
        self.told: list[Object | None] = []
        self.errors: list[KubeError] = []
        self.watcher = Watcher(
            gateway,
            NODE_WEIGHT_CACHE,
            {"metadata.name": name},
            self.told.append,
            on_error=lambda error, _: self.errors.append(error),
        )
        self.thread = threading.Thread(target=self.watcher.run, daemon=True)
        self.thread.start()

    def last_is(self, uid: str | None, generation: int = 0) -> bool:
        """Whether the last thing told is that object in that generation, or that there is none."""
        if not self.told or self.told[-1] is None:
            return bool(self.told) and uid is None
        meta = self.told[-1]["metadata"]
        return (meta["uid"], meta["generation"]) == (uid, generation)


def test_watcher_lives_through_a_killed_server(own_server: ApiServer) -> None:
    """Killed and started again, twice; while it was away the object was replaced by another of the same name."""
    gateway = own_server.gateway(limits=Limits(connect=1, request=5))
    other = own_server.gateway()
    wanted = node_cache()
    name = wanted["metadata"]["name"]
    uid = other.apply(wanted, manager=_OURS)["metadata"]["uid"]
    seen = _Seen(gateway, name)
    _wait(lambda: seen.last_is(uid, 1), "the first list")
    for generation in (2, 3):
        own_server.stop("kube-apiserver", signal.SIGKILL)
        _wait(lambda: len(seen.errors) > 0, "the loss is noticed")
        with pytest.raises(Unavailable):
            other.get(NODE_WEIGHT_CACHE, name)
        own_server.start()
        source: Any = {"id": f"{generation}a", "source": {"s3": {"bucket": "models"}}}
        wanted["spec"]["sources"] = [source]
        other.apply(named(wanted), manager=_OURS)
        _wait(lambda g=generation: seen.last_is(uid, g), "the change after the restart")  # type: ignore[misc]
        seen.errors.clear()
    assert seen.watcher.age() < 120
    own_server.stop("kube-apiserver", signal.SIGKILL)
    own_server.start()
    other.delete(NODE_WEIGHT_CACHE, name, uid=uid)
    second = other.apply(named(wanted), manager=_OURS)["metadata"]["uid"]
    _wait(lambda: seen.last_is(second, 1), "the other object of that name")
    assert None in seen.told[seen.told.index(next(o for o in seen.told if o)) :]
    seen.watcher.stop()
    gateway.close()
    seen.thread.join(5)
    assert not seen.thread.is_alive()
    other.close()


def test_children_go_with_their_owner(server: ApiServer, gateway: ClusterGateway, namespace: str) -> None:
    """Owner references across kinds are collected by the cluster itself: no finalizer is needed."""
    owner = gateway.apply(deployment(namespace), manager=_OURS)
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    for name, owners in (("child", [reference]), ("free", [])):
        meta = {"name": name, "namespace": namespace, "ownerReferences": owners}
        gateway.apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta}, manager=_OURS)
    with server.controllers("garbage-collector-controller"):
        uid = owner["metadata"]["uid"]
        gateway.delete(DIFFUSION_DEPLOYMENT, owner["metadata"]["name"], namespace, uid=uid)
        _wait(lambda: gateway.get(SECRET, "child", namespace) is None, "the child goes")
    assert gateway.get(SECRET, "free", namespace) is not None


def test_audit_log_counts_requests(server: ApiServer, gateway: ClusterGateway, namespace: str) -> None:
    """What tests of idleness count with: who asked for what."""
    before = len(server.audit())
    gateway.apply(deployment(namespace), manager=_OURS)
    ours = [e for e in server.audit()[before:] if e["objectRef"].get("namespace") == namespace]
    assert [(e["verb"], e["objectRef"]["resource"], e["userAgent"]) for e in ours] == [
        ("patch", "diffusiondeployments", "dlo")
    ]
