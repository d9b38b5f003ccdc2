"""The gateway to a real API server: the only importer of the Kubernetes client besides `connection`.

Every call has a time limit, also while its answer trickles in, and a watch that is silent for too long is broken
off. Nothing is retried here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import urllib3
from kubernetes.client import ApiClient, ApiException, Configuration
from urllib3.exceptions import HTTPError

from dlo_kube.errors import Invalid, KubeError, NotFound, Unavailable
from dlo_kube.gateway import Listing, Object, Served, WatchEvent
from dlo_kube.kinds import Kind, kind_of
from dlo_kube.responses import failure, failure_event, names_an_object

Query = list[tuple[str, str]]

_PAGE: Final = 500
_JSON: Final = "application/json"
#: Served for every kind; of each object the server then sends its metadata alone.
_HEADS: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_APPLY: Final = "application/apply-patch+yaml"
_EVENTS: Final = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})
_IDENTITY: Final = ("name", "namespace", "uid", "resourceVersion")


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds: to connect, for a whole request, and for silence in a watch.

    A quiet watch on a living server can be as silent as it is long (bookmarks are not to be counted on), so watches
    are to be asked for less than `silence`.
    """

    connect: float = 10.0
    request: float = 30.0
    silence: float = 70.0


class ClusterGateway:
    """Implements `Gateway`. Make one a process and share it between threads.

    Args:
        configuration: from `dlo_kube.connection`.
        limits: time limits.
        observe: told of every finished call; must not raise.
        user_agent: what the server's audit log calls this process.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        limits: Limits = Limits(),
        observe: Callable[[Served], None] | None = None,
        user_agent: str = "dlo",
    ) -> None:
        self._client = ApiClient(configuration)
        self._client.user_agent = user_agent
        self._limits = limits
        self._observe = observe
        self._streams: set[urllib3.BaseHTTPResponse] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends running watches and closes all connections."""
        with self._lock:
            streams = tuple(self._streams)
        for stream in streams:
            # Already closed by its own thread, or never upgraded to a socket that can be shut down.
            with suppress(RuntimeError, ValueError, OSError, HTTPError):
                stream.shutdown()
        self._client.close()  # type: ignore[no-untyped-call]

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """See Gateway.get."""
        try:
            return self._object("get", kind, self._path(kind, namespace, name), name)
        except _Absent:
            return None

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Listing:
        """See Gateway.list."""
        pages = tuple(self._pages(kind, namespace, _selectors(labels, fields)))
        return Listing(tuple(item for page in pages for item in page.items), pages[-1].resource_version)

    def pages(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
    ) -> Iterator[Listing]:
        """See Gateway.pages."""
        return self._pages(kind, namespace, _selectors(labels, None))

    def heads(self, kind: Kind, namespace: str | None = None) -> Listing:
        """See Gateway.heads."""
        pages = tuple(self._pages(kind, namespace, [], accept=_HEADS))
        return Listing(tuple(item for page in pages for item in page.items), pages[-1].resource_version)

    def _pages(
        self, kind: Kind, namespace: str | None, selectors: Query, accept: str = _JSON
    ) -> Iterator[Listing]:
        path, page = self._path(kind, namespace), Query()
        while True:
            query = [("limit", str(_PAGE)), *selectors, *page]
            answer = self._object("list", kind, path, "", query=query, accept=accept)
            meta = answer.get("metadata", {})
            yield Listing(
                tuple(
                    {**item, "apiVersion": kind.api_version, "kind": kind.kind}
                    for item in answer.get("items") or ()
                ),
                meta.get("resourceVersion", ""),
            )
            if not meta.get("continue"):
                return
            page = [("continue", meta["continue"])]

    def apply(self, obj: Object, *, manager: str, force: bool = True, dry_run: bool = False) -> Object:
        """See Gateway.apply."""
        return self._apply("apply", obj, "", manager, force, dry_run)

    def apply_status(self, obj: Object, *, manager: str, force: bool = True) -> Object:
        """See Gateway.apply_status."""
        meta = {name: value for name, value in obj["metadata"].items() if name in _IDENTITY}
        body = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": meta}
        if "status" in obj:
            body["status"] = obj["status"]
        return self._apply("apply_status", body, "/status", manager, force, dry_run=False)

    def create(self, obj: Object) -> Object:
        """See Gateway.create."""
        kind = kind_of(obj)
        meta = obj.get("metadata", {})
        path = self._path(kind, _namespace(kind, obj))
        return self._object("create", kind, path, meta.get("name", ""), method="POST", body=obj)

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
        preconditions = {"uid": uid}
        if resource_version is not None:
            preconditions["resourceVersion"] = resource_version
        body = {"propagationPolicy": "Background", "preconditions": preconditions}
        path = self._path(kind, namespace, name)
        try:
            self._object("delete", kind, path, name, method="DELETE", body=body)
        except _Absent:
            return False
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
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(max(1, round(timeout_seconds)))),
            *_selectors(None, fields),
        ]
        what = f"watch {kind.plural}"
        path = self._path(kind, namespace)
        with self._measured("watch", kind):
            raw = self._send("GET", path, query, None, None, what, silence=self._limits.silence)
        with self._lock:
            self._streams.add(raw)
        try:
            for line in _lines(raw, what):
                yield _event(line, kind, what)
        finally:
            with self._lock:
                self._streams.discard(raw)
            raw.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _apply(
        self, verb: str, obj: Object, subresource: str, manager: str, force: bool, dry_run: bool
    ) -> Object:
        kind = kind_of(obj)
        name = obj.get("metadata", {}).get("name", "")
        query = [("fieldManager", manager), ("force", "true" if force else "false")]
        if dry_run:
            query.append(("dryRun", "All"))
        path = self._path(kind, _namespace(kind, obj), name) + subresource
        return self._object(verb, kind, path, name, method="PATCH", query=query, body=obj, content=_APPLY)

    @staticmethod
    def _path(kind: Kind, namespace: str | None, name: str | None = None) -> str:
        if name is not None and kind.namespaced and not namespace:
            raise Invalid(f"{kind.kind} {name!r}: a namespace is needed", hint="set metadata.namespace")
        for part in (namespace, name):
            # The server allows none of these; in a URL they would name something else.
            if part is not None and (part in {"", ".", ".."} or "/" in part or "%" in part):
                raise Invalid(
                    f"{kind.kind}: {part!r} is not a name", hint="give a name that the server takes"
                )
        return kind.path(namespace and quote(namespace, safe=""), name and quote(name, safe=""))

    def _object(
        self,
        verb: str,
        kind: Kind,
        path: str,
        name: str,
        *,
        method: str = "GET",
        query: Query | None = None,
        body: Object | None = None,
        content: str = _JSON,
        accept: str = _JSON,
    ) -> Object:
        """One call that answers with a JSON object."""
        what = f"{verb} {kind.plural} {name}".rstrip()
        with self._measured(verb, kind):
            raw = self._send(method, path, query or [], body, content, what, accept=accept)
            return _json(_read(raw, time.monotonic() + self._limits.request, what), what)

    def _send(
        self,
        method: str,
        path: str,
        query: Query,
        body: Object | None,
        content: str | None,
        what: str,
        silence: float | None = None,
        accept: str = _JSON,
    ) -> urllib3.BaseHTTPResponse:
        """The answer's head has come and says that it went well.

        Raises:
            KubeError: anything else.
        """
        headers = {"Accept": accept}
        if body is not None and content is not None:
            headers["Content-Type"] = content
        limits = (self._limits.connect, silence if silence is not None else self._limits.request)
        try:
            request = self._client.param_serialize(
                method,
                path,
                query_params=query,
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            raw: urllib3.BaseHTTPResponse = self._client.call_api(*request, _request_timeout=limits).response
        except (HTTPError, ApiException, OSError) as error:
            raise _unreachable(what, error) from error
        if 200 <= raw.status <= 299:
            return raw
        text = _read(raw, time.monotonic() + self._limits.request, what)
        if raw.status == 404 and method in {"GET", "DELETE"} and names_an_object(text):
            raise _Absent(what)
        raise failure(raw.status, text, what, raw.headers)

    def _measured(self, verb: str, kind: Kind) -> _Measured:
        return _Measured(self._observe, verb, kind.plural)


class _Absent(NotFound):
    """The object itself is not there."""


class _Measured:
    """Tells the observer how a call ended."""

    def __init__(self, observe: Callable[[Served], None] | None, verb: str, resource: str) -> None:
        self.observe, self.verb, self.resource = observe, verb, resource

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.observe is not None:
            code = "ok" if error is None else error.code if isinstance(error, KubeError) else "Unexpected"
            self.observe(Served(self.verb, self.resource, code, time.monotonic() - self.start))


def _namespace(kind: Kind, obj: Object) -> str | None:
    namespace = obj.get("metadata", {}).get("namespace")
    if kind.namespaced and not namespace:
        raise Invalid(f"{kind.kind}: a namespace is needed", hint="set metadata.namespace")
    return namespace if kind.namespaced else None


def _selectors(labels: Mapping[str, str] | None, fields: Mapping[str, str] | None) -> Query:
    query = []
    if labels:
        query.append(("labelSelector", ",".join(f"{name}={value}" for name, value in labels.items())))
    if fields:
        query.append(("fieldSelector", ",".join(f"{name}={value}" for name, value in fields.items())))
    return query


def _unreachable(what: str, error: Exception) -> Unavailable:
    cause = getattr(error, "reason", None) or error
    return Unavailable(
        f"{what}: the API server gave no answer: {cause}", hint="check the network and its address"
    )


def _read(raw: urllib3.BaseHTTPResponse, deadline: float, what: str) -> bytes:
    """The whole body, within time; the connection goes back to the pool."""
    parts: list[bytes] = []
    try:
        for part in raw.stream(65_536):
            parts.append(part)
            if time.monotonic() > deadline:
                raise Unavailable(f"{what}: the answer took too long")
    except (HTTPError, OSError) as error:
        raw.close()
        raise Unavailable(f"{what}: the answer broke off: {error}") from error
    except Unavailable:
        raw.close()
        raise
    raw.release_conn()
    return b"".join(parts)


def _lines(raw: urllib3.BaseHTTPResponse, what: str) -> Iterator[bytes]:
    """The lines of a watch as they come."""
    rest = b""
    try:
        for part in raw.stream(65_536):
            *lines, rest = (rest + part).split(b"\n")
            yield from (line for line in lines if line.strip())
    except (HTTPError, OSError) as error:
        raise Unavailable(f"{what}: the stream broke off: {error}") from error
    if rest.strip():
        raise Unavailable(f"{what}: the stream ended within an event")


def _event(line: bytes, kind: Kind, what: str) -> WatchEvent:
    value = _json(line, what)
    obj = value.get("object") or {}
    if value.get("type") == "ERROR":
        raise failure_event(obj, what)
    if value.get("type") not in _EVENTS:
        raise Unavailable(f"{what}: an event of type {value.get('type')!r}")
    return WatchEvent(value["type"], {**obj, "apiVersion": kind.api_version, "kind": kind.kind})


def _json(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Unavailable(f"{what}: the answer is not JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise Unavailable(f"{what}: the answer is not an object: {text[:80]!r}")
    return value
