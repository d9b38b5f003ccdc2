"""A checkpoint that lies in a store on the network: what is in it, and a stream of bytes that survives a hitch.

A store is asked for one version of everything (a commit, an ETag), so that no two answers are of different
states. Must not know where bytes go.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from dlo_cache.progress import Cancel, check_cancel

from dlo_sources.bounds import LEAST_BYTES_PER_SECOND, Pace
from dlo_sources.errors import SourceInvalid, SourceUnreachable

CHUNK_BYTES: Final = 1 << 20
CONNECT_SECONDS: Final = 10.0
READ_SECONDS: Final = 30.0
MOST_OBJECTS: Final = 10_000
_MOST_BYTES: Final = 1 << 50
_POLL_SECONDS: Final = 0.1
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class RemoteObject(NamedTuple):
    """One file of a checkpoint. ``tag`` names exactly these bytes of this store, wherever it is kept;
    ``sha256`` is what the store states, None where it states nothing."""

    name: str
    size: int
    sha256: str | None
    tag: str


def checked(found: RemoteObject, what: str) -> RemoteObject:
    """The same object, if all of it is of the kind that it must be: a server says anything, and a digest is the
    name of a file here. Raises SourceInvalid."""
    name, size, sha256 = found.name, found.size, found.sha256
    if not isinstance(name, str) or not name:
        wrong = "a file without a name"
    elif type(size) is not int or not 0 <= size <= _MOST_BYTES:
        wrong = f"no usable size of {name[:200]!r}"
    elif sha256 is not None and (not isinstance(sha256, str) or not _SHA256.fullmatch(sha256)):
        wrong = f"a sha256 of {name[:200]!r} that is none"
    else:
        return found
    raise SourceInvalid(f"{what}: the store states {wrong}", hint="check the endpoint's address")


class Store(Protocol):
    """A checkpoint in a store, of one version."""

    @property
    def name(self) -> str:
        """What to call it in messages: no credential, no signed URL."""
        ...

    @property
    def revision(self) -> str:
        """The commit, or "" where the store has none for the whole checkpoint."""
        ...

    @property
    def objects(self) -> Mapping[str, RemoteObject]:
        """All files by name."""
        ...

    def stream(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from ``start`` up to ``stop``, in pieces.

        Raises SourceUnauthorized, SourceNotFound, SourceUnreachable, SourceUntrusted, SourceChanged or
        SourceInvalid, and no error of a client library.
        """
        ...


@dataclass(frozen=True)
class Patience:
    """How often a broken stream is taken up again without a byte of progress, and the first pause; each
    further pause is twice as long."""

    attempts: int = 5
    pause_seconds: float = 1.0


PATIENCE: Final = Patience()


def read_stream(
    store: Store, found: RemoteObject, start: int, stop: int, *, patience: Patience, cancel: Cancel | None
) -> Iterator[bytes]:
    """Exactly the bytes from ``start`` up to ``stop``; a stream that breaks off is taken up where it ended.

    Raises the errors of ``Store.stream``: SourceUnreachable once patience is at an end; Cancelled.
    """
    at, failures, pace = start, 0, Pace()
    while at < stop:
        check_cancel(cancel, f"fetching {found.name}")
        before = at
        try:
            for chunk in pace.timed(store.stream(found, at, stop)):
                at += len(chunk)
                if at > stop:
                    raise SourceInvalid(
                        f"{store.name}: {found.name} is longer than the {found.size} bytes stated",
                        hint="the store or a proxy before it does not keep to ranges",
                        file=found.name,
                    )
                yield chunk
                check_cancel(cancel, f"fetching {found.name}")
                if at < stop and pace.is_too_slow():
                    failures = patience.attempts  # what came stays; others get their turn
                    raise SourceUnreachable(
                        f"{store.name}: {found.name} comes too slowly: less than {LEAST_BYTES_PER_SECOND} bytes"
                        f" a second, {at} of {found.size} bytes so far",
                        hint="check the network; it goes on from there when it is tried again",
                        file=found.name,
                    )
            if at < stop:
                raise SourceUnreachable(
                    f"{store.name}: {found.name} broke off after {at} of {found.size} bytes",
                    hint="it is tried again",
                    file=found.name,
                )
        except SourceUnreachable:
            if failures < patience.attempts:
                failures = 1 if at > before else failures + 1
            if failures >= patience.attempts:
                raise
            seconds = patience.pause_seconds * 2.0 ** (failures - 1)
            _pause(seconds, cancel, found.name)
            pace.rested(seconds)


def _pause(seconds: float, cancel: Cancel | None, name: str) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        check_cancel(cancel, f"fetching {name}")
        time.sleep(min(left, _POLL_SECONDS))
