"""The gateway over HTTP: what it asks, and what it makes of answers that a healthy server does not give."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dlo_kube.client import ClusterGateway, Limits
from dlo_kube.connection import by_address, from_kubeconfig, in_cluster
from dlo_kube.errors import Conflict, Denied, Expired, Invalid, KubeError, NotFound, Unavailable
from dlo_kube.gateway import Gateway, Served
from dlo_kube.kinds import DEPLOYMENT, NODE_WEIGHT_CACHE
from dlo_kube.responses import failure
from unit.kube.http_server import Answer, Asked, HttpServer, events, status

_POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "n"}}
_GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 5 (9)"}
_SHORT = Limits(connect=0.5, request=0.4, silence=0.4)


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[Asked], Answer]], HttpServer]]:
    """Starts servers that end with the test."""
    running: list[HttpServer] = []

    def start(answer: Callable[[Asked], Answer]) -> HttpServer:
        running.append(HttpServer(answer).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


Serve = Callable[[Callable[[Asked], Answer]], HttpServer]


def _event(version: int, kind: str = "MODIFIED") -> dict[str, Any]:
    return {"type": kind, "object": {"metadata": {"name": "node-1", "resourceVersion": str(version)}}}


def _watch(gateway: Gateway) -> Iterator[Any]:
    return gateway.watch(NODE_WEIGHT_CACHE, resource_version="5", timeout_seconds=30)


def test_gateway_is_a_gateway(serve: Serve) -> None:
    """The type checker holds it to the protocol."""
    gateway: Gateway = serve(lambda _: Answer()).gateway()
    assert gateway.get(NODE_WEIGHT_CACHE, "node-1") == {}


def test_apply_is_a_forced_server_side_apply(serve: Serve) -> None:
    """Method, address, content type, manager; who asks."""
    server = serve(lambda _: Answer())
    gateway = server.gateway(user_agent="dlo-agent/1")
    gateway.apply(_POD, manager="dlo-operator")
    gateway.apply(_POD, manager="dlo-operator", force=False, dry_run=True)
    gateway.apply_status({**_POD, "spec": {"x": 1}, "status": {"phase": "Ready"}}, manager="dlo-agent")
    first, second, third = server.asked
    assert (first.method, first.path) == ("PATCH", "/api/v1/namespaces/n/pods/a")
    assert first.query == {"fieldManager": "dlo-operator", "force": "true"}
    assert first.headers["content-type"] == "application/apply-patch+yaml"
    assert first.headers["authorization"] == "Bearer secret"
    assert first.headers["user-agent"] == "dlo-agent/1"
    assert first.body == _POD
    assert second.query == {"fieldManager": "dlo-operator", "force": "false", "dryRun": "All"}
    assert third.path == "/api/v1/namespaces/n/pods/a/status"
    assert third.body == {**_POD, "status": {"phase": "Ready"}}


def test_delete_carries_preconditions(serve: Serve) -> None:
    """H3: an API delete never goes by name alone."""
    server = serve(lambda _: Answer())
    server.gateway().delete(DEPLOYMENT, "a", "n", uid="u-1", resource_version="7")
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("DELETE", "/apis/apps/v1/namespaces/n/deployments/a")
    assert asked.body["preconditions"] == {"uid": "u-1", "resourceVersion": "7"}


def test_list_comes_in_pages(serve: Serve) -> None:
    """500 a page, all with the first page's selectors; the version of the last page counts."""

    def answer(asked: Asked) -> Answer:
        more = "continue" not in asked.query
        meta = {"resourceVersion": "9", **({"continue": "next"} if more else {})}
        return Answer(
            body=json.dumps({"metadata": meta, "items": [{"metadata": {"name": str(more)}}]}).encode()
        )

    server = serve(answer)
    found = server.gateway().list(DEPLOYMENT, labels={"a": "b"}, fields={"metadata.name": "x"})
    assert [o["metadata"]["name"] for o in found.items] == ["True", "False"]
    assert {(o["apiVersion"], o["kind"]) for o in found.items} == {("apps/v1", "Deployment")}
    assert found.resource_version == "9"
    selection = {"limit": "500", "labelSelector": "a=b", "fieldSelector": "metadata.name=x"}
    assert [a.query for a in server.asked] == [selection, {**selection, "continue": "next"}]


def test_list_that_expires_between_pages(serve: Serve) -> None:
    """The token is too old: not half a list."""

    def answer(asked: Asked) -> Answer:
        if "continue" in asked.query:
            return status(410, "Expired", "The provided continue parameter is too old")
        return Answer(body=b'{"metadata": {"continue": "next"}, "items": [{}]}')

    with pytest.raises(Expired, match="list deployments: The provided continue"):
        serve(answer).gateway().list(DEPLOYMENT)


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (status(404, "NotFound", "not here", name="a", kind="pods"), NotFound, "NotFound"),
        (Answer(404, b"404 page not found\n"), NotFound, "KindNotServed"),
        (status(409, "Conflict", "conflict with x"), Conflict, "Conflict"),
        (status(409, "AlreadyExists", "there"), Conflict, "AlreadyExists"),
        (status(410, "Gone", "gone"), Expired, "Expired"),
        (status(401, "Unauthorized", "who"), Denied, "Unauthorized"),
        (status(403, "Forbidden", "no"), Denied, "Forbidden"),
        (
            status(403, "Forbidden", "ending", causes=[{"reason": "NamespaceTerminating"}]),
            Denied,
            "NamespaceTerminating",
        ),
        (status(400, "BadRequest", "what"), Invalid, "Invalid"),
        (status(422, "Invalid", "wrong"), Invalid, "Invalid"),
        (status(422, "Invalid", "x", causes=[{"field": "metadata.uid"}]), Conflict, "Conflict"),
        (status(413, "RequestEntityTooLarge", "large"), Invalid, "Invalid"),
        (status(429, "TooManyRequests", "slow down"), Unavailable, "TooManyRequests"),
        (status(500, "InternalError", "oops"), Unavailable, "Unavailable"),
        (status(504, "Timeout", "late"), Unavailable, "Unavailable"),
        (Answer(502, b"<html>Bad Gateway</html>"), Unavailable, "Unavailable"),
        (Answer(200, b'{"half": '), Unavailable, "Unavailable"),
        (Answer(200, b"[1]"), Unavailable, "Unavailable"),
        (Answer(200, b'{"half": ', cut=True), Unavailable, "Unavailable"),
    ],
)
def test_every_answer_has_one_meaning(serve: Serve, answer: Answer, kind: type[KubeError], code: str) -> None:
    """Translated in one place, asked once: nothing is tried again behind the caller's back."""
    server = serve(lambda _: answer)
    with pytest.raises(kind) as failed:
        server.gateway().apply(_POD, manager="m")
    assert failed.value.code == code
    assert failed.value.message.startswith("apply pods a: ")
    assert len(server.asked) == 1


def test_absent_object_and_absent_kind_differ(serve: Serve) -> None:
    """A CRD that is not installed must never look like an object that was deleted."""
    absent = serve(
        lambda _: status(404, "NotFound", "not found", name="a", kind="nodeweightcaches")
    ).gateway()
    assert absent.get(NODE_WEIGHT_CACHE, "a") is None
    assert not absent.delete(NODE_WEIGHT_CACHE, "a", uid="u")
    unknown = serve(lambda _: Answer(404, b"404 page not found\n")).gateway()
    for call in (
        lambda: unknown.get(NODE_WEIGHT_CACHE, "a"),
        lambda: unknown.delete(NODE_WEIGHT_CACHE, "a", uid="u"),
        lambda: unknown.list(NODE_WEIGHT_CACHE),
    ):
        with pytest.raises(NotFound, match="install the CRDs") as failed:
            call()
        assert failed.value.code == "KindNotServed"


def test_refused_fields_are_told(serve: Serve) -> None:
    """The server's words are kept, whole and field by field."""
    causes = [{"reason": "FieldValueInvalid", "message": "Invalid value: 3: no", "field": "spec.x"}]
    causes.append({"reason": "FieldValueInvalid", "message": "whole", "field": "<nil>"})
    refused = status(422, "Invalid", 'Pod "a" is invalid: spec.x: Invalid value: 3: no', causes=causes)
    with pytest.raises(Invalid, match='Pod "a" is invalid') as failed:
        serve(lambda _: refused).gateway().create(_POD)
    assert failed.value.causes == (("spec.x", "Invalid value: 3: no"), ("", "whole"))


@pytest.mark.parametrize(
    ("headers", "details", "seconds"),
    [
        ({"Retry-After": "7"}, {}, 7.0),
        ({}, {"retryAfterSeconds": 3}, 3.0),
        ({"Retry-After": "7"}, {"retryAfterSeconds": 3}, 7.0),
        ({"Retry-After": "86400"}, {}, 300.0),
        ({"Retry-After": "soon"}, {}, None),
        ({"Retry-After": "-1"}, {}, None),
        ({}, {}, None),
    ],
)
def test_wait_that_the_server_asks_for(
    headers: dict[str, str], details: dict[str, Any], seconds: float | None
) -> None:
    """From the header or the answer, in bounds."""
    body = status(429, "TooManyRequests", "slow down", **details).body
    assert isinstance(body, bytes)
    error = failure(429, body, "apply pods a", headers)
    assert isinstance(error, Unavailable)
    assert error.retry_after == seconds


def test_nobody_there() -> None:
    """A refused connection is an answer like any other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gateway = ClusterGateway(by_address(f"http://127.0.0.1:{port}"))
    with pytest.raises(Unavailable, match="gave no answer"):
        gateway.get(NODE_WEIGHT_CACHE, "a")


def test_time_limits_hold(serve: Serve) -> None:
    """No answer, and an answer that comes drop by drop without end."""

    def never(asked: Asked) -> Answer:
        silent.closing.wait(20)
        return Answer()

    silent = serve(never)
    mute = silent.gateway(limits=_SHORT)
    dripping: HttpServer = serve(lambda _: Answer(body=dripping.trickle(0.05)))
    began = time.monotonic()
    with pytest.raises(Unavailable, match="gave no answer"):
        mute.get(NODE_WEIGHT_CACHE, "a")
    with pytest.raises(Unavailable, match="took too long"):
        dripping.gateway(limits=_SHORT).get(NODE_WEIGHT_CACHE, "a")
    assert time.monotonic() - began < 2


def test_watch_asks_for_bookmarks_and_an_end(serve: Serve) -> None:
    """So that the next stream can begin where this one ends, and no stream lasts for ever."""
    server = serve(lambda _: Answer(body=events(_event(6, "ADDED"), _event(8, "BOOKMARK"))))
    seen = list(_watch(server.gateway()))
    assert [(e.type, e.obj["metadata"]["resourceVersion"]) for e in seen] == [
        ("ADDED", "6"),
        ("BOOKMARK", "8"),
    ]
    assert seen[0].obj["kind"] == "NodeWeightCache"
    assert server.asked[0].query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "5",
        "timeoutSeconds": "30",
    }


def test_case_32_expired_in_a_good_stream(serve: Serve) -> None:
    """HTTP 200, events, then an ERROR event with 410: told as Expired, after the events."""
    error = {"type": "ERROR", "object": _GONE}
    stream = _watch(serve(lambda _: Answer(body=events(_event(6), error, _event(7)))).gateway())
    assert next(stream).obj["metadata"]["resourceVersion"] == "6"
    with pytest.raises(Expired, match="too old resource version"):
        next(stream)


@pytest.mark.parametrize("answer", [status(410, "Expired", "too old"), status(410, "Gone", "")])
def test_case_32_expired_at_once(serve: Serve, answer: Answer) -> None:
    """As an HTTP status."""
    with pytest.raises(Expired):
        next(_watch(serve(lambda _: answer).gateway()))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"kind": "Status", "code": 500, "message": "etcd"}, Unavailable),
        ({"kind": "Status", "code": 403, "message": "no"}, Denied),
        ({}, Unavailable),
    ],
)
def test_other_errors_in_a_stream(serve: Serve, error: dict[str, Any], kind: type[KubeError]) -> None:
    """No ERROR event passes for a change."""
    with pytest.raises(kind):
        next(_watch(serve(lambda _: Answer(body=events({"type": "ERROR", "object": error}))).gateway()))


def test_half_open_watch_is_broken_off(serve: Serve) -> None:
    """H2: open and mute."""
    server: HttpServer = serve(lambda _: Answer(body=server.silence(events(_event(6)))))
    stream = _watch(server.gateway(limits=_SHORT))
    next(stream)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="broke off"):
        next(stream)
    assert 0.2 < time.monotonic() - began < 2


@pytest.mark.parametrize("tail", [b'{"type": "MODIF', b""])
def test_stream_that_is_cut(serve: Serve, tail: bytes) -> None:
    """Between events or within one: the event before counts, the cut is told."""

    def parts() -> Iterator[bytes]:
        yield from events(_event(6))
        if tail:
            yield tail

    stream = _watch(serve(lambda _: Answer(body=parts(), cut=True)).gateway())
    next(stream)
    with pytest.raises(Unavailable):
        next(stream)


def test_stream_that_ends_within_an_event(serve: Serve) -> None:
    """An end in order, but not of the last line."""
    with pytest.raises(Unavailable, match="within an event"):
        list(_watch(serve(lambda _: Answer(body=iter([b'{"type": "ADDED"']))).gateway()))


def test_events_may_be_split_anywhere(serve: Serve) -> None:
    """Chunks are not lines."""
    text = b"".join(events(_event(6), _event(7)))
    server = serve(lambda _: Answer(body=(bytes([byte]) for byte in text)))
    assert [e.obj["metadata"]["resourceVersion"] for e in _watch(server.gateway())] == ["6", "7"]


def test_close_ends_a_waiting_watch(serve: Serve) -> None:
    """So that a process can stop at once."""
    server: HttpServer = serve(lambda _: Answer(body=server.silence(events(_event(6)))))
    gateway = server.gateway()
    stream = _watch(gateway)
    next(stream)
    threading.Timer(0.2, gateway.close).start()
    began = time.monotonic()
    with pytest.raises(Unavailable):
        next(stream)
    assert time.monotonic() - began < 5


def test_calls_are_observed(serve: Serve) -> None:
    """For metrics: verb, kind, outcome, time."""
    seen: list[Served] = []
    answers = iter([Answer(), status(429, "TooManyRequests", "slow down")])
    gateway = serve(lambda _: next(answers)).gateway(observe=seen.append)
    gateway.get(NODE_WEIGHT_CACHE, "a")
    with pytest.raises(Unavailable):
        gateway.apply(_POD, manager="m")
    assert [(s.verb, s.resource, s.code) for s in seen] == [
        ("get", "nodeweightcaches", "ok"),
        ("apply", "pods", "TooManyRequests"),
    ]
    assert all(0 <= s.seconds < 5 for s in seen)


def test_threads_share_a_gateway(serve: Serve) -> None:
    """Answers do not get mixed up."""

    def answer(asked: Asked) -> Answer:
        return Answer(body=json.dumps({"name": asked.path.rsplit("/", 1)[1]}).encode())

    gateway = serve(answer).gateway()
    wrong: list[str] = []

    def ask(thread: int) -> None:
        for number in range(20):
            name = f"n-{thread}-{number}"
            if gateway.get(NODE_WEIGHT_CACHE, name) != {"name": name}:
                wrong.append(name)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_kubeconfig(tmp_path: Path, serve: Serve) -> None:
    """The current context of the file; what cannot be used is told with the file's name."""
    server = serve(lambda _: Answer())
    file = tmp_path / "config"
    value = {
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "from-file"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    }
    file.write_text(json.dumps(value))
    ClusterGateway(from_kubeconfig(file)).get(NODE_WEIGHT_CACHE, "a")
    assert server.asked[0].headers["authorization"] == "Bearer from-file"
    for text in ("", "{}", ": :", json.dumps({**value, "current-context": "there"})):
        file.write_text(text)
        with pytest.raises(Denied, match="config") as failed:
            from_kubeconfig(file)
        assert failed.value.code == "NoCredentials"
    with pytest.raises(Denied, match="absent"):
        from_kubeconfig(tmp_path / "absent")


def test_outside_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so instead of talking to some default address."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(Denied, match="run it in a pod"):
        in_cluster()
