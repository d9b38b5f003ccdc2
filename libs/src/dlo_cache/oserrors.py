"""Turns the operating system's errors into this package's, at the edge of a public function.

One table for the whole package, so that a full disk or a forbidden directory reads the same wherever it
shows. Must not swallow anything: every OSError becomes an error that names the subject, with the cause
chained.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dlo_cache.atomic import SyncError
from dlo_cache.errors import CacheError, Denied, Exists, Invalid, NoSpace, NotFound, Unavailable

_WRONG_KIND: Final = "a link or another kind of file lies where the cache keeps its own"
_DEVICE: Final = "the system log may say what the device reported"
_KINDS: Final[dict[int, tuple[type[CacheError], str | None, str]]] = {
    errno.ENOSPC: (NoSpace, "DiskFull", "free space on that file system and try again"),
    errno.EDQUOT: (NoSpace, "DiskFull", "raise the quota or free space, and try again"),
    errno.EROFS: (Denied, "ReadOnly", "the file system is mounted read-only"),
    errno.ENOENT: (NotFound, None, ""),
    errno.EEXIST: (Exists, None, ""),
    errno.ENOTEMPTY: (Exists, None, ""),
    errno.ELOOP: (Invalid, "UnsafePath", _WRONG_KIND),
    errno.ENOTDIR: (Invalid, "UnsafePath", _WRONG_KIND),
    errno.EISDIR: (Invalid, "UnsafePath", _WRONG_KIND),
    errno.ENAMETOOLONG: (Invalid, "UnsafePath", "use a shorter path"),
}


def translated(error: OSError, doing: str) -> CacheError:
    """The error of this package for ``error``; ``doing`` is what failed, on what ("writing /x/y")."""
    message = f"{doing}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = f"this process runs as uid {os.geteuid()}, gid {os.getegid()}; check owner and mode"
        return Denied(message, hint=hint)
    kind, code, hint = _KINDS.get(error.errno or 0, (Unavailable, None, _DEVICE))
    if kind is Unavailable and isinstance(error, SyncError):
        return Unavailable(message, code="SyncFailed", hint=_DEVICE)
    return kind(message, code=code, hint=hint)


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """Raises every OSError of the block as the CacheError that ``translated`` picks."""
    try:
        yield
    except OSError as error:
        raise translated(error, doing) from error
