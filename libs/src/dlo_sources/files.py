"""One file of a checkpoint on a local disk.

A file is what it was when it was looked at: device, inode, size and times are compared at every opening, so
that bytes of another file, or of the same file written meanwhile, never count as this one's. Must not
follow links: ``folder`` has resolved and judged them.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from dlo_sources.errors import SourceIncomplete, SourceInvalid, SourceUnavailable, SourceUntrusted

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CheckpointFile(Protocol):
    """A ``dlo_cache.source.SourceFile`` that can also be looked into before it is built from."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str | None: ...
    def readinto(self, buffer: memoryview | bytearray, offset: int) -> int: ...
    def read(self, offset: int, length: int) -> bytes:
        """The bytes at ``offset``, fewer than ``length`` only at the end of the file."""
        ...


class Identity(NamedTuple):
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A regular file; ``name`` is its path in the pipeline's folder, ``path`` where its bytes really are."""

    name: str
    path: Path
    identity: Identity
    sha256: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.identity.size

    def readinto(self, buffer: memoryview | bytearray, offset: int) -> int:
        """Fills ``buffer`` from ``offset``; returns the bytes read, fewer only at the end of the file.

        Raises SourceInvalid if the file changed since it was looked at, SourceUnavailable if it cannot be
        read.
        """
        rest = memoryview(buffer).cast("B")
        wanted = len(rest)
        try:
            fd = os.open(self.path, _FLAGS)
            try:
                self._check_unchanged(os.fstat(fd))
                while len(rest) and (count := os.preadv(fd, [rest], offset)):
                    rest, offset = rest[count:], offset + count
            finally:
                os.close(fd)
        except OSError as error:
            raise unreadable(error, self.name) from error
        return wanted - len(rest)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes at ``offset``, fewer than ``length`` only at the end of the file."""
        buffer = bytearray(max(0, min(length, self.size - offset)))
        count = self.readinto(buffer, offset) if buffer else 0
        return bytes(buffer[:count])

    def with_sha256(self, sha256: str) -> LocalFile:
        """The same file, its digest known."""
        return replace(self, sha256=sha256)

    def _check_unchanged(self, state: os.stat_result) -> None:
        if identity_of(state) != self.identity:
            raise SourceInvalid(
                f"{self.name} changed while it was in use",
                hint="let nobody write to the checkpoint's folder, then try again",
                file=self.name,
            )


def look_at(name: str, path: Path) -> LocalFile:
    """The file at ``path``, whose links are resolved; raises SourceInvalid unless it is a regular file.

    Raises SourceUntrusted if what is there lies elsewhere: a folder on the way was exchanged for a link since
    the links were resolved. From here on the identity is compared, so no later exchange counts.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            state, place = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
    except OSError as error:
        raise unreadable(error, name) from error
    if not stat.S_ISREG(state.st_mode):
        raise SourceInvalid(f"{name} is not a regular file", file=name)
    if place != str(path):
        raise SourceUntrusted(f"{name} was exchanged while it was looked at; it was not opened", file=name)
    return LocalFile(name, path, identity_of(state))


def identity_of(state: os.stat_result) -> Identity:
    """The identity that a status states."""
    return Identity(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def unreadable(error: OSError, name: str) -> SourceIncomplete | SourceUnavailable:
    """The source error for an operating system's error on ``name``; raise it from the original."""
    if isinstance(error, FileNotFoundError):
        return SourceIncomplete(f"{name} is missing", hint="fetch the checkpoint again", file=name)
    return SourceUnavailable(
        f"{name} cannot be read: {error.strerror or error}", hint="check its owner and mode", file=name
    )
