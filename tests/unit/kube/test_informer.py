"""The watcher: what it tells of changes, gaps, lies and silences, and that it never stops by itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from dlo_kube.client import Limits
from dlo_kube.errors import Denied, Expired, KubeError, Unavailable
from dlo_kube.gateway import Listing, Object, WatchEvent
from dlo_kube.informer import Watcher
from dlo_kube.kinds import NODE_WEIGHT_CACHE, Kind
from fakes.kube import FakeCluster
from unit.kube.http_server import Answer, Asked, HttpServer, events

_NAME = {"metadata.name": "node-1"}


def _cache(version: int, uid: str = "u-1", name: str = "node-1") -> Object:
    return {
        "apiVersion": "dlo.dev/v1alpha1",
        "kind": "NodeWeightCache",
        "metadata": {"name": name, "uid": uid, "resourceVersion": str(version)},
    }


def _bookmark(version: int) -> WatchEvent:
    return WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


Step = WatchEvent | KubeError | float
Lists = list[Listing | KubeError]


class Script:
    """A server that answers as scripted, on a clock that only moves where the script says so; at the end it stops."""

    def __init__(self, lists: Lists, streams: list[list[Step]], **options: Any) -> None:
        self.lists, self.streams = list(lists), [list(stream) for stream in streams]
        self.now = 1000.0
        self.seen: list[tuple[str, str] | None] = []
        self.watched_from: list[str] = []
        self.pauses: list[float] = []
        self.errors: list[str] = []
        self.ages: list[float] = []
        self.watcher = Watcher(
            self,  # type: ignore[arg-type]
            NODE_WEIGHT_CACHE,
            _NAME,
            self._changed,
            clock=lambda: self.now,
            pause=self._pause,
            jitter=options.pop("jitter", lambda: 0.5),
            on_error=lambda error, _: self.errors.append(error.code),
            **options,
        )

    def run(self) -> Script:
        """Until the script is over."""
        self.watcher.run()
        return self

    def _changed(self, obj: Object | None) -> None:
        self.seen.append((obj["metadata"]["uid"], obj["metadata"]["resourceVersion"]) if obj else None)

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def list(self, kind: Kind, namespace: str | None = None, *, fields: Mapping[str, str] | None) -> Listing:
        """The next scripted list."""
        assert (kind, fields) == (NODE_WEIGHT_CACHE, _NAME)
        if not self.lists:
            self.watcher.stop()
            raise Unavailable("the script is over")
        step = self.lists.pop(0)
        if isinstance(step, KubeError):
            raise step
        return step

    def watch(
        self, kind: Kind, *, resource_version: str, timeout_seconds: float, **_: Any
    ) -> Iterator[WatchEvent]:
        """The next scripted stream; a number lets time pass."""
        self.watched_from.append(resource_version)
        assert timeout_seconds <= 50, "longer than a half-open stream may stay unnoticed"
        if not self.streams:
            self.watcher.stop()
            return
        for step in self.streams.pop(0):
            if isinstance(step, KubeError):
                raise step
            if isinstance(step, WatchEvent):
                yield step
            else:
                self.now += step
            self.ages.append(self.watcher.age())


def _listing(version: int, *objects: Object) -> Listing:
    return Listing(objects, str(version))


def test_first_list_is_told_whole() -> None:
    """Also that there is nothing, so that a receiver need not wait."""
    assert Script([_listing(9, _cache(5))], []).run().seen == [("u-1", "5")]
    empty = Script([_listing(9)], [])
    assert not empty.watcher.synced
    assert empty.run().seen == [None]
    assert empty.watcher.synced


def test_changes_are_told_once() -> None:
    """Each new version; not one that the list had already."""
    stream: list[Step] = [
        WatchEvent("ADDED", _cache(5)),
        WatchEvent("MODIFIED", _cache(6)),
        WatchEvent("MODIFIED", _cache(6)),
        WatchEvent("DELETED", _cache(7)),
        WatchEvent("DELETED", _cache(7)),
        WatchEvent("ADDED", _cache(8, "u-2")),
    ]
    script = Script([_listing(5, _cache(5))], [stream]).run()
    assert script.seen == [("u-1", "5"), ("u-1", "6"), None, ("u-2", "8")]


def test_case_32_expired_in_a_good_stream() -> None:
    """Lists again, tells what changed in the gap, goes on from the new list."""
    script = Script(
        [_listing(5, _cache(5)), _listing(20, _cache(18))],
        [[WatchEvent("MODIFIED", _cache(6)), Expired("too old")], [WatchEvent("MODIFIED", _cache(21))]],
    ).run()
    assert script.seen == [("u-1", "5"), ("u-1", "6"), ("u-1", "18"), ("u-1", "21")]
    assert script.watched_from[:2] == ["5", "20"]
    assert script.errors[0] == "Expired"


def test_expired_without_end_is_not_a_tight_loop() -> None:
    """A server that never lets a watch begin is asked less and less often."""
    listing = _listing(5, _cache(5))
    script = Script([listing] * 12, [[Expired("too old")]] * 12).run()
    assert script.pauses[:4] == [0.375, 0.75, 1.5, 3.0]
    assert max(script.pauses) == 22.5
    assert script.seen == [("u-1", "5")]


@pytest.mark.parametrize("cause", [Expired("410"), Unavailable("broke off")])
def test_h3_deleted_while_away(cause: KubeError) -> None:
    """No event ever told of it: the list that lacks it does."""
    script = Script([_listing(5, _cache(5)), _listing(20)], [[cause]]).run()
    assert script.seen == [("u-1", "5"), None]
    assert script.watcher.objects() == ()


def test_h3_replaced_while_away() -> None:
    """The same name, another object: gone first, then new, so that nothing of the old one is carried on."""
    script = Script([_listing(5, _cache(5)), _listing(20, _cache(19, "u-2"))], [[Expired("410")]]).run()
    assert script.seen == [("u-1", "5"), None, ("u-2", "19")]
    script = Script([_listing(5, _cache(5))], [[WatchEvent("MODIFIED", _cache(9, "u-2"))]]).run()
    assert script.seen == [("u-1", "5"), None, ("u-2", "9")]


def test_lost_event_is_found_by_the_next_list() -> None:
    """A watch that skips heals within the resync time, with nothing failing."""
    script = Script(
        [_listing(5, _cache(5)), _listing(30, _cache(29))],
        [[100.0, _bookmark(28), 171.0]],
        resync_seconds=300,
    ).run()
    assert script.seen == [("u-1", "5"), ("u-1", "29")]
    assert "Expired" not in script.errors


def test_streams_that_end_in_order_go_on_without_a_list() -> None:
    """From where they ended."""
    script = Script(
        [_listing(5, _cache(5))],
        [
            [WatchEvent("MODIFIED", _cache(6)), 10.0],
            [_bookmark(9), 10.0],
            [WatchEvent("MODIFIED", _cache(10))],
        ],
    ).run()
    assert script.watched_from[:3] == ["5", "6", "9"]
    assert script.seen == [("u-1", "5"), ("u-1", "6"), ("u-1", "10")]


def test_streams_that_end_at_once_are_not_a_tight_loop() -> None:
    """Neither watches nor lists without a pause, and longer ones as it goes on."""
    script = Script([_listing(5, _cache(5))], [[]] * 6).run()
    assert script.pauses[:6] == [0.375, 0.75, 1.5, 3.0, 6.0, 12.0]


def test_h2_age_grows_in_silence_and_bookmarks_keep_it_small() -> None:
    """An open stream is no sign of life; a bookmark is. Nothing is told to the receiver."""
    silent = Script([_listing(5, _cache(5))], [[60.0, 60.0]], resync_seconds=1000).run()
    assert silent.ages == [60.0, 120.0]
    marked = Script(
        [_listing(5, _cache(5))], [[60.0, _bookmark(7), 60.0, _bookmark(9)]], resync_seconds=1000
    ).run()
    assert marked.ages == [60.0, 0.0, 60.0, 0.0]
    assert marked.seen == [("u-1", "5")]
    assert marked.watched_from[1] == "9"


def test_streams_that_break_late_do_not_add_up() -> None:
    """A network that cuts every quiet stream after a minute costs a short pause each time, not a growing one."""
    script = Script([_listing(5, _cache(5))] * 6, [[60.0, Unavailable("broke off")]] * 5).run()
    assert script.pauses[:5] == [0.375] * 5


def test_age_counts_before_the_first_list_too() -> None:
    """A watcher that never got through is as red as one that lost its stream."""
    script = Script([Unavailable("down")] * 4, [])
    assert script.watcher.age() == 0
    script.run()
    assert script.watcher.age() == sum(script.pauses)
    assert not script.watcher.synced
    assert script.seen == []


def test_pauses_grow_at_random_and_start_anew_after_a_success() -> None:
    """And are as long as the server asks."""
    lists: Lists = [
        Unavailable("a"),
        Denied("b"),
        Unavailable("c", retry_after=40.0),
        Unavailable("d"),
        _listing(5, _cache(5)),
        _listing(6, _cache(5)),
    ]
    script = Script(lists, [[_bookmark(6), Unavailable("e")]]).run()
    assert script.pauses[:5] == [0.375, 0.75, 40.0, 3.0, 0.375]
    assert script.errors[:3] == ["Unavailable", "Forbidden", "Unavailable"]
    spread = {Script([Unavailable("a")], [], jitter=lambda x=x: x).run().pauses[0] for x in (0.0, 0.5, 0.99)}
    assert min(spread) == 0.25
    assert max(spread) < 0.5
    assert len(spread) == 3


def test_a_receiver_that_fails_is_not_hidden() -> None:
    """The loop ends with its error, and is not heard any more."""

    def fails(obj: Object | None) -> None:
        raise RuntimeError("mine")

    watcher = Watcher(FakeCluster(), NODE_WEIGHT_CACHE, None, fails)
    with pytest.raises(RuntimeError, match="mine"):
        watcher.run()
    first = watcher.age()
    time.sleep(0.02)
    assert watcher.age() > first


# -- on a cluster in memory, and over HTTP, with the real clock -----------------------------------------------


class Receiver:
    """Runs a watcher in a thread and keeps what it tells."""

    def __init__(self, gateway: Any, **options: Any) -> None:
        self.told: list[tuple[str, int] | None] = []
        self.watcher = Watcher(gateway, NODE_WEIGHT_CACHE, _NAME, self._changed, **options)
        self.thread = threading.Thread(target=self.watcher.run, daemon=True)
        self.thread.start()

    def _changed(self, obj: Object | None) -> None:
        self.told.append((obj["metadata"]["uid"], obj["metadata"].get("generation", 0)) if obj else None)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until it is so; 10 s at most."""
        end = time.monotonic() + 10
        while not ready():
            assert time.monotonic() < end, self.told
            time.sleep(0.005)


def test_on_a_cluster_through_gaps() -> None:
    """Created, changed, deleted and made anew while the history is lost: the end is what there is."""
    cluster = FakeCluster()
    obj = {**_cache(0), "spec": {}, "metadata": {"name": "node-1"}}
    receiver = Receiver(cluster)
    receiver.wait(lambda: receiver.told == [None])
    uid = cluster.apply(obj, manager="m")["metadata"]["uid"]
    receiver.wait(lambda: receiver.told == [None, (uid, 1)])
    cluster.before.append(_away := _Away())
    cluster.close_streams()
    cluster.delete(NODE_WEIGHT_CACHE, "node-1", uid=uid)
    second = cluster.apply(obj, manager="m")["metadata"]["uid"]
    cluster.compact()
    _away.over.set()
    receiver.wait(lambda: receiver.told == [None, (uid, 1), None, (second, 1)])
    receiver.watcher.stop()
    cluster.close_streams()
    receiver.thread.join(5)
    assert not receiver.thread.is_alive()


class _Away:
    """The server answers no list and no watch until it is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __call__(self, call: Any) -> None:
        if call.verb in {"list", "watch"} and not self.over.is_set():
            raise Unavailable("away")


def test_h2_half_open_stream_over_http() -> None:
    """Open and mute after a good start: broken off, listed again, and the missed change is told."""
    lists: list[int] = []

    def answer(asked: Asked) -> Answer:
        if "watch" in asked.query:
            return Answer(body=server.silence(events({"type": "BOOKMARK", "object": _cache(5)})))
        lists.append(len(lists))
        items = [_cache(5 + len(lists))]
        return Answer(body=json.dumps({"metadata": {"resourceVersion": "9"}, "items": items}).encode())

    with HttpServer(answer) as server:
        gateway = server.gateway(limits=Limits(connect=1, request=1, silence=0.2))
        receiver = Receiver(gateway)
        receiver.wait(lambda: len(receiver.told) >= 3)
        receiver.watcher.stop()
        gateway.close()
        receiver.thread.join(5)
        assert not receiver.thread.is_alive()
        assert len(lists) <= len(receiver.told) + 1


def test_stop_is_quick_over_http() -> None:
    """Closing the gateway ends a watch that waits."""

    def answer(asked: Asked) -> Answer:
        if "watch" in asked.query:
            return Answer(body=server.silence(events({"type": "BOOKMARK", "object": _cache(5)})))
        return Answer(body=b'{"metadata": {"resourceVersion": "9"}, "items": []}')

    with HttpServer(answer) as server:
        gateway = server.gateway()
        receiver = Receiver(gateway)
        receiver.wait(lambda: len(server.asked) == 2)
        began = time.monotonic()
        receiver.watcher.stop()
        gateway.close()
        receiver.thread.join(5)
        assert not receiver.thread.is_alive()
        assert time.monotonic() - began < 5
