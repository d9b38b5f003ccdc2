"""Durable, atomic changes of names: the only module that makes a name visible or takes it away.

Everything is relative to an open directory and follows no symbolic link, so that a name exchanged under us
leads nowhere. What POSIX promises and this module relies on: a rename inside one file system is atomic for
readers; it is durable only once the *parent directory* is synced; a file's bytes are durable only once the
*file* is synced. What it does not promise: that a failed sync can be repeated (the kernel marks the pages
clean), so a caller throws the file away. Modes are set on the open descriptor, hence independent of the
umask.

Functions raise plain OSError; the public functions above them translate it (``oserrors``).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from typing import Final

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SCRATCH_MARK: Final = ".new-"


def open_directory(name: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """A descriptor of the directory ``name``; a link in its last part raises ELOOP or ENOTDIR."""
    return os.open(name, _DIRECTORY, dir_fd=dir_fd)


def open_below(dir_fd: int, *names: str) -> int:
    """A descriptor of the directory reached from ``dir_fd`` through ``names``, following no link on the
    way."""
    fd = os.dup(dir_fd)
    for name in names:
        try:
            below = open_directory(name, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def make_directory(name: str, mode: int, *, dir_fd: int) -> int:
    """Makes the directory ``name`` with exactly ``mode`` and returns a descriptor of it; EEXIST if it is
    there."""
    os.mkdir(name, 0o700, dir_fd=dir_fd)
    fd = open_directory(name, dir_fd=dir_fd)
    os.fchmod(fd, mode)
    return fd


def create_file(name: str, *, dir_fd: int) -> int:
    """Makes the new file ``name``, private to its owner until ``os.fchmod``, open for reading and writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=dir_fd)


def open_file(name: str, *, dir_fd: int, writable: bool = False) -> int:
    """Opens an existing regular file, never through a link, never blocking on a pipe; ELOOP for any other
    kind."""
    access = os.O_RDWR if writable else os.O_RDONLY
    fd = os.open(name, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ELOOP, "not a regular file", name)
    return fd


def read_file(name: str, *, dir_fd: int, limit: int) -> bytes:
    """The bytes of a regular file; EFBIG if there are more than ``limit``."""
    fd = open_file(name, dir_fd=dir_fd)
    with open(fd, "rb", buffering=0) as file:
        data = bytearray()
        while chunk := file.read(limit + 1 - len(data)):
            data += chunk
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", name)
        return bytes(data)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Writes every byte of ``data`` at the descriptor's position, in as few calls as the kernel takes."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[os.write(fd, rest) :]


class SyncError(OSError):
    """The device did not take what was written; the errno is its own."""


def sync(fd: int) -> None:
    """Returns once the file or directory ``fd`` is on the device. SyncError means: throw the thing away, do
    not retry."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncError(error.errno, error.strerror) from error


def replace_file(name: str, data: bytes, mode: int, *, dir_fd: int) -> None:
    """Gives the file ``name`` new content: readers see the old bytes or the new ones, also after a power
    cut."""
    scratch = _write_scratch(name, data, mode, dir_fd)
    try:
        os.rename(scratch, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        _unlink_quietly(scratch, dir_fd)
        raise
    sync(dir_fd)


def create_file_once(name: str, data: bytes, mode: int, *, dir_fd: int) -> bool:
    """Makes the file ``name`` appear whole, unless one is there already; returns whether it was this
    call's."""
    scratch = _write_scratch(name, data, mode, dir_fd)
    try:
        os.link(scratch, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        _unlink_quietly(scratch, dir_fd)
    sync(dir_fd)
    return True


def is_scratch(name: str) -> bool:
    """Whether ``name`` is a leftover of an interrupted ``replace_file`` or ``create_file_once``."""
    return name.startswith(_SCRATCH_MARK)


def remove_tree(name: str, *, dir_fd: int) -> None:
    """Unlinks ``name`` and everything below it, read-only directories included; a link goes, not what it
    points to.

    Names that vanish meanwhile are no error, so that two sweepers may meet.
    """
    try:
        fd = open_directory(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)
        return
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o700 != 0o700:
            os.fchmod(fd, 0o700)
        for child in os.listdir(fd):
            remove_tree(child, dir_fd=fd)
    finally:
        os.close(fd)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=dir_fd)


def _write_scratch(name: str, data: bytes, mode: int, dir_fd: int) -> str:
    scratch = f"{_SCRATCH_MARK}{name}.{secrets.token_hex(8)}"
    fd = create_file(scratch, dir_fd=dir_fd)
    try:
        os.fchmod(fd, mode)
        write_all(fd, data)
        sync(fd)
    except BaseException:
        _unlink_quietly(scratch, dir_fd)
        raise
    finally:
        os.close(fd)
    return scratch


def _unlink_quietly(name: str, dir_fd: int) -> None:
    with suppress(OSError):  # a leftover is swept at the next open
        os.unlink(name, dir_fd=dir_fd)
