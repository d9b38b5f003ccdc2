"""How far the work for each entry is: kept in memory for status, written to files for gates.

The files are written at most once a second each, by a thread of their own, so that a slow disk never slows
down a build. A write that fails is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Final

from dlo_cache.errors import CacheError
from dlo_cache.root import Root

from dlo_agent.notes import Note, read_notes, write_note
from dlo_agent.world import Headway

WRITE_EVERY_SECONDS: Final = 1.0


class Board:
    """The progress of all entries; any thread may write to it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._notes: dict[str, Note] = {}
        self._dirty: set[str] = set()
        self._stop = threading.Event()
        self._root: Root | None = None

    def attach(self, root: Root | None) -> None:
        """Writes below this root from now on (None: nowhere), and takes up what an earlier process left."""
        with self._lock:
            self._root = root
            self._notes = {}
            self._dirty = set()
        if root is not None:
            left = {note.entry: note for note in read_notes(root)}
            with self._lock:
                self._notes = left | self._notes

    def post(self, note: Note) -> None:
        """Sets the progress of one entry."""
        with self._lock:
            self._notes[note.entry] = replace(note, updated=int(self._clock()))
            self._dirty.add(note.entry)

    def advance(self, entry_ids: Collection[str], phase: str, done: int, total: int) -> None:
        """Moves entries on together: each is ``done`` of ``total`` of its own bytes."""
        with self._lock:
            for entry_id in entry_ids:
                note = self._notes.get(entry_id)
                if note is not None:
                    part = note.total * done // total if total else note.total
                    self._notes[entry_id] = replace(note, phase=phase, done=part, updated=int(self._clock()))
                    self._dirty.add(entry_id)

    def fail(self, entry_ids: Collection[str], reason: str, message: str) -> None:
        """Says why the work for some entries ended."""
        with self._lock:
            for entry_id in entry_ids:
                note = self._notes.get(entry_id, Note(entry_id, "Failed"))
                self._notes[entry_id] = replace(
                    note, phase="Failed", reason=reason, message=message, updated=int(self._clock())
                )
                self._dirty.add(entry_id)

    def drop(self, entry_ids: Collection[str]) -> None:
        """Removes entries that are done with, and their files."""
        with self._lock:
            for entry_id in entry_ids:
                self._notes.pop(entry_id, None)
                self._dirty.add(entry_id)

    def headway(self) -> dict[str, Headway]:
        """How far each entry is."""
        with self._lock:
            return {
                entry_id: Headway(note.phase, note.done, note.total, note.key)
                for entry_id, note in self._notes.items()
            }

    def run(self) -> None:
        """Writes what has changed, once a second, until ``stop``; belongs in a thread of its own."""
        while not self._stop.wait(WRITE_EVERY_SECONDS):
            self.flush()
        self.flush()

    def stop(self) -> None:
        """Ends ``run``."""
        self._stop.set()

    def flush(self) -> None:
        """Writes what has changed now."""
        with self._lock:
            root, dirty = self._root, self._dirty
            notes = {entry_id: self._notes.get(entry_id) for entry_id in dirty}
            self._dirty = set()
        if root is None or not notes:
            return
        with suppress(CacheError), root.opened("progress") as progress_fd:
            for entry_id, note in notes.items():
                with suppress(OSError):  # for people only: the work itself goes on
                    write_note(entry_id, note, progress_fd)
