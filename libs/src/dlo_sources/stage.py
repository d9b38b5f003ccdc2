"""Fetched files on the cache's disk, each under its digest until the entry that needs it is built.

A folder inside ``ingest`` that one process owns. A file counts only once this process has hashed every byte
of it, so that what a power cut left is taken up where it is right and thrown away where it is not. Nothing
here is needed: a file that goes is fetched again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dlo_cache import atomic
from dlo_cache.oserrors import os_errors

from dlo_sources.errors import SourceChanged
from dlo_sources.remote import CHUNK_BYTES

FOLDER: Final = "fetched"
LEFTOVER_SECONDS: Final = 86_400.0
_MODE: Final = 0o700
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

    def fetch(self, key: str, size: int, sha256: str | None, pull: Pull, *, subject: str) -> tuple[int, str]:
        """A descriptor of a file with all its bytes, and their sha256, under which it is held until ``release``.

        ``key`` is the sha256, or a name for the time until it is known. ``pull(offset)`` gives the bytes from
        there on. A part that is there is taken up where ``sha256`` can judge the whole. Raises SourceChanged for
        bytes of another digest, what ``pull`` raises, and a CacheError (DiskFull); a part stays, unless the disk
        is full.
        """
        with self._lock:
            self._used[key] += 1
            lock = self._locks[key]
        try:
            with lock, os_errors(f"fetching {subject}"), self._opened() as folder_fd:
                fd = _open(key, folder_fd)
                try:
                    digest = key
                    if key not in self._whole or os.fstat(fd).st_size != size:
                        digest = self._filled(fd, key, size, sha256, pull, folder_fd, subject)
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
        with suppress(OSError):
            return min(size, os.stat(self._parent / FOLDER / key, follow_symlinks=False).st_size)
        return 0

    def sweep(self, *, older_than_seconds: float = 0.0, keep: Collection[str] = ()) -> None:
        """Removes what nobody holds and nobody has written to for that long, but not ``keep``."""
        if not (self._parent / FOLDER).is_dir():
            return
        before = time.time() - older_than_seconds
        with self._lock, os_errors("sweeping fetched files"), self._opened() as folder_fd:
            for name in os.listdir(folder_fd):
                state = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                if name not in self._used and name not in keep and state.st_mtime <= before:
                    atomic.remove_tree(name, dir_fd=folder_fd)
                    self._whole.discard(name)

    def _filled(
        self, fd: int, key: str, size: int, sha256: str | None, pull: Pull, folder_fd: int, subject: str
    ) -> str:
        hasher = hashlib.sha256()
        taken = _take_up(fd, size, hasher) if sha256 is not None else _take_up(fd, -1, hasher)
        try:
            digest = _pulled(fd, taken, hasher, pull)
            if taken and digest != sha256:  # what was left was not of this file: from the beginning
                hasher = hashlib.sha256()
                digest = _pulled(fd, _take_up(fd, -1, hasher), hasher, pull)
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
            self._whole.add(digest)

    def _remove(self, key: str) -> None:
        with self._opened() as folder_fd:
            atomic.remove_tree(key, dir_fd=folder_fd)
        self._whole.discard(key)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        parent_fd = atomic.open_directory(self._parent)
        try:
            try:
                fd = atomic.make_directory(FOLDER, _MODE, dir_fd=parent_fd)
            except FileExistsError:
                fd = atomic.open_directory(FOLDER, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
        try:
            yield fd
        finally:
            os.close(fd)


def _open(key: str, folder_fd: int) -> int:
    try:
        return atomic.create_file(key, dir_fd=folder_fd)
    except FileExistsError:
        return atomic.open_file(key, dir_fd=folder_fd, writable=True)


def _take_up(fd: int, size: int, hasher: hashlib._Hash) -> int:
    """Hashes what is there of a file of ``size`` bytes; a longer one, or with -1 any, is emptied."""
    have = os.fstat(fd).st_size
    if have > size:
        os.ftruncate(fd, 0)
        have = 0
    buffer = memoryview(bytearray(min(CHUNK_BYTES, have)))
    os.lseek(fd, 0, os.SEEK_SET)
    left = have
    while left:
        count = os.readv(fd, [buffer[: min(left, len(buffer))]])
        hasher.update(buffer[:count])
        left -= count
    return have


def _pulled(fd: int, at: int, hasher: hashlib._Hash, pull: Pull) -> str:
    for chunk in pull(at):
        atomic.write_all(fd, chunk)
        hasher.update(chunk)
    return hasher.hexdigest()
