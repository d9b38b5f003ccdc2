"""Fetched files on the cache's disk, each under its digest until the entry that needs it is built.

A folder inside ``ingest`` that one process owns. A file counts only once this process has hashed every byte
of it, so that what a power cut left is taken up where it is right and thrown away where it is not. Nothing
here is needed: a file that goes is fetched again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dlo_cache import atomic
from dlo_cache.oserrors import os_errors
from dlo_cache.progress import Cancel, check_cancel

from dlo_sources.errors import SourceChanged, SourceInvalid
from dlo_sources.remote import CHUNK_BYTES

FOLDER: Final = "fetched"
_FUTURE_SECONDS: Final = 3600.0
_MODE: Final = 0o700
_KEY: Final = re.compile(r"(tag-)?[0-9a-f]{64}")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)

Pull = Callable[[int], Iterator[bytes]]


class Stage:
    """The folder below ``parent``, made when the first file comes. Safe for use by several threads."""

    def __init__(self, parent: Path, *, headroom_bytes: int = 0) -> None:
        self._parent, self._headroom_bytes = parent, headroom_bytes
        self._lock = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._used: Counter[str] = Counter()
        self._whole: set[str] = set()

    def fetch(
        self,
        key: str,
        size: int,
        sha256: str | None,
        pull: Pull,
        *,
        subject: str,
        cancel: Cancel | None = None,
    ) -> tuple[int, str]:
        """A descriptor of a file with all its bytes, and their sha256, under which it is held until ``release``.

        ``key`` is the sha256, or a name for the time until it is known. ``pull(offset)`` gives the bytes from
        there on. A part that is there is taken up where ``sha256`` can judge the whole. Raises SourceChanged for
        bytes of another digest, what ``pull`` raises, and a CacheError (DiskFull); a part stays, unless the disk
        is full.
        """
        _check_key(key, subject)
        with self._lock:
            self._used[key] += 1
            lock = self._locks[key]
        try:
            with lock, os_errors(f"fetching {subject}"), self._folder() as folder_fd:
                fd = _open(key, folder_fd)
                try:
                    digest = key
                    if key not in self._whole or os.fstat(fd).st_size != size:
                        digest = self._filled(fd, key, size, sha256, pull, folder_fd, subject, cancel)
                        self._rename(key, digest, folder_fd)
                except BaseException:
                    os.close(fd)
                    raise
                return fd, digest
        except BaseException:
            self.release(key)
            raise

    def release(self, key: str, *, remove: bool = False) -> None:
        """Lets go of a file; with ``remove`` it goes once nobody holds it."""
        with self._lock:
            self._used[key] -= 1
            gone = self._used[key] <= 0
            if gone:
                del self._used[key]
            if gone and remove:
                self._remove(key)

    def room(self) -> int:
        """Bytes free beside the head-room."""
        with os_errors(f"asking for the free space of {self._parent}"):
            found = os.statvfs(self._parent)
        return max(0, found.f_frsize * found.f_bavail - self._headroom_bytes)

    def have(self, key: str, size: int) -> int:
        """How many of the ``size`` bytes of a file are there."""
        _check_key(key, "a fetched file")
        with suppress(OSError):
            return min(size, os.stat(self._parent / FOLDER / key, follow_symlinks=False).st_size)
        return 0

    def leftover(self) -> tuple[int, float] | None:
        """Bytes of the files that nobody holds, and for how many seconds the longest idle one was not written;
        None where there is none. Raises a CacheError."""
        nbytes, idle, now = 0, 0.0, time.time()
        with self._lock, os_errors("looking at fetched files"), self._opened(make=False) as folder_fd:
            if folder_fd is None:
                return None
            names = [name for name in os.listdir(folder_fd) if not self._used.get(name)]
            for name in names:
                with suppress(FileNotFoundError):
                    state = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                    nbytes, idle = nbytes + state.st_size, max(idle, _idle(state, now))
        return (nbytes, idle) if names else None

    def sweep(self, *, older_than_seconds: float = 0.0, keep: Collection[str] = ()) -> None:
        """Removes what nobody holds and nobody has written to for that long, but not ``keep``."""
        now = time.time()
        with self._lock, os_errors("sweeping fetched files"), self._opened(make=False) as folder_fd:
            if folder_fd is None:
                return
            for name in os.listdir(folder_fd):
                state = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                old = _idle(state, now) >= older_than_seconds
                if not self._used.get(name) and name not in keep and old:
                    atomic.remove_tree(name, dir_fd=folder_fd)
                    self._whole.discard(name)

    def _filled(
        self,
        fd: int,
        key: str,
        size: int,
        sha256: str | None,
        pull: Pull,
        folder_fd: int,
        subject: str,
        cancel: Cancel | None,
    ) -> str:
        hasher = hashlib.sha256()
        taken = _take_up(fd, size if sha256 is not None else -1, hasher, cancel)
        try:
            digest = _pulled(fd, taken, hasher, pull)
            if taken and digest != sha256:  # what was left was not of this file: from the beginning
                hasher = hashlib.sha256()
                digest = _pulled(fd, _take_up(fd, -1, hasher, cancel), hasher, pull)
        except OSError as error:
            if error.errno in _FULL:
                atomic.remove_tree(key, dir_fd=folder_fd)
            raise
        if sha256 is not None and digest != sha256:
            atomic.remove_tree(key, dir_fd=folder_fd)
            raise SourceChanged(
                f"{subject} has other bytes than stated: sha256 {digest[:12]}, not {sha256[:12]}",
                hint="the store or something before it serves a damaged copy; it is fetched again later",
            )
        return digest

    def _rename(self, key: str, digest: str, folder_fd: int) -> None:
        """What was fetched under a name of its own is kept under its digest."""
        with self._lock:
            if key != digest:
                os.rename(key, digest, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
                self._used[digest] += 1
                self._used[key] -= 1
                if not self._used[key]:
                    del self._used[key]
            self._whole.add(digest)

    def _remove(self, key: str) -> None:
        with os_errors("removing a fetched file"), self._opened(make=False) as folder_fd:
            if folder_fd is not None:
                atomic.remove_tree(key, dir_fd=folder_fd)
        self._whole.discard(key)

    @contextmanager
    def _folder(self) -> Iterator[int]:
        with self._opened(make=True) as fd:
            assert fd is not None  # noqa: S101 - it was made
            yield fd

    @staticmethod
    def _made(parent_fd: int) -> int:
        """The folder, made by this thread or by one that fetches beside it."""
        try:
            return atomic.make_directory(FOLDER, _MODE, dir_fd=parent_fd)
        except FileExistsError:
            return atomic.open_directory(FOLDER, dir_fd=parent_fd)

    @contextmanager
    def _opened(self, *, make: bool) -> Iterator[int | None]:
        """The folder; None where there is none and it is not to be made."""
        parent_fd = atomic.open_directory(self._parent)
        fd: int | None
        try:
            try:
                fd = atomic.open_directory(FOLDER, dir_fd=parent_fd)
            except FileNotFoundError:
                fd = self._made(parent_fd) if make else None
        finally:
            os.close(parent_fd)
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)


def _idle(state: os.stat_result, now: float) -> float:
    """Seconds since the last write; a time far ahead is of a clock that was set back, and counts as long ago."""
    idle = now - state.st_mtime
    return float("inf") if idle < -_FUTURE_SECONDS else max(0.0, idle)


def _check_key(key: str, subject: str) -> None:
    """A key is a file's name: nothing but a digest may become one."""
    if not _KEY.fullmatch(key):
        raise SourceInvalid(f"{subject}: its digest is none", hint="check the endpoint's address")


def _open(key: str, folder_fd: int) -> int:
    try:
        return atomic.create_file(key, dir_fd=folder_fd)
    except FileExistsError:
        return atomic.open_file(key, dir_fd=folder_fd, writable=True)


def _take_up(fd: int, size: int, hasher: hashlib._Hash, cancel: Cancel | None) -> int:
    """Hashes what is there of a file of ``size`` bytes; a longer one, or with -1 any, is emptied."""
    have = os.fstat(fd).st_size
    if have > size:
        os.ftruncate(fd, 0)
        have = 0
    buffer = memoryview(bytearray(min(CHUNK_BYTES, have)))
    os.lseek(fd, 0, os.SEEK_SET)
    left = have
    while left:
        check_cancel(cancel, "hashing what was fetched")
        count = os.readv(fd, [buffer[: min(left, len(buffer))]])
        if not count:
            raise OSError(errno.EIO, "a fetched file became shorter while it was read")
        hasher.update(buffer[:count])
        left -= count
    return have


def _pulled(fd: int, at: int, hasher: hashlib._Hash, pull: Pull) -> str:
    for chunk in pull(at):
        atomic.write_all(fd, chunk)
        hasher.update(chunk)
    return hasher.hexdigest()
