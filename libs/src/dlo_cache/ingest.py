"""One publish transaction: from files in a private staging directory to an entry that exists whole or not at
all.

    write → sync every file → manifest last → sync the directory → rename into ``entries`` → mode 0555 → sync
    ``entries``

Before the rename nothing is visible; after the sync that follows it nothing that fails is an error any more,
only logged. The directory's mode changes after the rename because an ordinary owner cannot move a directory
that he may not write. Whoever uses a transaction holds the key's write lock for as long as it lives
(``hold_keys``), which is also how a sweeper tells a dead builder's leftovers from work in progress.

Must not know what the files mean.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from dlo_cache import atomic
from dlo_cache.errors import Busy, Exists
from dlo_cache.locks import key_lock
from dlo_cache.names import LEASE, MANIFEST, PRODUCER, check_key, is_key, split_path
from dlo_cache.oserrors import os_errors
from dlo_cache.progress import Cancel
from dlo_cache.root import Root

FILE_MODE: Final = 0o444
LEASE_MODE: Final = 0o644
ENTRY_MODE: Final = 0o555
OPEN_MODE: Final = 0o755  # of an entry's directory while its owner must be able to move it

_log = logging.getLogger(__name__)


@contextmanager
def hold_keys(
    root: Root,
    keys: Iterable[str],
    *,
    timeout_seconds: float,
    cancel: Cancel | None = None,
    waited: Callable[[float], None] | None = None,
) -> Iterator[None]:
    """Holds the write locks of all ``keys``, taken in one fixed order so that two builders cannot wait for
    each other; ``waited`` is told the seconds that it took to get them all.

    Raises Busy naming the entry and the lock's owner when one is not free within ``timeout_seconds``;
    Cancelled.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        locks_fd = stack.enter_context(root.opened("locks"))
        for key in sorted({check_key(key) for key in keys}):
            subject = f"the writers' lock of entry {key}"
            lock = key_lock(locks_fd, key, timeout_seconds=timeout_seconds, subject=subject, cancel=cancel)
            stack.enter_context(lock)
        if waited is not None:
            waited(time.monotonic() - began)
        yield


class Ingest:
    """The staging directory of one entry. Use through ``begin``; the caller holds the key's write lock."""

    def __init__(self, root: Root, key: str, stage_name: str, stage_fd: int, syncer: Executor | None) -> None:
        self._root = root
        self._key = key
        self._stage_name = stage_name
        self._stage_fd = stage_fd
        self._syncer = syncer
        self._unsealed: set[int] = set()
        self._sealing: dict[Future[None], int] = {}
        self._directories: set[tuple[str, ...]] = set()
        self.published = False

    def create(self, name: str) -> int:
        """A descriptor of the new, empty file ``name`` (a relative path), to be given to ``seal``."""
        parent_fd, leaf = self._parent(name)
        try:
            fd = atomic.create_file(leaf, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
        self._unsealed.add(fd)
        return fd

    def link(self, name: str, source: str, *, source_fd: int) -> None:
        """Makes the file ``name`` another name of the already synced file ``source`` in the directory
        ``source_fd``."""
        parent_fd, leaf = self._parent(name)
        try:
            os.link(source, leaf, src_dir_fd=source_fd, dst_dir_fd=parent_fd, follow_symlinks=False)
        finally:
            os.close(parent_fd)

    def seal(self, fd: int) -> None:
        """Makes the written file read-only and syncs it, in the background where there is a syncer; closes
        ``fd``.

        An error of an earlier file is raised here or at commit, never lost.
        """
        self._unsealed.discard(fd)
        if self._syncer is None:
            _seal(fd, FILE_MODE)
            return
        self._sealing[self._syncer.submit(_seal, fd, FILE_MODE)] = fd
        for future in [future for future in self._sealing if future.done()]:
            del self._sealing[future]
            future.result()

    def commit(self, manifest: bytes, producer: Mapping[str, object]) -> Path:
        """Publishes the stage as the entry of its key and returns the entry's path, durable and readable by
        all.

        Raises Exists if a directory with content has the name already; any OSError of a step before means
        that nothing became visible.
        """
        self._join()
        self._write(LEASE, b"", LEASE_MODE)
        self._write(PRODUCER, json.dumps(producer, sort_keys=True, indent=1).encode() + b"\n", FILE_MODE)
        self._write(MANIFEST, manifest, FILE_MODE)
        self._sync_directories()
        with self._root.opened("ingest") as ingest_fd, self._root.opened("entries") as entries_fd:
            self._rename(ingest_fd, entries_fd)
        return self._root.entries_dir / self._key

    def abort(self) -> None:
        """Removes the stage, unless it was published; waits for syncs in progress first."""
        for future, fd in self._sealing.items():
            if future.cancel():
                os.close(fd)
            else:
                wait([future])
        self._sealing.clear()
        for fd in self._unsealed:
            os.close(fd)
        self._unsealed.clear()
        if not self.published:
            with self._root.opened("ingest") as ingest_fd:
                atomic.remove_tree(self._stage_name, dir_fd=ingest_fd)

    def _rename(self, ingest_fd: int, entries_fd: int) -> None:
        try:
            os.rename(self._stage_name, self._key, src_dir_fd=ingest_fd, dst_dir_fd=entries_fd)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise Exists(
                    f"entry {self._key} is there already", hint="the one that is there is kept"
                ) from error
            raise
        self.published = True
        try:
            os.fchmod(self._stage_fd, ENTRY_MODE)
        except OSError:
            _log.warning("Left an entry's directory writable", extra={"key": self._key}, exc_info=True)
        try:
            atomic.sync(entries_fd)
        except BaseException:
            self._retract(ingest_fd, entries_fd)
            raise

    def _retract(self, ingest_fd: int, entries_fd: int) -> None:
        """Takes back an entry whose name may not survive a power cut: nobody was told of it yet."""
        try:
            os.fchmod(self._stage_fd, OPEN_MODE)
            os.rename(self._key, self._stage_name, src_dir_fd=entries_fd, dst_dir_fd=ingest_fd)
            self.published = False
        except OSError:
            _log.exception("Could not take back an entry that was not synced", extra={"key": self._key})

    def _join(self) -> None:
        for future in self._sealing:
            future.result()
        self._sealing.clear()

    def _write(self, name: str, data: bytes, mode: int) -> None:
        fd = atomic.create_file(name, dir_fd=self._stage_fd)
        try:
            atomic.write_all(fd, data)
        except BaseException:
            os.close(fd)
            raise
        _seal(fd, mode)

    def _sync_directories(self) -> None:
        for parts in sorted(self._directories, key=len, reverse=True):
            fd = atomic.open_below(self._stage_fd, *parts)
            try:
                os.fchmod(fd, ENTRY_MODE)
                atomic.sync(fd)
            finally:
                os.close(fd)
        atomic.sync(self._stage_fd)

    def _parent(self, name: str) -> tuple[int, str]:
        *folders, leaf = split_path(name)
        fd = os.dup(self._stage_fd)
        for depth, folder in enumerate(folders, start=1):
            try:
                if tuple(folders[:depth]) in self._directories:
                    below = atomic.open_directory(folder, dir_fd=fd)
                else:
                    below = atomic.make_directory(folder, OPEN_MODE, dir_fd=fd)
                    self._directories.add(tuple(folders[:depth]))
            finally:
                os.close(fd)
            fd = below
        return fd, leaf


@contextmanager
def begin(root: Root, key: str, *, syncer: Executor | None = None) -> Iterator[Ingest]:
    """A transaction for the entry ``key``; whatever leaves the block before ``commit`` leaves nothing in the
    ingest.

    ``syncer`` runs the syncs of sealed files beside the caller's work.
    """
    name = f"{check_key(key)}.{secrets.token_hex(16)}"
    with root.opened("ingest") as ingest_fd, os_errors(f"beginning entry {key}"):
        stage_fd = atomic.make_directory(name, OPEN_MODE, dir_fd=ingest_fd)
    ingest = Ingest(root, key, name, stage_fd, syncer)
    try:
        yield ingest
    finally:
        try:
            ingest.abort()
        finally:
            os.close(stage_fd)


def sweep_ingest(root: Root) -> tuple[str, ...]:
    """Removes the stages of builders that are dead, told by the key's free lock; returns the names removed.

    Work in progress, and names that no builder of this version makes, are left alone.
    """
    swept: list[str] = []
    with root.opened("ingest") as ingest_fd, root.opened("locks") as locks_fd:
        with os_errors(f"reading {root.ingest_dir}"):
            names = sorted(os.listdir(ingest_fd))
        for name in names:
            key = name.partition(".")[0]
            if not is_key(key):
                continue
            with suppress(Busy), key_lock(locks_fd, key, timeout_seconds=0, subject=name):
                with os_errors(f"removing {root.ingest_dir / name}"):
                    atomic.remove_tree(name, dir_fd=ingest_fd)
                swept.append(name)
    return tuple(swept)


def _seal(fd: int, mode: int) -> None:
    try:
        os.fchmod(fd, mode)
        atomic.sync(fd)
    finally:
        os.close(fd)
