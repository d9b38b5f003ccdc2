"""The progress files of a root: ``v1/progress/<entry id>.json``, each replaced whole.

The agent writes them, gates read them, also through a read-only mount. They are for people: nothing is
decided by them. Imports nothing heavy, since every engine pod starts with a gate.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from dlo_cache import atomic
from dlo_cache.canonical import strict_json
from dlo_cache.errors import CacheError
from dlo_cache.root import Root

SUFFIX: Final = ".json"
_MODE: Final = 0o644
_LIMIT: Final = 1 << 16
_ID: Final = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class Note:
    """One entry's progress as it stands in its file; ``updated`` in seconds since 1970."""

    entry: str
    phase: str
    done: int = 0
    total: int = 0
    key: str = ""
    component: str = ""
    coordinate: str = ""
    reason: str = ""
    message: str = ""
    updated: int = 0


def read_notes(root: Root) -> list[Note]:
    """All progress that can be read, sorted by entry id; a read-only root is enough."""
    found: list[Note] = []
    with suppress(CacheError, OSError), root.opened("progress") as progress_fd:
        for name in sorted(os.listdir(progress_fd)):
            if name.endswith(SUFFIX) and _ID.fullmatch(name.removesuffix(SUFFIX)):
                with suppress(CacheError, OSError, TypeError, KeyError):
                    data = atomic.read_file(name, dir_fd=progress_fd, limit=_LIMIT)
                    found.append(_note(strict_json(data, name)))
    return found


def _note(document: Any) -> Note:
    if not isinstance(document, dict):
        raise TypeError("no object")
    known = Note.__dataclass_fields__
    note = Note(**{name: value for name, value in document.items() if name in known})
    if not all(type(value) is int and value >= 0 for value in (note.done, note.total, note.updated)):
        raise TypeError("a count that is none")
    words = (note.entry, note.phase, note.key, note.component, note.coordinate, note.reason, note.message)
    if not all(isinstance(value, str) for value in words):
        raise TypeError("a word that is none")
    return note


def write_note(entry_id: str, note: Note | None, progress_fd: int) -> None:
    """Replaces the file of one entry, or removes it; raises OSError."""
    name = entry_id + SUFFIX
    if note is None:
        atomic.remove_tree(name, dir_fd=progress_fd)
    else:
        atomic.replace_file(name, json.dumps(asdict(note)).encode() + b"\n", _MODE, dir_fd=progress_fd)
