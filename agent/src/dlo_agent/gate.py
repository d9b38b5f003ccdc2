"""The gate in front of an engine: waits for the node's entries, then writes the hand-over file.

Needs no API server and no agent: a warm node is passed within milliseconds by opening the entries that are
wanted and checking manifest, sizes and headers; the engine checks the bytes. On a cold one it says how far the
agent is and goes on looking until its deadline. Must not ask anyone to fetch anything, and writes nothing but
the hand-over file.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dlo_cache.entry import open_entry
from dlo_cache.errors import CacheError, Corrupt
from dlo_cache.handover import Handover, HandoverEntry, write_handover
from dlo_cache.keys import FILES_KIND, LAYOUT_KIND
from dlo_cache.names import is_key
from dlo_cache.root import MARKER, Root

from dlo_agent.errors import DeadlinePassed, UsageError
from dlo_agent.notes import Note, read_notes

_FIELDS: Final = frozenset({"rank", "component", "coordinate", "kind", "inputKey", "manifestSha256"})
_FIRST_PAUSE: Final = 0.1
_STEP_PERCENT: Final = 10
_SHORT: Final = 12
_COORDINATE: Final = re.compile(r"(0|[1-9][0-9]{0,5})/([1-9][0-9]{0,5})", re.ASCII)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Want:
    """One entry that the engine needs: the hand-over's entry, its folder still to be found."""

    entry: HandoverEntry

    @property
    def name(self) -> str:
        """The entry for people."""
        if self.entry.kind == FILES_KIND:
            return f"files {self.entry.input_key[:_SHORT]}"
        return f"{self.entry.component} {self.entry.coordinate}"


def parse_wants(text: str) -> tuple[Want, ...]:
    """The wanted entries from their JSON; raises UsageError that names entry and key."""
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--want-json is no JSON: {error}") from error
    if not isinstance(stated, list) or not stated:
        raise UsageError("--want-json is no list of entries, or an empty one")
    return tuple(_want(each, f"--want-json: entry {at}") for at, each in enumerate(stated))


def pass_gate(
    root: Path,
    wants: tuple[Want, ...],
    out: Path,
    *,
    deadline_seconds: float,
    poll_seconds: float,
    optional_layout: bool,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Handover:
    """Returns once every wanted entry is usable and the hand-over file is written.

    With ``optional_layout`` only the ``Files`` entries are waited for; a component of which a ``Layout`` entry
    is not usable by then is left out. Raises DeadlinePassed saying what lacks and why; CacheError if the file cannot be
    written.
    """
    began = clock()
    pause = min(_FIRST_PAUSE, poll_seconds)
    told = _Telling(root, say)
    while True:
        lacking = {want: problem for want in wants if (problem := _problem(root, want)) is not None}
        if all(optional_layout and want.entry.kind == LAYOUT_KIND for want in lacking):
            break
        told.tell(lacking)
        left = deadline_seconds - (clock() - began)
        if left <= 0:
            raise DeadlinePassed(
                f"not ready after {deadline_seconds:g} s: {told.reason(lacking)}",
                hint="see the status of this node's NodeWeightCache",
            )
        sleep(min(pause, left))
        pause = min(pause * 2, poll_seconds)
    for want, problem in lacking.items():
        say(f"going on without {want.name}: {problem.message}")
    # Ranks of one component either all have their entry or all cut the checkpoint.
    without = {want.entry.component for want in lacking}
    handover = Handover(str(root), tuple(w.entry for w in wants if w.entry.component not in without))
    write_handover(out, handover)
    say(f"{len(handover.entries)} of {len(wants)} entries ready after {clock() - began:.3f} s")
    return handover


def _want(stated: Any, where: str) -> Want:
    if not isinstance(stated, Mapping) or stated.keys() != _FIELDS:
        raise UsageError(f"{where} needs exactly the keys {', '.join(sorted(_FIELDS))}")
    key, sha256, kind = stated["inputKey"], stated["manifestSha256"], stated["kind"]
    if not isinstance(key, str) or not is_key(key) or not isinstance(sha256, str) or not is_key(sha256):
        raise UsageError(f"{where}: inputKey and manifestSha256 have 64 hexadecimal digits")
    if kind not in (LAYOUT_KIND, FILES_KIND):
        raise UsageError(f"{where}: kind {kind!r} is not {LAYOUT_KIND} or {FILES_KIND}")
    place = (stated["rank"], stated["component"], stated["coordinate"])
    if kind == FILES_KIND and place != (None, None, None):
        raise UsageError(f"{where}: kind Files has no rank, component or coordinate")
    if kind == LAYOUT_KIND:
        found = _COORDINATE.fullmatch(place[2]) if isinstance(place[2], str) else None
        if type(place[0]) is not int or not isinstance(place[1], str) or found is None:
            raise UsageError(f"{where}: kind Layout needs a rank, a component and a coordinate like 0/2")
        if place[0] != int(found[1]):
            raise UsageError(f"{where}: rank {place[0]} is not that of coordinate {place[2]}")
    rank, component, coordinate = place
    directory = f"v1/entries/{key}"
    return Want(HandoverEntry(rank, component, coordinate, kind, key, directory, sha256))


def _problem(root: Path, want: Want) -> CacheError | None:
    """Why a wanted entry cannot be used now, or None."""
    wanted = want.entry
    try:
        with open_entry(root / wanted.dir, manifest_sha256=wanted.manifest_sha256) as entry:
            coordinate = entry.manifest.coordinate
            place = None if coordinate is None else f"{coordinate[0]}/{coordinate[1]}"
            found = (entry.key, entry.kind, entry.manifest.component, place)
            asked = (wanted.input_key, wanted.kind, wanted.component, wanted.coordinate)
            if found != asked:
                raise Corrupt(f"entry {wanted.input_key[:_SHORT]} is {found[1:]}, not {asked[1:]}")
    except CacheError as error:
        return error
    return None


class _Telling:
    """Says what is waited for: one line a step, not one a look."""

    def __init__(self, root: Path, say: Say) -> None:
        self._root, self._say = root, say
        self._last: dict[str, str] = {}

    def tell(self, lacking: Mapping[Want, CacheError]) -> None:
        """One line for every entry whose state has moved a step since it was last told."""
        notes = self._notes()
        for want, problem in lacking.items():
            line = self._line(want, problem, notes)
            if self._last.get(want.name) != line:
                self._last[want.name] = line
                self._say(line)

    def reason(self, lacking: Mapping[Want, CacheError]) -> str:
        """What lacks, on one line."""
        notes = self._notes()
        return "; ".join(self._line(want, problem, notes) for want, problem in lacking.items())

    def _notes(self) -> dict[str, Note]:
        return {note.key: note for note in read_notes(Root(self._root, "")) if note.key}

    def _line(self, want: Want, problem: CacheError, notes: Mapping[str, Note]) -> str:
        note = notes.get(want.entry.input_key)
        if note is not None and note.phase == "Failed":
            return f"{want.name}: {note.reason}: {note.message}"
        if note is not None and note.total:
            percent = 100 * note.done // note.total // _STEP_PERCENT * _STEP_PERCENT
            return f"{want.name}: {note.phase} {percent} % of {note.total} bytes"
        if not (self._root / MARKER).exists():
            return f"{want.name}: RootNotMounted: {self._root} is no cache root"
        if problem.code == "NotFound":
            return f"{want.name}: waiting for the node's agent to build it"
        return f"{want.name}: {problem.code}: {problem.message}"
