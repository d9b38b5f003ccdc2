"""Files that several ``Files`` entries hold: found by sha256 and size, so that they lie on the disk once.

Must not copy; a file that cannot be shared is simply not offered.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from dlo_cache import atomic
from dlo_cache.entry import open_entry
from dlo_cache.errors import CacheError
from dlo_cache.keys import FILES_KIND
from dlo_cache.manifest import FileRecord
from dlo_cache.names import split_path
from dlo_cache.root import Root
from dlo_cache.store import inspect, list_entries

_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Shared:
    """A file that the entry ``key`` holds under the name in ``record``."""

    key: str
    record: FileRecord


def shared_files(root: Root) -> dict[tuple[str, int], Shared]:
    """By sha256 and size: the files of all usable ``Files`` entries."""
    found: dict[tuple[str, int], Shared] = {}
    for info in list_entries(root):
        if info.problem or info.kind != FILES_KIND:
            continue
        manifest = inspect(root, info.key).manifest
        if manifest is None:
            continue
        records = {record.name: record for record in manifest.files}
        sources: list[dict[str, Any]] = manifest.preimage["files"]
        for source in sources:
            found.setdefault((source["sha256"], source["size"]), Shared(info.key, records[source["name"]]))
    return found


@contextmanager
def opened_for_link(root: Root, shared: Shared) -> Iterator[tuple[str, int] | None]:
    """Name and directory descriptor of the file, under a reader's lease; None if it is gone or its bytes are
    bad.

    The bytes are checked first: a link would carry damage into an entry that nobody has doubted yet.
    """
    try:
        entry = open_entry(root.entries_dir / shared.key)
    except CacheError:
        yield None
        return
    with entry, root.opened("entries") as entries_fd:
        *folders, leaf = split_path(shared.record.name)
        folder_fd = atomic.open_below(entries_fd, shared.key, *folders)
        try:
            good = _digest(leaf, folder_fd) == shared.record.digest
            yield (leaf, folder_fd) if good else None
        finally:
            os.close(folder_fd)


def _digest(name: str, dir_fd: int) -> str:
    hasher = blake3()
    with open(atomic.open_file(name, dir_fd=dir_fd), "rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()
