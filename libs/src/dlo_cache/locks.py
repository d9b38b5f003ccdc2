"""Open-file-description (OFD) locks: the leases of readers, the evictor's claim, one writer per key.

The kernel drops such a lock with the last descriptor of its open file, SIGKILL included, so what counts is
the lock, never the existence or the content of a lock file. Lock files are therefore never removed: unlinking
one would let a second owner in through a new file of the same name.

Must not use flock (it lets a read-only descriptor take the exclusive lock) or POSIX locks (closing any
descriptor of the file drops them); the three kinds do not see each other.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dlo_cache.errors import Busy, CacheError, Unavailable
from dlo_cache.oserrors import os_errors, translated
from dlo_cache.progress import Cancel, check_cancel

_FLOCK: Final = struct.Struct(
    "@hhqqi0q"
)  # l_type, l_whence, l_start, l_len, l_pid: struct flock of 64-bit Linux
_CONTENDED: Final = (errno.EAGAIN, errno.EACCES)
_UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_FIRST_PAUSE_SECONDS: Final = 0.005
_LONGEST_PAUSE_SECONDS: Final = 0.25
_OWNER_BYTES: Final = 512
_MODE: Final = 0o600


def acquire_read(fd: int) -> None:
    """Takes the shared lock on the open file ``fd`` at once; a read-only descriptor is enough.

    Raises Busy while someone holds the exclusive lock, Unavailable where the file system has no such locks.
    """
    if not _try(fd, fcntl.F_RDLCK):
        raise Busy("the file is locked for writing", hint="its owner is removing or building it; try again")


def acquire_write(
    fd: int, *, timeout_seconds: float = 0.0, subject: str, cancel: Cancel | None = None
) -> None:
    """Takes the exclusive lock on the open file ``fd``, which must be writable, within ``timeout_seconds``.

    Raises Busy naming ``subject`` and, where the holder wrote one, the owner; Cancelled; Unavailable where
    the file system has no such locks; Denied for a descriptor that cannot write.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while not _try(fd, fcntl.F_WRLCK):
        check_cancel(cancel, f"waiting for {subject}")
        left = deadline - time.monotonic()
        if left <= 0:
            owner = read_owner(fd)
            held = f" by {owner}" if owner else ""
            waited = f" after {timeout_seconds:g} s" if timeout_seconds else ""
            raise Busy(f"{subject} is in use{held}{waited}", hint="wait for the owner to finish, or stop it")
        time.sleep(min(pause, left))
        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


def release(fd: int) -> None:
    """Drops whatever lock the open file ``fd`` holds; closing its last descriptor does the same."""
    with os_errors("releasing a lock"):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))


def write_would_block(fd: int) -> bool:
    """Whether somebody else holds any lock on the file, so that the exclusive one would have to wait.

    Takes nothing, and works on a read-only descriptor: how use is observed without disturbing it.
    """
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    except OSError as error:
        raise _unusable(error) from error
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


@contextmanager
def key_lock(
    locks_fd: int, key: str, *, timeout_seconds: float, subject: str, cancel: Cancel | None = None
) -> Iterator[None]:
    """Holds the write lock ``<key>.lock`` in the open directory ``locks_fd``, leaving an owner's note in the
    file.

    The note (process, machine, since when) is for the error message of whoever waits; it decides nothing.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os_errors(f"opening the lock of {subject}"):
        fd = os.open(f"{key}.lock", flags, _MODE, dir_fd=locks_fd)
    try:
        _fix_mode(fd)
        acquire_write(fd, timeout_seconds=timeout_seconds, subject=subject, cancel=cancel)
        _write_owner(fd)
        yield
    finally:
        os.close(fd)


def read_owner(fd: int) -> str:
    """The note in a lock file as words ("process 12 on host-a since …"), or "" where there is none to
    read."""
    try:
        note = json.loads(os.pread(fd, _OWNER_BYTES, 0))
        return f"process {int(note['pid'])} on {note['host']} since {note['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write_owner(fd: int) -> None:
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    note = json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "since": since}).encode()
    with suppress(OSError):  # a full disk costs the note, not the lock
        os.ftruncate(fd, 0)
        os.pwrite(fd, note, 0)


def _fix_mode(fd: int) -> None:
    """Undoes the umask, which otherwise could make a lock that its own user cannot open again."""
    if stat.S_IMODE(os.fstat(fd).st_mode) != _MODE:
        with suppress(PermissionError):  # somebody else's file: only its owner may, and it opened
            os.fchmod(fd, _MODE)


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(kind))
    except OSError as error:
        if error.errno in _CONTENDED:
            return False
        raise _unusable(error) from error
    return True


def _unusable(error: OSError) -> CacheError:
    if error.errno in _UNSUPPORTED:
        return Unavailable(
            f"this file system has no open-file-description locks: {error.strerror}",
            code="FilesystemUnsupported",
            hint="put the cache on a local file system such as ext4 or XFS",
        )
    return translated(error, "locking a file")
