"""What a builder finds under a key before it builds: a usable entry, nothing, or something to be set aside.

Usable means that manifest, sizes and headers check. A directory's mere existence means nothing.
Must not build.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dlo_cache import atomic
from dlo_cache.entry import open_entry
from dlo_cache.errors import Busy, Corrupt, Denied, Invalid, NewerFormat, NotFound
from dlo_cache.ingest import ENTRY_MODE
from dlo_cache.manifest import Manifest
from dlo_cache.oserrors import os_errors
from dlo_cache.removal import set_aside
from dlo_cache.root import Root

_EVICTION_PATIENCE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """An entry that was asked for and is there: built now, or ``reused``. ``bytes`` are those of its data
    files."""

    key: str
    manifest_sha256: str
    content_digest: str
    bytes: int
    reused: bool
    path: Path


def present(root: Root, key: str) -> Built | None:
    """The usable entry ``key``, made durable, or None once the way is free to build it; the caller holds its
    lock.

    An empty directory in the way is removed; a broken entry, or one that others may write, is set aside.
    Raises NewerFormat for an entry of a later version, which is left alone, and Busy for one that is being
    removed and does not go.
    """
    path = root.entries_dir / key
    deadline = time.monotonic() + _EVICTION_PATIENCE_SECONDS
    while True:
        if _is_absent(root, key):
            return None
        try:
            with open_entry(path) as entry:
                _settle(root, key)
                return built(path, entry.manifest, entry.manifest_sha256, reused=True)
        except NewerFormat:
            raise
        except Busy:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
        except (Corrupt, Invalid, NotFound, Denied) as error:
            set_aside(root, key, error.message)


def built(path: Path, manifest: Manifest, manifest_sha256: str, *, reused: bool) -> Built:
    """The report on the entry at ``path``."""
    return Built(
        key=manifest.key,
        manifest_sha256=manifest_sha256,
        content_digest=manifest.content_digest,
        bytes=manifest.total_bytes,
        reused=reused,
        path=path,
    )


def _is_absent(root: Root, key: str) -> bool:
    """Whether nothing has the entry's name, after removing an empty directory that somebody made there."""
    with root.opened("entries") as entries_fd, os_errors(f"looking for entry {key}"):
        try:
            found = os.stat(key, dir_fd=entries_fd, follow_symlinks=False)
        except FileNotFoundError:
            return True
        if not stat.S_ISDIR(found.st_mode):
            set_aside(root, key, "not a directory")
            return True
        try:
            os.rmdir(key, dir_fd=entries_fd)
        except OSError:
            return False
        _log.warning("Removed an empty directory in an entry's place", extra={"key": key})
        return True


def _settle(root: Root, key: str) -> None:
    """Completes what a publisher that died after its rename left undone: the mode, and the name's
    durability."""
    with root.opened("entries") as entries_fd, os_errors(f"settling entry {key}"):
        fd = atomic.open_directory(key, dir_fd=entries_fd)
        try:
            if os.fstat(fd).st_mode & 0o222:
                os.fchmod(fd, ENTRY_MODE)
        finally:
            os.close(fd)
        atomic.sync(entries_fd)
