"""Keeps a local view of some objects and tells when it has changed: list, watch, list again.

A watch can die silently, skip, or lose a deletion. So the view is compared with a full list at every start, after
every error and at least every `resync_seconds`: what the list does not have is gone. A receiver takes a call as
"something has changed: look at everything", never as the change itself, and reads live before it destroys.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from dlo_kube.errors import KubeError, Unavailable
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import Kind

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
# A quiet kind may get no bookmark for minutes, so it is the end in order of a stream that shows life: asked for
# well within the gateway's limit of silence.
_STREAM_SECONDS: Final = 50.0

Key = tuple[str, str]  # namespace, name


class Watcher:
    """One list-and-watch loop.

    `run` belongs in a thread of its own. The loop survives every `KubeError`; any other exception ends it, is
    raised by `run`, and shows in `age`, which then only grows.

    Args:
        gateway: the API server.
        kind: what is watched.
        fields: field selector, e.g. `{"metadata.name": "node-1"}`; None for all.
        on_change: given the object as it is now, or None when it is gone. Called from the loop's thread, also once
            for every object found first, and once with None when a first list finds nothing.
        namespace: one namespace; None for all.
        resync_seconds: longest time between two full lists (shortened by up to a fifth at random).
        on_error: told of every failure and of the pause in seconds that follows.
        clock: monotonic seconds.
        pause: waits that many seconds or until `stop`; for tests.
        jitter: a number from 0 up to 1.
    """

    def __init__(
        self,
        gateway: Gateway,
        kind: Kind,
        fields: Mapping[str, str] | None,
        on_change: Callable[[Object | None], None],
        *,
        namespace: str | None = None,
        resync_seconds: float = 300.0,
        on_error: Callable[[KubeError, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._gateway = gateway
        self._kind = kind
        self._fields = fields
        self._namespace = namespace
        self._on_change = on_change
        self._resync_seconds = resync_seconds
        self._on_error = on_error
        self._clock = clock
        self._stopped = threading.Event()
        self._pause = pause if pause is not None else self._stopped.wait
        self._jitter = jitter
        self._lock = threading.Lock()
        self._objects: dict[Key, Object] = {}
        self._synced = False
        self._heard = clock()
        self._failures = 0

    @property
    def synced(self) -> bool:
        """Whether a first full list has come in."""
        return self._synced

    def age(self) -> float:
        """Seconds since the server was last heard: a list, an event, a bookmark, or a watch that ended in order."""
        return self._clock() - self._heard

    def objects(self) -> tuple[Object, ...]:
        """The view: a hint for when to look, not a ground for deleting anything."""
        with self._lock:
            return tuple(self._objects.values())

    def stop(self) -> None:
        """Ends the loop at its next step; closing the gateway ends a watch that is waiting."""
        self._stopped.set()

    def run(self) -> None:
        """The loop, until `stop`."""
        while not self._stopped.is_set():
            try:
                version = self._list()
                self._follow(version)
            except KubeError as error:
                self._failed(error)

    def _list(self) -> str:
        """Takes a full list as the view, and tells of every difference."""
        listing = self._gateway.list(self._kind, self._namespace, fields=self._fields)
        self._hear()
        first = not self._synced
        found = {_key(obj): obj for obj in listing.items}
        with self._lock:
            known = self._objects
            self._objects = found
        self._synced = True
        gone = [obj for key, obj in known.items() if key not in found or _uid(found[key]) != _uid(obj)]
        changed = [obj for key, obj in found.items() if _version(known.get(key)) != _version(obj)]
        for _ in gone:
            self._on_change(None)
        for obj in changed:
            self._on_change(obj)
        if first and not changed:
            self._on_change(None)
        return listing.resource_version

    def _follow(self, version: str) -> None:
        """Watches from `version` on, one stream after another, until it is time to list again."""
        end = self._clock() + self._resync_seconds * (1 - self._jitter() / 5)
        while not self._stopped.is_set() and (left := end - self._clock()) > 0:
            began = self._clock()
            try:
                version = self._stream(version, min(left, _STREAM_SECONDS), end)
            except KubeError:
                if self._clock() - began > _LONGEST_PAUSE:
                    self._failures = 0
                raise
            if self._clock() - began >= _FIRST_PAUSE:
                self._failures = 0
            elif self._clock() < end and not self._stopped.is_set():
                # A server that closes every stream at once is not to be asked in a tight loop.
                self._failed(Unavailable(f"watch {self._kind.plural}: the stream ended at once"))

    def _stream(self, version: str, seconds: float, end: float) -> str:
        """Takes the events of one stream; returns the version that it has come to."""
        for event in self._gateway.watch(
            self._kind,
            namespace=self._namespace,
            fields=self._fields,
            resource_version=version,
            timeout_seconds=seconds,
        ):
            self._hear()
            self._failures = 0
            version = event.obj["metadata"]["resourceVersion"]
            if event.type != "BOOKMARK":
                self._take(event.type == "DELETED", event.obj)
            if self._stopped.is_set() or self._clock() >= end:
                break
        self._hear()
        return version

    def _take(self, deleted: bool, obj: Object) -> None:
        key = _key(obj)
        with self._lock:
            known = self._objects.get(key)
            if deleted:
                self._objects.pop(key, None)
            else:
                self._objects[key] = obj
        if deleted:
            if known is not None:
                self._on_change(None)
            return
        if known is not None and _uid(known) != _uid(obj):
            self._on_change(None)
        if _version(known) != _version(obj):
            self._on_change(obj)

    def _hear(self) -> None:
        self._heard = self._clock()

    def _failed(self, error: KubeError) -> None:
        """Waits before the next try: longer after each failure in a row, at random, as long as the server asks."""
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failures, 16))
        self._failures += 1
        seconds = longest * (0.5 + self._jitter() / 2)
        if isinstance(error, Unavailable) and error.retry_after is not None:
            seconds = max(seconds, error.retry_after)
        if self._on_error is not None:
            self._on_error(error, seconds)
        self._pause(seconds)


def _key(obj: Object) -> Key:
    meta = obj["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _uid(obj: Object) -> str:
    return str(obj["metadata"]["uid"])


def _version(obj: Object | None) -> str | None:
    return None if obj is None else str(obj["metadata"]["resourceVersion"])
