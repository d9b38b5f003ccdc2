"""How an entry leaves: evicted through the trash, or set aside in quarantine. Always by one rename.

Whoever moves an entry holds its key's write lock, so nobody publishes under that name meanwhile. An eviction
also takes the exclusive lock on the entry's lease, through a writable descriptor: no entry that a reader has
open is ever evicted, and a reader that comes too late finds it locked or gone. Quarantine asks no reader:
they keep what they mapped, and no new one may trust it.

Must not decide what should go.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlo_cache import atomic, locks
from dlo_cache.errors import NotFound
from dlo_cache.ingest import ENTRY_MODE, OPEN_MODE, hold_keys
from dlo_cache.names import LEASE, check_key
from dlo_cache.oserrors import os_errors
from dlo_cache.root import Root

QUARANTINE_KEEPS: Final = 3
_NOTE_SUFFIX: Final = ".reason.json"
_PATIENCE_SECONDS: Final = 0.5  # for the key's lock: a sweeper may hold it for a moment, a builder for long

_log = logging.getLogger(__name__)


def evict(root: Root, key: str) -> None:
    """Removes the entry ``key`` if nobody has it open.

    Raises Busy naming the entry while a reader holds its lease, NotFound if there is no such entry, Denied.
    """
    with (
        hold_keys(root, [key], timeout_seconds=_PATIENCE_SECONDS),
        root.opened("entries") as entries_fd,
        root.opened("trash") as trash_fd,
        os_errors(f"evicting entry {key}"),
        _entry_directory(key, entries_fd) as entry_fd,
        _claimed(key, entry_fd),
    ):
        name = f"{key}.{secrets.token_hex(16)}"
        _move_out(key, name, entry_fd, entries_fd, trash_fd)
        atomic.remove_tree(name, dir_fd=trash_fd)


def quarantine(root: Root, key: str, reason: str) -> None:
    """Sets the entry ``key`` aside, with ``reason`` in a note beside it, whether or not someone reads it.

    Of what was set aside the newest few are kept for inspection. Raises NotFound if there is no such entry,
    Busy while someone builds or removes it.
    """
    with hold_keys(root, [key], timeout_seconds=_PATIENCE_SECONDS):
        set_aside(root, key, reason)


def set_aside(root: Root, key: str, reason: str) -> None:
    """``quarantine`` for a caller that holds the key's write lock already."""
    check_key(key)
    name = f"{key}.{secrets.token_hex(16)}"
    where = f"setting entry {key} aside"
    with root.opened("entries") as entries_fd, root.opened("quarantine") as quarantine_fd, os_errors(where):
        if _is_directory(key, entries_fd):
            with _entry_directory(key, entries_fd) as entry_fd:
                _move_out(key, name, entry_fd, entries_fd, quarantine_fd)
        else:
            os.rename(key, name, src_dir_fd=entries_fd, dst_dir_fd=quarantine_fd)
            atomic.sync(entries_fd)
        note = {"key": key, "reason": reason, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with suppress(OSError):  # the note is for people; the entry is aside with or without it
            data = json.dumps(note, ensure_ascii=True).encode() + b"\n"
            atomic.replace_file(name + _NOTE_SUFFIX, data, 0o444, dir_fd=quarantine_fd)
        _log.warning("Set an entry aside", extra={"key": key, "reason": reason})
        _prune(quarantine_fd)


def sweep_trash(root: Root) -> tuple[str, ...]:
    """Removes what interrupted evictions left in the trash; returns the names removed."""
    with root.opened("trash") as trash_fd, os_errors(f"emptying {root.trash_dir}"):
        names = tuple(sorted(os.listdir(trash_fd)))
        for name in names:
            atomic.remove_tree(name, dir_fd=trash_fd)
    return names


def repair_mode(root: Root, key: str) -> bool:
    """Makes an entry's directory read-only again that a publish or eviction cut short left writable.

    Returns whether there was anything to do. Raises Busy while someone builds or removes the entry, NotFound.
    """
    with (
        hold_keys(root, [key], timeout_seconds=_PATIENCE_SECONDS),
        root.opened("entries") as entries_fd,
        os_errors(f"repairing the mode of entry {key}"),
        _entry_directory(key, entries_fd) as entry_fd,
    ):
        writable = os.fstat(entry_fd).st_mode & 0o222 != 0
        if writable:
            os.fchmod(entry_fd, ENTRY_MODE)
        return writable


def _is_directory(key: str, entries_fd: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(key, dir_fd=entries_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError as error:
        raise NotFound(f"there is no entry {key}", key=key) from error


@contextmanager
def _entry_directory(key: str, entries_fd: int) -> Iterator[int]:
    try:
        fd = atomic.open_directory(key, dir_fd=entries_fd)
    except FileNotFoundError as error:
        raise NotFound(f"there is no entry {key}", key=key) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _claimed(key: str, entry_fd: int) -> Iterator[None]:
    """Holds the evictor's lock; an entry without a lease file cannot be read, hence needs no lock."""
    try:
        lease_fd = atomic.open_file(LEASE, dir_fd=entry_fd, writable=True)
    except FileNotFoundError:
        yield
        return
    try:
        locks.acquire_write(lease_fd, subject=f"entry {key}")
        yield
    finally:
        os.close(lease_fd)


def _move_out(key: str, name: str, entry_fd: int, entries_fd: int, target_fd: int) -> None:
    os.fchmod(entry_fd, OPEN_MODE)
    try:
        os.rename(key, name, src_dir_fd=entries_fd, dst_dir_fd=target_fd)
    except BaseException as error:
        with suppress(OSError):
            os.fchmod(entry_fd, ENTRY_MODE)
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            raise NotFound(f"there is no entry {key}", key=key) from error
        raise
    atomic.sync(entries_fd)


def _prune(quarantine_fd: int) -> None:
    aged: list[tuple[int, str]] = []
    for name in os.listdir(quarantine_fd):
        if not name.endswith(_NOTE_SUFFIX):
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=quarantine_fd, follow_symlinks=False)
                aged.append((found.st_ctime_ns, name))
    for _, name in sorted(aged, reverse=True)[QUARANTINE_KEEPS:]:
        for doomed in (name, name + _NOTE_SUFFIX):
            atomic.remove_tree(doomed, dir_fd=quarantine_fd)
