"""What is in the root: every entry as a reader would find it, its lease, and the room on the disk.

Looking closely costs reading a manifest, so an entry is looked at again only when its folder or manifest has
changed, or after a while. Leases are asked for every time, without disturbing anyone. Must not change
anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from dlo_cache import atomic, locks, store
from dlo_cache.errors import CacheError, NotFound
from dlo_cache.names import LEASE, MANIFEST, is_key
from dlo_cache.oserrors import os_errors
from dlo_cache.root import Root

from dlo_agent.world import Disk, Stored

LOOK_AGAIN_SECONDS: Final = 600.0
_LEAST_HEADROOM_BYTES: Final = 64 << 20
_HEADROOM_SHARE: Final = 100

_Mark = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    mark: _Mark
    at: float
    stored: Stored


class Inventory:
    """The entries of one root; not for use by several threads."""

    def __init__(self, root: Root, clock: Callable[[], float]) -> None:
        self._root, self._clock = root, clock
        self._seen: dict[str, _Seen] = {}

    def read(self) -> dict[str, Stored]:
        """All entries by key. Raises Denied or Unavailable as the file system does."""
        with self._root.opened("entries") as entries_fd, os_errors(f"reading {self._root.entries_dir}"):
            names = [name for name in os.listdir(entries_fd) if is_key(name)]
            found = {name: seen for name in names if (seen := self._look(name, entries_fd)) is not None}
            self._seen = found
            return {
                name: replace(seen.stored, leased=_leased(name, entries_fd)) for name, seen in found.items()
            }

    def forget(self, key: str) -> None:
        """Looks at this entry closely the next time."""
        self._seen.pop(key, None)

    def _look(self, name: str, entries_fd: int) -> _Seen | None:
        mark = _mark(name, entries_fd)
        known = self._seen.get(name)
        if known is not None and known.mark == mark and self._clock() - known.at < LOOK_AGAIN_SECONDS:
            return known
        try:
            info = store.inspect(self._root, name).info
        except NotFound:
            return None
        except CacheError as error:
            return _Seen(mark, self._clock(), Stored(name, problem=error.message, problem_code=error.code))
        stored = Stored(
            key=name,
            kind=info.kind,
            component=info.component,
            coordinate=info.coordinate,
            bytes=info.bytes,
            manifest_sha256=info.manifest_sha256,
            content_digest=info.content_digest,
            published=info.published_time,
            problem=info.problem,
            problem_code=info.code,
        )
        return _Seen(mark, self._clock(), stored)


def look_at_disk(root: Root, filesystem: str | None, headroom_bytes: int) -> Disk:
    """The room on the root's file system; ``free`` is beside the larger of ``headroom_bytes`` and what every
    build keeps back anyway."""
    with os_errors(f"asking for the free space of {root.path}"):
        found = os.statvfs(root.ingest_dir)
    total = found.f_frsize * found.f_blocks
    kept = max(headroom_bytes, _LEAST_HEADROOM_BYTES, total // _HEADROOM_SHARE)
    return Disk(
        total=total,
        free=max(0, found.f_frsize * found.f_bavail - kept),
        filesystem=filesystem,
        inodes_free=found.f_favail if found.f_files else None,
    )


def _mark(name: str, entries_fd: int) -> _Mark:
    """What changes when an entry is exchanged or its manifest is; () for one that cannot be looked at."""
    mark: list[int] = []
    with suppress(OSError):
        for path in (name, f"{name}/{MANIFEST}"):
            state = os.stat(path, dir_fd=entries_fd, follow_symlinks=False)
            mark += [state.st_dev, state.st_ino, state.st_mode, state.st_size, state.st_ctime_ns]
    return tuple(mark)


def _leased(name: str, entries_fd: int) -> bool:
    with suppress(OSError, CacheError):
        entry_fd = atomic.open_directory(name, dir_fd=entries_fd)
        try:
            lease_fd = atomic.open_file(LEASE, dir_fd=entry_fd)
        finally:
            os.close(entry_fd)
        try:
            return locks.write_would_block(lease_fd)
        finally:
            os.close(lease_fd)
    return False
