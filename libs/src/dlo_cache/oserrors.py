"""Turns the operating system's errors into this package's, at the edge of a public function.

One table for the whole store, so that a full disk or a forbidden directory reads the same wherever it shows.
Must not swallow anything: every OSError becomes an error that names the subject, with the cause chained.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from dlo_cache.errors import CacheError, Denied, Exists, Invalid, NoSpace, NotFound, Unavailable

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_UNSAFE = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR}


def translated(error: OSError, doing: str) -> CacheError:
    """The error of this package that says what `error` means; `doing` is what failed, on what ("writing x")."""
    reason = error.strerror or str(error)
    message = f"{doing}: {reason}"
    number = error.errno
    if number in _FULL:
        return NoSpace(message, code="DiskFull", hint="free space on that file system; the build can then be repeated")
    if number == errno.EROFS:
        return Denied(message, hint="the file system is mounted read-only")
    if number in _DENIED:
        return Denied(message, hint=f"this process runs as uid {os.geteuid()}, gid {os.getegid()}")
    if number == errno.ENOENT:
        return NotFound(message)
    if number in (errno.EEXIST, errno.ENOTEMPTY):
        return Exists(message)
    if number in _UNSAFE:
        return Invalid(message, code="UnsafePath", hint="a link or another kind of file lies where the cache keeps its own")
    return Unavailable(message, hint="see the system log of the node for the device's own report")


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """Raises every OSError of the block as the CacheError that `translated` picks."""
    try:
        yield
    except OSError as error:
        raise translated(error, doing) from error
