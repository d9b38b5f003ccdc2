"""The store seen from above: what is in it, finding by a short key, removing, setting aside.

The directories are the only state: nothing is indexed, so nothing can be out of step. Listing reads manifests
and believes none blindly: a broken entry is listed with its problem, one of a later format is reported and
left alone. Must not decide what should stay: ``gc`` is told.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dlo_cache import atomic, locks, removal
from dlo_cache.entry import MANIFEST_LIMIT, open_entry
from dlo_cache.errors import Busy, CacheError, Corrupt, Invalid, NewerFormat, NotFound
from dlo_cache.manifest import Manifest
from dlo_cache.names import LEASE, MANIFEST, PRODUCER, check_prefix, is_key
from dlo_cache.oserrors import os_errors
from dlo_cache.root import Root

_PRODUCER_LIMIT: Final = 1 << 20
_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry at a glance. ``problem`` is "" for one that looks right, else why it cannot be used; ``code``
    its word.

    ``bytes`` are those of the data files, ``published_time`` is in seconds since 1970, ``coordinate`` is
    "rank/size". Where the manifest cannot be read, what it would say is None or 0.
    """

    key: str
    path: Path
    kind: str | None = None
    component: str | None = None
    coordinate: str | None = None
    dtype: str | None = None
    bytes: int = 0
    files: int = 0
    manifest_sha256: str | None = None
    content_digest: str | None = None
    published_time: float = 0.0
    leased: bool = False
    problem: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """One entry in full; ``manifest`` is None where it cannot be read, ``producer`` empty."""

    info: EntryInfo
    manifest: Manifest | None
    producer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a gc did: the keys it removed, those that somebody uses, and the names that are not its to
    take."""

    removed: tuple[str, ...]
    busy: tuple[str, ...]
    left: tuple[str, ...]
    bytes: int


def list_entries(root: Root) -> list[EntryInfo]:
    """All entries by key, from their manifests; sizes and bytes are not checked (see ``inspect`` and
    ``verify``)."""
    with root.opened("entries") as entries_fd:
        with os_errors(f"reading {root.entries_dir}"):
            names = sorted(os.listdir(entries_fd))
        found = (_read(root, name, entries_fd) for name in names)
        return [each.info for each in found if each is not None]


def find(root: Root, key: str) -> EntryInfo | None:
    """The entry whose key is or begins with ``key`` (6 digits at least), or None; Invalid if several begin
    so."""
    try:
        full = resolve(root, key)
    except NotFound:
        return None
    with root.opened("entries") as entries_fd:
        found = _read(root, full, entries_fd)
    return found.info if found is not None else None


def resolve(root: Root, key: str) -> str:
    """The full key that ``key`` abbreviates; raises NotFound, or Invalid (InvalidKey, AmbiguousKey)."""
    check_prefix(key)
    with os_errors(f"reading {root.entries_dir}"):
        matches = sorted(
            name for name in os.listdir(root.entries_dir) if name.startswith(key) and is_key(name)
        )
    if not matches:
        raise NotFound(f"there is no entry {key}", key=key)
    if len(matches) > 1:
        shown = ", ".join(match[: len(key) + 6] for match in matches[:_SHOWN])
        raise Invalid(
            f"{len(matches)} keys begin with {key}: {shown}", code="AmbiguousKey", hint="give more digits"
        )
    return matches[0]


def inspect(root: Root, key: str) -> Inspection:
    """The entry ``key`` (or its prefix) in full, opened as a reader would: sizes and headers are checked as
    well."""
    full = resolve(root, key)
    with root.opened("entries") as entries_fd:
        found = _read(root, full, entries_fd)
    if found is None:
        raise NotFound(f"there is no entry {full}", key=full)
    if found.info.problem:
        return found
    try:
        open_entry(found.info.path).close()
    except CacheError as error:
        return replace(found, info=replace(found.info, problem=error.message, code=error.code))
    return found


def remove(root: Root, key: str) -> str:
    """Evicts the entry ``key`` (or its prefix) and returns its key.

    Raises Busy naming it while a reader holds its lease, NotFound, NewerFormat for one of a later format.
    """
    full = resolve(root, key)
    info = find(root, full)
    if info is not None and info.code == NewerFormat.code:
        raise NewerFormat(
            f"entry {full} is of a later format", hint="remove it with the release that made it", key=full
        )
    removal.evict(root, full)
    return full


def quarantine(root: Root, key: str, reason: str, *, files: Collection[str] = ()) -> tuple[str, ...]:
    """Sets the entry ``key`` (or its prefix) aside, and every other entry that shares one of its bad
    ``files`` by link.

    Returns the keys. Readers keep what they mapped. Raises NotFound, Busy while someone builds or removes the
    entry.
    """
    full = resolve(root, key)
    bad = _inodes(root, full, files)
    sharers = (
        [info.key for info in list_entries(root) if info.key != full and _shares(root, info, bad)]
        if bad
        else []
    )
    removal.quarantine(root, full, reason)
    done = [full]
    for sharer in sharers:
        with suppress(NotFound):
            removal.quarantine(root, sharer, f"shares a file with {full}: {reason}")
            done.append(sharer)
    return tuple(done)


def gc(root: Root, keep: Collection[str]) -> Collected:
    """Evicts every entry whose full key is not in ``keep``, broken ones included; what is in use stays.

    Entries of a later format, names that are no keys and what is no directory are left alone.
    """
    removed: list[str] = []
    busy: list[str] = []
    left: list[str] = []
    freed = 0
    for info in list_entries(root):
        if info.key in keep:
            continue
        if info.code in (NewerFormat.code, _STRANGER):
            left.append(info.key)
            continue
        try:
            removal.evict(root, info.key)
        except Busy:
            busy.append(info.key)
        except NotFound:
            continue
        except Invalid:  # no directory: nothing that an eviction could take
            left.append(info.key)
        else:
            removed.append(info.key)
            freed += info.bytes
    return Collected(tuple(removed), tuple(busy), tuple(left), freed)


_STRANGER: Final = "NotAnEntry"


def _read(root: Root, name: str, entries_fd: int) -> Inspection | None:
    """The entry called ``name``, or None if it vanished meanwhile."""
    info = EntryInfo(name, root.entries_dir / name)
    if not is_key(name):
        return Inspection(replace(info, problem="the name is no entry key", code=_STRANGER), None, {})
    try:
        with os_errors(f"opening entry {name}"):
            entry_fd = atomic.open_directory(name, dir_fd=entries_fd)
    except NotFound:
        return None
    except CacheError as error:
        return Inspection(replace(info, problem=error.message, code=error.code), None, {})
    try:
        info = replace(info, leased=_leased(entry_fd))
        return _read_open(info, entry_fd)
    except CacheError as error:
        return Inspection(replace(info, problem=error.message, code=error.code), None, _producer(entry_fd))
    finally:
        os.close(entry_fd)


def _read_open(info: EntryInfo, entry_fd: int) -> Inspection:
    try:
        with os_errors(f"reading the manifest of entry {info.key}"):
            data = atomic.read_file(MANIFEST, dir_fd=entry_fd, limit=MANIFEST_LIMIT)
            published = os.stat(MANIFEST, dir_fd=entry_fd, follow_symlinks=False).st_mtime
    except NotFound as error:
        raise Corrupt(f"entry {info.key} has no manifest") from error
    manifest = Manifest.from_bytes(data)
    if manifest.key != info.key:
        raise Corrupt(f"entry {info.key} has the manifest of entry {manifest.key}")
    coordinate = manifest.coordinate
    known = replace(
        info,
        kind=manifest.kind,
        component=manifest.component,
        coordinate=None if coordinate is None else f"{coordinate[0]}/{coordinate[1]}",
        dtype=manifest.preimage.get("dtype"),
        bytes=manifest.total_bytes,
        files=len(manifest.files),
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        content_digest=manifest.content_digest,
        published_time=published,
    )
    return Inspection(known, manifest, _producer(entry_fd))


def _producer(entry_fd: int) -> Mapping[str, Any]:
    try:
        note = json.loads(atomic.read_file(PRODUCER, dir_fd=entry_fd, limit=_PRODUCER_LIMIT))
    except (OSError, ValueError):  # for people only: its absence is no problem of the entry
        return {}
    return note if isinstance(note, dict) else {}


def _leased(entry_fd: int) -> bool:
    try:
        lease_fd = atomic.open_file(LEASE, dir_fd=entry_fd)
    except OSError:
        return False
    try:
        return locks.write_would_block(lease_fd)
    finally:
        os.close(lease_fd)


def _inodes(root: Root, key: str, files: Collection[str]) -> set[tuple[int, int]]:
    found = set()
    for file in files:
        with suppress(OSError):
            state = (root.entries_dir / key / file).lstat()
            found.add((state.st_dev, state.st_ino))
    return found


def _shares(root: Root, info: EntryInfo, bad: set[tuple[int, int]]) -> bool:
    if info.kind != "Files":
        return False
    with root.opened("entries") as entries_fd:
        found = _read(root, info.key, entries_fd)
    if found is None or found.manifest is None:
        return False
    return bool(bad & _inodes(root, info.key, [file.name for file in found.manifest.files]))
