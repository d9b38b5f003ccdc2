"""An API server in memory: a `Gateway` with uids, versions, generations, ownership of fields and watches.

What it leaves out: validation, defaulting and pruning (those are tested on the real server), access rights, and
every controller. Garbage collection happens when `collect` is called; `edit` does what a kubelet or a user does.
`tests/contract/gateway.py` holds its behaviour against the real server's.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dlo_kube.errors import Conflict, Expired, Invalid, KubeError, NotFound
from dlo_kube.gateway import EventType, Listing, Object, WatchEvent
from dlo_kube.kinds import Kind, kind_of
from fakes.kube_apply import Fields, Path, at, without

Key = tuple[str, str, str]  # kind, namespace, name
_IDENTITY = frozenset({"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp"})
_NO_STATUS_SUBRESOURCE = frozenset({"Secret", "Lease", "Event"})
_NO_GENERATION = frozenset({"Secret", "Lease", "Event", "Node", "Namespace", "Service"})
EDITOR = "edit"


class Call(NamedTuple):
    """One call that reached the server."""

    verb: str
    kind: str
    name: str
    namespace: str


Hook = Callable[[Call], None]


class FakeCluster:
    """The server and its store.

    Attributes:
        writes: number of write calls by (verb, kind), dry runs and calls that changed nothing included.
        calls: every call, in order.
        before, after: hooks that see each call before and after it takes effect; they may raise.
    """

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self.writes: Counter[tuple[str, str]] = Counter()
        self.calls: list[Call] = []
        self.before: list[Hook] = []
        self.after: list[Hook] = []
        self._now = now
        self._lock = threading.Condition(threading.RLock())
        self._objects: dict[Key, Object] = {}
        self._owners: dict[Key, dict[str, frozenset[Path]]] = {}
        self._log: list[tuple[int, Key, EventType, Object]] = []
        self._version = 100
        self._oldest = 100
        self._uids = 0
        self._generation_of_streams = 0

    # -- what a Gateway does ---------------------------------------------------------------------------------

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """See Gateway.get."""
        with self._call("get", kind, name, namespace):
            return copy.deepcopy(self._objects.get(_key(kind, name, namespace)))

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Listing:
        """See Gateway.list."""
        with self._call("list", kind, "", namespace):
            found = [
                copy.deepcopy(obj)
                for key, obj in sorted(self._objects.items())
                if key[0] == kind.kind
                and namespace in (None, key[1])
                and _has_labels(obj, labels)
                and _has_fields(obj, fields)
            ]
            return Listing(tuple(found), str(self._version))

    def pages(
        self, kind: Kind, namespace: str | None = None, *, labels: Mapping[str, str] | None = None
    ) -> Iterator[Listing]:
        """See Gateway.pages; two objects a page."""
        items, version = self.list(kind, namespace, labels=labels)
        for start in range(0, max(1, len(items)), 2):
            yield Listing(items[start : start + 2], version)

    def heads(self, kind: Kind, namespace: str | None = None) -> Listing:
        """See Gateway.heads."""
        items, version = self.list(kind, namespace)
        return Listing(
            tuple({n: obj[n] for n in ("apiVersion", "kind", "metadata")} for obj in items), version
        )

    def create(self, obj: Object) -> Object:
        """See Gateway.create."""
        kind, key = _identify(obj)
        with self._call("create", kind, key[2], key[1], write=True):
            if key in self._objects:
                raise Conflict(f"{kind.plural} {key[2]!r} already exists", code="AlreadyExists")
            stored = self._new(kind, key, obj)
            self._owners[key] = {EDITOR: frozenset(_owned(kind, obj, status=False))}
            return self._store(key, stored, "ADDED")

    def apply(self, obj: Object, *, manager: str, force: bool = True, dry_run: bool = False) -> Object:
        """See Gateway.apply."""
        kind, key = _identify(obj)
        with self._call("apply", kind, key[2], key[1], write=True):
            live = self._objects.get(key)
            _check_identity(obj, live)
            owned = frozenset(_owned(kind, obj, status=False))
            if live is None:
                stored = self._new(kind, key, obj)
                if not dry_run:
                    self._owners[key] = {manager: owned}
                    self._store(key, stored, "ADDED")
                return copy.deepcopy(stored)
            body = {name: value for name, value in obj.items() if name != "status" or not _has_status(kind)}
            merged, owners = self._merged(kind, key, live, body, owned, manager, force)
            if dry_run:
                return merged
            return self._replace(kind, key, merged, owners)

    def apply_status(self, obj: Object, *, manager: str, force: bool = True) -> Object:
        """See Gateway.apply_status."""
        kind, key = _identify(obj)
        with self._call("apply_status", kind, key[2], key[1], write=True):
            live = self._objects.get(key)
            if live is None or not _has_status(kind):
                raise NotFound(f"{kind.plural} {key[2]!r} not found")
            _check_identity(obj, live)
            owned = frozenset(_owned(kind, obj, status=True))
            body = {"status": obj["status"]} if "status" in obj else {}
            merged, owners = self._merged(kind, key, live, body, owned, f"{manager}/status", force)
            return self._replace(kind, key, merged, owners)

    def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str,
        resource_version: str | None = None,
    ) -> bool:
        """See Gateway.delete."""
        key = _key(kind, name, namespace)
        with self._call("delete", kind, name, namespace, write=True):
            live = self._objects.get(key)
            if live is None:
                return False
            meta = live["metadata"]
            if meta["uid"] != uid or resource_version not in (None, meta["resourceVersion"]):
                raise Conflict(f"{kind.plural} {name!r}: the precondition does not hold")
            self._remove(key)
            return True

    def watch(
        self,
        kind: Kind,
        *,
        namespace: str | None = None,
        fields: Mapping[str, str] | None = None,
        resource_version: str,
        timeout_seconds: float,
    ) -> Iterator[WatchEvent]:
        """See Gateway.watch."""
        with self._call("watch", kind, "", namespace):
            if int(resource_version) < self._oldest:
                raise Expired(f"too old resource version: {resource_version}")
            stream = self._generation_of_streams
        return self._stream(kind, namespace, fields, int(resource_version), timeout_seconds, stream)

    # -- what happens to a cluster beside it -----------------------------------------------------------------

    def edit(
        self, kind: Kind, name: str, change: Callable[[Object], None], namespace: str | None = None
    ) -> Object:
        """Somebody else changes an object in place: a kubelet its status, a user a label, a spec or a finalizer."""
        key = _key(kind, name, namespace)
        with self._lock:
            changed = copy.deepcopy(self._objects[key])
            change(changed)
            return self._replace(kind, key, changed, self._owners[key])

    def put(self, obj: Object) -> Object:
        """An object appears whole, status included, as when a cluster already has it."""
        kind, key = _identify(obj)
        with self._lock:
            stored = self._new(kind, key, obj)
            if "status" in obj:
                stored["status"] = copy.deepcopy(obj["status"])
            self._owners[key] = {EDITOR: frozenset(_owned(kind, obj, status=False))}
            return self._store(key, stored, "ADDED")

    def remove(self, kind: Kind, name: str, namespace: str | None = None) -> None:
        """Somebody deletes an object, without preconditions."""
        with self._lock:
            self._remove(_key(kind, name, namespace))

    def collect(self) -> int:
        """The garbage collector: deletes what has owners of which none exists; returns how many went."""
        gone = 0
        with self._lock:
            while True:
                uids = {obj["metadata"]["uid"] for obj in self._objects.values()}
                orphans = [
                    key
                    for key, obj in self._objects.items()
                    if (owners := obj["metadata"].get("ownerReferences"))
                    and not any(owner["uid"] in uids for owner in owners)
                ]
                if not orphans:
                    return gone
                for key in orphans:
                    self._remove(key, finalizers=False)
                gone += len(orphans)

    def compact(self) -> None:
        """Forgets history: a watch from before now gets Expired, running ones too."""
        with self._lock:
            self._version += 1
            self._oldest = self._version
            self._log.clear()
            self._lock.notify_all()

    def close_streams(self) -> None:
        """Ends every running watch, as a server does that is going down."""
        with self._lock:
            self._generation_of_streams += 1
            self._lock.notify_all()

    def fail(self, number: int, error: KubeError, *, after: bool = False) -> None:
        """The `number`-th write call from now on (counted from 1) raises `error`: before it takes effect, or after."""
        left = [number]

        def hook(call: Call) -> None:
            if call.verb in {"create", "apply", "apply_status", "delete"}:
                left[0] -= 1
                if left[0] == 0:
                    raise error

        (self.after if after else self.before).append(hook)

    def objects(self, kind: Kind) -> tuple[Object, ...]:
        """All objects of a kind, without a call being counted."""
        with self._lock:
            return tuple(copy.deepcopy(o) for key, o in sorted(self._objects.items()) if key[0] == kind.kind)

    # -- inside ----------------------------------------------------------------------------------------------

    def _call(
        self, verb: str, kind: Kind, name: str, namespace: str | None, *, write: bool = False
    ) -> _Served:
        return _Served(self, Call(verb, kind.kind, name, namespace or ""), write)

    def _new(self, kind: Kind, key: Key, obj: Object) -> Object:
        stored = copy.deepcopy(obj)
        if _has_status(kind):
            stored.pop("status", None)
        self._uids += 1
        meta = stored["metadata"]
        for name in ("resourceVersion", "managedFields"):
            meta.pop(name, None)
        meta["uid"] = f"00000000-0000-4000-8000-{self._uids:012x}"
        meta["creationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._now()))
        if kind.kind not in _NO_GENERATION:
            meta["generation"] = 1
        if kind.namespaced:
            meta["namespace"] = key[1]
        return stored

    def _merged(
        self,
        kind: Kind,
        key: Key,
        live: Object,
        body: Object,
        owned: frozenset[Path],
        manager: str,
        force: bool,
    ) -> tuple[Object, dict[str, frozenset[Path]]]:
        """The object and the owners after an apply."""
        fields = Fields(kind.kind)
        owners = dict(self._owners[key])
        before = owners.pop(manager, frozenset())
        taken = {path for path in owned if at(live, path) not in (None, at(body, path))}
        for other, theirs in owners.items():
            lost = theirs & taken
            if lost and not force:
                what = ", ".join(sorted(str(path) for path in lost))
                raise Conflict(f"{kind.plural} {key[2]!r}: {other} owns {what}")
            owners[other] = theirs - lost
        body = copy.deepcopy(body)
        meta = body.pop("metadata", {})
        kept = {name: value for name, value in meta.items() if name not in _IDENTITY}
        merged = fields.merge(live, {**body, **({"metadata": kept} if kept else {})})
        others = frozenset().union(*owners.values()) if owners else frozenset()
        # An item before its fields: without its key it could not be found.
        for path in sorted(before - owned - others, key=len):
            if not any(path == other[: len(path)] for other in owned | others):
                merged = without(merged, path)
        owners[manager] = owned
        return merged, {name: paths for name, paths in owners.items() if paths}

    def _replace(self, kind: Kind, key: Key, changed: Object, owners: dict[str, frozenset[Path]]) -> Object:
        live = self._objects[key]
        same_owners = owners == self._owners[key]
        self._owners[key] = owners
        if changed == live and same_owners:
            return copy.deepcopy(live)
        changed = copy.deepcopy(changed)
        if "deletionTimestamp" in live["metadata"] and not changed["metadata"].get("finalizers"):
            self._remove(key, finalizers=False)
            return changed
        if kind.kind not in _NO_GENERATION and _meant(changed) != _meant(live):
            changed["metadata"]["generation"] = live["metadata"]["generation"] + 1
        return self._store(key, changed, "MODIFIED")

    def _store(self, key: Key, obj: Object, event: EventType) -> Object:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = obj
        self._log.append((self._version, key, event, copy.deepcopy(obj)))
        self._lock.notify_all()
        return copy.deepcopy(obj)

    def _remove(self, key: Key, *, finalizers: bool = True) -> None:
        live = self._objects[key]
        if finalizers and live["metadata"].get("finalizers"):
            if "deletionTimestamp" not in live["metadata"]:
                marked = copy.deepcopy(live)
                marked["metadata"]["deletionTimestamp"] = live["metadata"]["creationTimestamp"]
                self._store(key, marked, "MODIFIED")
            return
        del self._objects[key]
        self._owners.pop(key, None)
        self._version += 1
        last = copy.deepcopy(live)
        last["metadata"]["resourceVersion"] = str(self._version)
        self._log.append((self._version, key, "DELETED", last))
        self._lock.notify_all()

    def _stream(
        self,
        kind: Kind,
        namespace: str | None,
        fields: Mapping[str, str] | None,
        version: int,
        timeout_seconds: float,
        stream: int,
    ) -> Iterator[WatchEvent]:
        end = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                if version < self._oldest:
                    raise Expired("The resourceVersion for the provided watch is too old.")
                news = [entry for entry in self._log if entry[0] > version]
                left = end - time.monotonic()
                if not news:
                    if stream != self._generation_of_streams or left <= 0:
                        return
                    self._lock.wait(left)
                    continue
            version = news[-1][0]
            for _, key, event, obj in news:
                if key[0] == kind.kind and namespace in (None, key[1]) and _has_fields(obj, fields):
                    yield WatchEvent(event, copy.deepcopy(obj))


class _Served:
    """One call under the server's lock, counted, with the hooks around it."""

    def __init__(self, cluster: FakeCluster, call: Call, write: bool) -> None:
        self.cluster, self.call, self.write = cluster, call, write

    def __enter__(self) -> None:
        self.cluster._lock.acquire()
        try:
            self.cluster.calls.append(self.call)
            if self.write:
                self.cluster.writes[self.call.verb, self.call.kind] += 1
            for hook in tuple(self.cluster.before):
                hook(self.call)
        except BaseException:
            self.cluster._lock.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for hook in tuple(self.cluster.after):
                    hook(self.call)
        finally:
            self.cluster._lock.release()


def _key(kind: Kind, name: str, namespace: str | None) -> Key:
    if kind.namespaced and not namespace:
        raise Invalid(f"{kind.kind} {name!r}: a namespace is needed")
    if name in {"", ".", ".."} or "/" in name:
        raise Invalid(f"{kind.kind}: {name!r} is not a name")
    return kind.kind, (namespace or "") if kind.namespaced else "", name


def _identify(obj: Object) -> tuple[Kind, Key]:
    kind = kind_of(obj)
    meta = obj.get("metadata", {})
    if not meta.get("name"):
        raise Invalid(f"{kind.kind}: metadata.name is needed")
    return kind, _key(kind, meta["name"], meta.get("namespace"))


def _check_identity(obj: Object, live: Object | None) -> None:
    meta = obj["metadata"]
    for name in ("uid", "resourceVersion"):
        if name in meta and (live is None or live["metadata"][name] != meta[name]):
            raise Conflict(f"{obj['kind']} {meta['name']!r}: {name} does not match")


def _owned(kind: Kind, obj: Object, *, status: bool) -> Iterator[Path]:
    """Paths that a write of `obj` owns: in the status, or in everything else."""
    fields = Fields(kind.kind)
    for name, value in obj.items():
        if name in {"apiVersion", "kind"} or (_has_status(kind) and (name == "status") != status):
            continue
        if name == "metadata":
            for part, item in value.items():
                if part not in _IDENTITY and part != "managedFields":
                    yield from fields.owned(item, (name, part), f".{name}.{part}")
        else:
            yield from fields.owned(value, (name,), f".{name}")


def _has_status(kind: Kind) -> bool:
    return kind.kind not in _NO_STATUS_SUBRESOURCE


def _meant(obj: Object) -> Object:
    """What counts for the generation."""
    return {name: value for name, value in obj.items() if name not in {"metadata", "status"}}


def _has_labels(obj: Object, labels: Mapping[str, str] | None) -> bool:
    has = obj["metadata"].get("labels", {})
    return all(has.get(name) == value for name, value in (labels or {}).items())


def _has_fields(obj: Object, fields: Mapping[str, str] | None) -> bool:
    for path, wanted in (fields or {}).items():
        value: Any = obj
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if (value or "") != wanted:
            return False
    return True
