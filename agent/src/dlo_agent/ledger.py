"""The ledger on disk: one small file in the root's part for the agent, replaced whole.

A file that is missing or damaged costs rebuilding the memory (every listed entry is found again by its key)
and never an entry: what is not remembered is not evicted for its age. Must not decide anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

import structlog
from dlo_cache import atomic
from dlo_cache.canonical import strict_json
from dlo_cache.errors import CacheError, Invalid, NotFound
from dlo_cache.oserrors import os_errors
from dlo_cache.root import Root

from dlo_agent.references import VERSION, Binding, Ledger, Release, Resolution

FOLDER: Final = "agent"
FILE: Final = "references.json"
_MODE: Final = 0o640
_FOLDER_MODE: Final = 0o750
_LIMIT: Final = 64 << 20

_log = structlog.get_logger(__name__)


def load(root: Root) -> Ledger:
    """The ledger of the root, empty where there is none that can be read."""
    with _folder(root) as folder_fd:
        for name in os.listdir(folder_fd):
            if atomic.is_scratch(name):  # of a process that died while it wrote: there is one agent a root
                atomic.remove_tree(name, dir_fd=folder_fd)
        try:
            with os_errors(f"reading {FILE}"):
                data = atomic.read_file(FILE, dir_fd=folder_fd, limit=_LIMIT)
        except NotFound:
            return Ledger()
        except CacheError:
            _log.warning("Started with no references: the file cannot be read", exc_info=True)
            return Ledger()
        try:
            return from_json(strict_json(data, FILE))
        except (Invalid, KeyError, TypeError, AttributeError):
            _log.warning("Started with no references: the file is damaged", exc_info=True)
            return Ledger()


def save(root: Root, ledger: Ledger) -> None:
    """Replaces the file; raises NoSpace, Denied or Unavailable as the file system does."""
    data = json.dumps(to_json(ledger), sort_keys=True).encode() + b"\n"
    with _folder(root) as folder_fd, os_errors(f"writing {FILE}"):
        atomic.replace_file(FILE, data, _MODE, dir_fd=folder_fd)


def to_json(ledger: Ledger) -> dict[str, Any]:
    """The ledger as JSON values."""
    return {"version": VERSION, **asdict(ledger)}


def from_json(document: Any) -> Ledger:
    """The ledger that ``to_json`` gave; an unknown version gives an empty one."""
    if document["version"] != VERSION:
        return Ledger()
    return Ledger(
        uid=document["uid"],
        generation=document["generation"],
        resolutions={key: Resolution(**each) for key, each in document["resolutions"].items()},
        bindings={key: Binding(**each) for key, each in document["bindings"].items()},
        released={key: Release(**each) for key, each in document["released"].items()},
        verified=dict(document["verified"]),
        used=dict(document["used"]),
    )


@contextmanager
def _folder(root: Root) -> Iterator[int]:
    with os_errors(f"opening the agent's folder in {root.path}"):
        root_fd = atomic.open_directory(root.path)
        try:
            version_fd = atomic.open_below(root_fd, "v1")
        finally:
            os.close(root_fd)
        try:
            try:
                fd = atomic.make_directory(FOLDER, _FOLDER_MODE, dir_fd=version_fd)
                atomic.sync(version_fd)
            except FileExistsError:
                fd = atomic.open_directory(FOLDER, dir_fd=version_fd)
        finally:
            os.close(version_fd)
    try:
        yield fd
    finally:
        os.close(fd)
