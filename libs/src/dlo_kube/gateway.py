"""What operator and agent can ask of the API server: a protocol, so that tests can run without one.

Objects are plain dicts as in JSON and always carry `apiVersion` and `kind`. Calls block for a bounded time and
may come from any thread. A returned object is the caller's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from dlo_kube.kinds import Kind

Object = dict[str, Any]
EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class Listing(NamedTuple):
    """Objects of a kind, as of one version of the whole collection; a watch goes on from there."""

    items: tuple[Object, ...]
    resource_version: str


class WatchEvent(NamedTuple):
    """One change. DELETED carries the last state; BOOKMARK only `metadata.resourceVersion`."""

    type: EventType
    obj: Object


class Served(NamedTuple):
    """One finished call, for metrics: verb, plural of the kind, `ok` or the error's code, seconds taken."""

    verb: str
    resource: str
    code: str
    seconds: float


class Gateway(Protocol):
    """The API server. Every method may raise `Denied` and `Unavailable`, and `NotFound` for a kind that is not
    served.
    """

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """The object as it is now, or None when there is none."""

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Listing:
        """All objects of a kind, of one namespace or of all, that have these labels and field values.

        Raises:
            Expired: the listing took longer than the server keeps versions.
        """

    def pages(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
    ) -> Iterator[Listing]:
        """As `list`, in parts, so that they need not all be held at once; each with the listing's version."""

    def heads(self, kind: Kind, namespace: str | None = None) -> Listing:
        """As `list`, of each object `apiVersion`, `kind` and `metadata` alone."""

    def apply(self, obj: Object, *, manager: str, force: bool = True, dry_run: bool = False) -> Object:
        """Server-side apply of everything but status: `manager` owns exactly the fields given.

        A field that this manager owned and that is not given any more goes, unless somebody else owns it
        too. The object is created when it does not exist; with `metadata.uid` or `metadata.resourceVersion`
        given, only that object is changed.

        Args:
            obj: the fields that the manager means.
            manager: stable name of the writer.
            force: take fields over from other managers.
            dry_run: judge and default it, store nothing.

        Raises:
            Conflict: without force, another manager has another value; or a uid or version does not match.
            Invalid: the server refuses the object.
        """

    def apply_status(self, obj: Object, *, manager: str, force: bool = True) -> Object:
        """Server-side apply of `status` alone; anything else in `obj` but its identity is ignored.

        Raises:
            NotFound: there is no such object.
            Conflict, Invalid: as in `apply`.
        """

    def create(self, obj: Object) -> Object:
        """Stores a new object.

        Raises:
            Conflict: the name is taken (code `AlreadyExists`).
            Invalid: the server refuses the object.
        """

    def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str,
        resource_version: str | None = None,
    ) -> bool:
        """Deletes the object that was meant and no other; False when it was gone already.

        Raises:
            Conflict: an object of that name is there with another uid or resource version.
        """

    def watch(
        self,
        kind: Kind,
        *,
        namespace: str | None = None,
        fields: Mapping[str, str] | None = None,
        resource_version: str,
        timeout_seconds: float,
    ) -> Iterator[WatchEvent]:
        """Changes after `resource_version`; ends by itself after about `timeout_seconds`, or earlier.

        Raises:
            Expired: the version is too old, said at once or in mid-stream: list again.
            Unavailable: the stream broke, or was silent for too long.
        """
