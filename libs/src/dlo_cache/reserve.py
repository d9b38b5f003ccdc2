"""Room on the disk, asked for before the first byte is written.

Some is always left over, so that the cache never fills the node's disk to the brim by itself.
Must not write: a build that is refused here has touched nothing.
"""

from __future__ import annotations

import os
from typing import Final

from dlo_cache.errors import NoSpace
from dlo_cache.oserrors import os_errors
from dlo_cache.root import Root

_LEAST_HEADROOM_BYTES: Final = 64 << 20
_HEADROOM_SHARE: Final = 100  # one hundredth of the file system
_BLOCK_BYTES: Final = 4096


def allocated(nbytes: int) -> int:
    """The bytes that a file of ``nbytes`` takes on the disk, in whole blocks."""
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def reserve(root: Root, needed_bytes: int, needed_files: int, *, subject: str) -> None:
    """Raises NoSpace (InsufficientDisk) with the bytes needed and free, unless ``subject`` fits beside the
    head-room.

    Head-room is the larger of 64 MiB and 1 % of the file system. On file systems that count them, inodes are
    asked for too (InsufficientInodes). The answer is of this moment: another writer may still take the room.
    """
    with os_errors(f"asking for the free space of {root.path}"):
        found = os.statvfs(root.ingest_dir)
    headroom = max(_LEAST_HEADROOM_BYTES, found.f_frsize * found.f_blocks // _HEADROOM_SHARE)
    free = max(0, found.f_frsize * found.f_bavail - headroom)
    if needed_bytes > free:
        raise NoSpace(
            f"{subject} needs {needed_bytes} bytes; {root.path} has {free} free beside {headroom} kept back",
            code="InsufficientDisk",
            hint="remove entries that nothing needs (`dlo cache rm`), or use a larger disk",
            needed_bytes=needed_bytes,
            free_bytes=free,
        )
    if found.f_files and needed_files > found.f_favail:
        raise NoSpace(
            f"{subject} needs {needed_files} files and {root.path} has {found.f_favail} inodes free",
            code="InsufficientInodes",
            hint="remove files from that file system",
        )
