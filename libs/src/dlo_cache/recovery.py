"""What a process that starts on a root puts right after the death of an earlier one.

Everything here is safe to repeat and to run beside builders and readers at work: their locks say that they
live. Must not judge the content of entries.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from dlo_cache import atomic
from dlo_cache.errors import Busy, NotFound
from dlo_cache.ingest import sweep_ingest
from dlo_cache.names import is_key
from dlo_cache.oserrors import os_errors
from dlo_cache.removal import repair_mode, sweep_trash
from dlo_cache.root import Root
from dlo_cache.rootprobe import PROBE_PREFIX

_SCRATCH_AGE_SECONDS: Final = 3600.0  # nobody takes that long between writing a small file and renaming it
_SCRATCH_PLACES: Final = ("ingest", "progress", "source-digests", "quarantine")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was put right: names removed from ingest, trash and scratch, keys whose mode was repaired."""

    ingest: tuple[str, ...]
    trash: tuple[str, ...]
    scratch: tuple[str, ...]
    modes: tuple[str, ...]


def recover(root: Root, *, clock: Callable[[], float] = time.time) -> Recovered:
    """Removes leftovers of dead builders and evictions, and repairs what a publish cut short left writable.

    ``clock`` gives seconds since 1970. Raises Denied, NoSpace or Unavailable as the file system does.
    """
    return Recovered(
        ingest=sweep_ingest(root),
        trash=sweep_trash(root),
        scratch=_sweep_scratch(root, clock() - _SCRATCH_AGE_SECONDS),
        modes=_repair_modes(root),
    )


def _sweep_scratch(root: Root, before: float) -> tuple[str, ...]:
    swept: list[str] = []
    for place in _SCRATCH_PLACES:
        with root.opened(place) as place_fd, os_errors(f"sweeping {place}"):
            for name in sorted(os.listdir(place_fd)):
                if atomic.is_scratch(name) or name.startswith(PROBE_PREFIX):
                    with suppress(FileNotFoundError):
                        if os.stat(name, dir_fd=place_fd, follow_symlinks=False).st_mtime < before:
                            atomic.remove_tree(name, dir_fd=place_fd)
                            swept.append(name)
    return tuple(swept)


def _repair_modes(root: Root) -> tuple[str, ...]:
    repaired: list[str] = []
    with root.opened("entries") as entries_fd, os_errors(f"reading {root.entries_dir}"):
        for name in sorted(os.listdir(entries_fd)):
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=entries_fd, follow_symlinks=False)
                if is_key(name) and stat.S_ISDIR(found.st_mode) and found.st_mode & 0o222:
                    with suppress(Busy, NotFound):
                        if repair_mode(root, name):
                            repaired.append(name)
    return tuple(repaired)
