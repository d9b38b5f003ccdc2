"""The files of a remote checkpoint as the builder reads them.

A look (a header, a configuration) is a short range read. Small files stay in memory. A large one is fetched
whole into the stage at the first read of the builder and hashed there; only then do its bytes count, and so
do those of the looks before. Where the disk has no room for that, ``Files`` entries read straight through:
their builder hashes every file itself.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from dlo_cache.progress import Cancel, Progress, report

from dlo_sources.errors import SourceChanged, SourceInvalid
from dlo_sources.remote import PATIENCE, Patience, RemoteObject, Store, read_stream
from dlo_sources.stage import Stage

SMALL_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 64 << 20
_LOOK_BYTES: Final = 256 << 20


class Fetcher:
    """What the files of one opened checkpoint share; closed when the work on it ends.

    ``expect`` tells how many bytes of each file will be read: then a fetched file goes after its last one.
    Without it, fetched files stay until ``close``.
    """

    def __init__(
        self,
        store: Store,
        stage: Stage,
        *,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
        patience: Patience = PATIENCE,
    ) -> None:
        self.store, self.stage, self.cancel = store, stage, cancel
        self.straight = False
        self._progress, self._patience = progress, patience
        self._lock = threading.Lock()
        self._kept = 0
        self._done = self._total = 0
        self._left: dict[str, int] = {}
        self.files = {name: RemoteFile(self, found) for name, found in store.objects.items()}

    def expect(self, nbytes: Mapping[str, int]) -> None:
        """Lets each of these files go once that many bytes of it were read."""
        self._left = dict(nbytes)

    def close(self, *, done: bool = False) -> None:
        """Closes all files; with ``done`` what was fetched goes, else it stays to be taken up."""
        for file in self.files.values():
            file.close(remove=done)

    def pull(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """The bytes of a range, taken up again after a hitch."""
        return read_stream(self.store, found, start, stop, patience=self._patience, cancel=self.cancel)

    def keeps(self, nbytes: int) -> bool:
        """Whether a small file may stay in memory; if so, it is counted."""
        with self._lock:
            if nbytes > SMALL_BYTES or self._kept + nbytes > _KEPT_BYTES:
                return False
            self._kept += nbytes
            return True

    def forget(self, nbytes: int) -> None:
        """A small file does not stay in memory after all."""
        with self._lock:
            self._kept -= nbytes

    def will_fetch(self, nbytes: int) -> None:
        """More bytes are to come."""
        with self._lock:
            self._total += nbytes

    def fetched(self, nbytes: int) -> None:
        """Some of them came."""
        with self._lock:
            self._done += nbytes
            done, total = self._done, self._total
        report(self._progress, "read", self.store.name, done, total)

    def was_read(self, name: str, nbytes: int) -> bool:
        """Whether that was the last that is expected of the file."""
        with self._lock:
            if name not in self._left:
                return False
            self._left[name] -= nbytes
            return self._left[name] <= 0


class RemoteFile:
    """A file of a store, as the builder wants it; see ``dlo_cache.source.SourceFile``."""

    def __init__(self, fetcher: Fetcher, found: RemoteObject) -> None:
        self._fetcher, self._found = fetcher, found
        self._sha256 = found.sha256
        self._lock = threading.RLock()
        self._data: bytes | None = None
        self._fd: int | None = None
        self._key = ""
        self._looks: dict[tuple[int, int], str] = {}

    @property
    def name(self) -> str:
        """Its path in the checkpoint."""
        return self._found.name

    @property
    def size(self) -> int:
        """Bytes of the file, as the store states them."""
        return self._found.size

    @property
    def sha256(self) -> str | None:
        """The digest, stated or computed; None as long as nobody has hashed it."""
        return self._sha256

    @property
    def tag(self) -> str:
        """What stands for exactly these bytes in the memory of digests."""
        return self._found.tag

    def with_sha256(self, sha256: str) -> RemoteFile:
        """The file, its digest known."""
        self._sha256 = sha256
        return self

    def read(self, offset: int, length: int) -> bytes:
        """A look: the bytes at ``offset``, fewer than ``length`` only at the end of the file."""
        length = max(0, min(length, self.size - offset))
        with self._lock:
            if self._data is None and self._fd is None and not self._load():
                if length > _LOOK_BYTES:
                    raise SourceInvalid(
                        f"{self.name}: {length} bytes are too many for a header", file=self.name
                    )
                seen = b"".join(self._fetcher.pull(self._found, offset, offset + length))
                self._looks[offset, length] = hashlib.sha256(seen).hexdigest()
                return seen
            buffer = bytearray(length)
            return bytes(buffer[: self._copy(memoryview(buffer), offset)])

    def readinto(self, buffer: memoryview | bytearray, offset: int) -> int:
        """Fills ``buffer`` from ``offset`` with bytes whose digest is right; fetches the file if need be."""
        view = memoryview(buffer).cast("B")[: max(0, self.size - offset)]
        with self._lock:
            if self._data is None and self._fd is None and not self._load():
                if self._fetcher.straight:
                    return self._straight(view, offset)
                self._hold()
        count = self._copy(view, offset)
        if self._fetcher.was_read(self.name, count):
            self.close(remove=True)
        return count

    def digest(self, advance: Callable[[int], None]) -> str:
        """The sha256 of all bytes: of those fetched to memory or, where there is room, to the stage; else of
        a stream that nobody keeps."""
        with self._lock:
            if self._data is not None or self._load():
                advance(self.size)
                return hashlib.sha256(self._data or b"").hexdigest()
            if not self._fetcher.straight:
                self._hold(advance)
                assert self._sha256 is not None  # noqa: S101 - _hold has set it
                self.close()  # a checkpoint may have more files than a process may have open
                return self._sha256
        hasher = hashlib.sha256()
        for chunk in self._fetcher.pull(self._found, 0, self.size):
            hasher.update(chunk)
            advance(len(chunk))
        return hasher.hexdigest()

    def close(self, *, remove: bool = False) -> None:
        """Lets the fetched bytes go; with ``remove`` from the disk too."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                self._fetcher.stage.release(self._key, remove=remove)

    def _load(self) -> bool:
        """Takes a small file into memory; False for one that is too large."""
        if not self._fetcher.keeps(self.size):
            return False
        try:
            data = b"".join(self._fetcher.pull(self._found, 0, self.size))
        except BaseException:
            self._fetcher.forget(self.size)
            raise
        found = hashlib.sha256(data).hexdigest()
        if self._sha256 is not None and found != self._sha256:
            raise SourceChanged(
                f"{self._fetcher.store.name}: {self.name} has other bytes than stated:"
                f" sha256 {found[:12]}, not {self._sha256[:12]}",
                hint="the store or something before it serves a damaged copy; it is fetched again later",
                file=self.name,
            )
        self._data = data
        return True

    def _hold(self, advance: Callable[[int], None] | None = None) -> None:
        """Fetches the file into the stage and compares what was seen of it before."""
        fetcher = self._fetcher

        def pull(start: int) -> Iterator[bytes]:
            fetcher.will_fetch(self.size - start)
            if advance is not None:
                advance(start)
            for chunk in fetcher.pull(self._found, start, self.size):
                yield chunk
                fetcher.fetched(len(chunk))
                if advance is not None:
                    advance(len(chunk))

        key = self._sha256 or f"tag-{hashlib.sha256(self.tag.encode()).hexdigest()}"
        subject = f"{fetcher.store.name}: {self.name}"
        fd, digest = fetcher.stage.fetch(
            key, self.size, self._sha256, pull, subject=subject, cancel=fetcher.cancel
        )
        self._fd, self._key, self._sha256 = fd, digest, digest
        for (offset, length), seen in self._looks.items():
            if hashlib.sha256(os.pread(fd, length, offset)).hexdigest() != seen:
                self.close(remove=True)
                raise SourceChanged(
                    f"{subject} was another file when its header was read",
                    hint="the store serves two states of one version; it is fetched again later",
                    file=self.name,
                )

    def _copy(self, view: memoryview, offset: int) -> int:
        if self._data is not None:
            part = self._data[offset : offset + len(view)]
            view[: len(part)] = part
            return len(part)
        assert self._fd is not None  # noqa: S101 - the callers have fetched it
        done = 0
        while done < len(view) and (count := os.preadv(self._fd, [view[done:]], offset + done)):
            done += count
        return done

    def _straight(self, view: memoryview, offset: int) -> int:
        self._fetcher.will_fetch(len(view))
        done = 0
        for chunk in self._fetcher.pull(self._found, offset, offset + len(view)):
            view[done : done + len(chunk)] = chunk
            done += len(chunk)
            self._fetcher.fetched(len(chunk))
        return done
