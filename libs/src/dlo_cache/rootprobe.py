"""Tries for real whether a file system keeps the promises that the store is built on.

Network and user-space file systems may answer "yes" to a lock and keep none, so nothing is asked of a table
of names: two descriptors compete for a lock, a directory is renamed and found, a directory is synced. Must
leave nothing behind.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dlo_cache import atomic, locks
from dlo_cache.errors import Busy, Unavailable
from dlo_cache.oserrors import os_errors

PROBE_PREFIX = "probe."


def probe_file_system(directory: Path) -> None:
    """Raises Unavailable (FilesystemUnsupported) if locks, rename or sync do not hold in ``directory``, which
    is ours.

    A directory that cannot be written raises Denied, a full one NoSpace.
    """
    name = PROBE_PREFIX + secrets.token_hex(8)
    with os_errors(f"trying out the file system of {directory}"):
        parent_fd = atomic.open_directory(directory)
        try:
            probe_fd = atomic.make_directory(name, 0o700, dir_fd=parent_fd)
            try:
                _probe_locks(probe_fd, directory)
                _probe_rename(probe_fd, directory)
                _probe_sync(probe_fd, directory)
            finally:
                os.close(probe_fd)
                atomic.remove_tree(name, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)


def _probe_locks(probe_fd: int, directory: Path) -> None:
    first = atomic.create_file("lease", dir_fd=probe_fd)
    second = third = -1
    try:
        second = atomic.open_file("lease", dir_fd=probe_fd)
        third = atomic.open_file("lease", dir_fd=probe_fd, writable=True)
        locks.acquire_read(second)
        if not _refused(third) or not locks.write_would_block(first):
            raise _unsupported(directory, "a second descriptor took a lock that the first one held")
        locks.release(second)
        locks.acquire_write(third, subject="the probe")
        if not _refused(first):
            raise _unsupported(directory, "two descriptors took the exclusive lock")
    finally:
        for fd in (first, second, third):
            if fd >= 0:
                os.close(fd)


def _refused(fd: int) -> bool:
    try:
        locks.acquire_write(fd, subject="the probe")
    except Busy:
        return True
    return False


def _probe_rename(probe_fd: int, directory: Path) -> None:
    os.close(atomic.make_directory("from", 0o700, dir_fd=probe_fd))
    os.close(atomic.make_directory("into", 0o700, dir_fd=probe_fd))
    into_fd = atomic.open_directory("into", dir_fd=probe_fd)
    try:
        os.rename("from", "moved", src_dir_fd=probe_fd, dst_dir_fd=into_fd)
        if os.listdir(into_fd) != ["moved"]:
            raise _unsupported(directory, "a renamed directory is not where it was moved to")
    except OSError as error:
        raise _unsupported(directory, f"a directory cannot be renamed ({error.strerror})") from error
    finally:
        os.close(into_fd)


def _probe_sync(probe_fd: int, directory: Path) -> None:
    try:
        atomic.sync(probe_fd)
    except OSError as error:
        raise _unsupported(directory, f"a directory cannot be synced ({error.strerror})") from error


def _unsupported(directory: Path, what: str) -> Unavailable:
    return Unavailable(
        f"the file system of {directory} cannot hold a cache: {what}",
        code="FilesystemUnsupported",
        hint="put the cache on a local file system such as ext4 or XFS",
    )
