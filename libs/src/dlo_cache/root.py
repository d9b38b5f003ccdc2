"""The cache root: one directory on the node's disk with a marker, a fixed skeleton and checked powers.

``init_root`` makes it (or finds it made), ``open_root`` refuses everything that is not one. The marker's
absence means that the disk is not mounted, so nothing is ever written into a directory without it. Must not
know what an entry holds, and must not remove anything.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dlo_cache import atomic
from dlo_cache.errors import Denied, Invalid, NewerFormat, NotFound, RootNotMounted
from dlo_cache.oserrors import os_errors
from dlo_cache.rootprobe import probe_file_system

FORMAT_VERSION: Final = 1
MARKER: Final = "dlo-cache-root.json"
DIRECTORY_MODE: Final = 0o750
_MARKER_MODE: Final = 0o444
_VERSION_DIRECTORY: Final = "v1"
_SKELETON: Final = ("entries", "ingest", "locks", "progress", "trash", "quarantine", "source-digests")
_NOT_FOREIGN: Final = ("lost+found", _VERSION_DIRECTORY)
_ID: Final = re.compile(r"[0-9a-f]{32}")
_MARKER_LIMIT: Final = 4096


@dataclass(frozen=True, slots=True)
class Root:
    """An existing, checked cache root. ``path`` is absolute; ``id`` is the random id that its marker
    holds."""

    path: Path
    id: str

    @property
    def entries_dir(self) -> Path:
        """Published entries, each a directory named by its input key."""
        return self._below("entries")

    @property
    def ingest_dir(self) -> Path:
        """Unfinished writes, invisible to readers."""
        return self._below("ingest")

    @property
    def locks_dir(self) -> Path:
        """Writers' lock files; never mounted into an engine, never removed."""
        return self._below("locks")

    @property
    def progress_dir(self) -> Path:
        """Progress of builds, one atomically replaced file each."""
        return self._below("progress")

    @property
    def trash_dir(self) -> Path:
        """Evicted entries that wait for their unlink."""
        return self._below("trash")

    @property
    def quarantine_dir(self) -> Path:
        """Entries found bad, kept for inspection."""
        return self._below("quarantine")

    @property
    def digests_dir(self) -> Path:
        """Known sha256 of source files."""
        return self._below("source-digests")

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """A descriptor of the skeleton directory ``name`` ("entries", "locks", …), reached without following
        a link."""
        with os_errors(f"opening {self._below(name)}"):
            root_fd = atomic.open_directory(self.path)
            try:
                fd = atomic.open_below(root_fd, _VERSION_DIRECTORY, name)
            finally:
                os.close(root_fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _below(self, name: str) -> Path:
        return self.path / _VERSION_DIRECTORY / name


def default_root(xdg_cache_home: str | None, home: str) -> Path:
    """Where a person's own cache lies: ``$XDG_CACHE_HOME/dlo``, or ``~/.cache/dlo`` (a relative variable is
    ignored)."""
    if xdg_cache_home and Path(xdg_cache_home).is_absolute():
        return Path(xdg_cache_home) / "dlo"
    return Path(home) / ".cache" / "dlo"


def init_root(path: Path, *, uid: int | None = None, gid: int | None = None) -> Root:
    """Makes ``path`` a cache root, or finds that it is one; safe to repeat and to run twice at once.

    ``uid`` and ``gid``, where given, become the owner of what it makes (needs the power to do so).
    Directories are 0750. Raises Invalid (RootNotDirectory, RootNotEmpty, UnsafePath), NewerFormat, Denied
    naming uid, gid and mode, Unavailable (FilesystemUnsupported) where locks, rename or sync do not hold:
    they are tried for real.
    """
    with os_errors(f"making the directory {path}"):
        if path.exists() and not path.is_dir():
            raise _not_directory(path)
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = path.resolve()
    with _root_opened(path) as root_fd:
        known = _read_marker(root_fd, path)
        if known is None:
            _check_not_foreign(root_fd, path)
        _check_writable(root_fd, path)
        _make_skeleton(root_fd, path, uid, gid)
        probe_file_system(path / _VERSION_DIRECTORY / "ingest")
        if known is None:
            _write_marker(root_fd, uid, gid)
            known = _read_marker(root_fd, path)
    return Root(path, known or "")


def open_root(path: Path, *, writable: bool = True) -> Root:
    """The root at ``path``, checked: marker, format, skeleton, modes; if ``writable``, also that it can be
    written.

    Raises RootNotMounted (no marker), NotFound (no such directory), Invalid (not a directory, broken marker
    or skeleton), NewerFormat, Denied naming uid, gid and mode, Unavailable (FilesystemUnsupported). Nothing
    is written into a directory that is no root.
    """
    with os_errors(f"opening the cache root {path}"):
        if not path.exists():
            raise NotFound(
                f"the cache root {path} does not exist",
                code="RootNotFound",
                hint="make it with `dlo cache init`",
            )
        if not path.is_dir():
            raise _not_directory(path)
    path = path.resolve()
    with _root_opened(path) as root_fd:
        root_id = _read_marker(root_fd, path)
        if root_id is None:
            raise RootNotMounted(
                f"{path} has no {MARKER}: it is no cache root, or its disk is not mounted",
                hint="mount the disk, or make the root with `dlo cache init`",
            )
        _check_skeleton(root_fd, path)
        if writable:
            _check_writable(root_fd, path)
    root = Root(path, root_id)
    if writable:
        probe_file_system(root.ingest_dir)
    return root


@contextmanager
def _root_opened(path: Path) -> Iterator[int]:
    with os_errors(f"opening the cache root {path}"):
        fd = atomic.open_directory(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_marker(root_fd: int, path: Path) -> str | None:
    with os_errors(f"reading {path / MARKER}"):
        try:
            data = atomic.read_file(MARKER, dir_fd=root_fd, limit=_MARKER_LIMIT)
        except FileNotFoundError:
            return None
    try:
        marker = json.loads(data)
        version, root_id = marker["formatVersion"], marker["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise _broken_marker(path) from error
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise NewerFormat(
            f"{path} is a cache root of format {version}; this version knows {FORMAT_VERSION}",
            hint="use the newer release, or another directory",
        )
    if version != FORMAT_VERSION or not isinstance(root_id, str) or not _ID.fullmatch(root_id):
        raise _broken_marker(path)
    return root_id


def _write_marker(root_fd: int, uid: int | None, gid: int | None) -> None:
    marker = {"formatVersion": FORMAT_VERSION, "id": secrets.token_hex(16)}
    data = json.dumps(marker, sort_keys=True).encode() + b"\n"
    with os_errors(f"writing {MARKER}"):
        atomic.create_file_once(MARKER, data, _MARKER_MODE, dir_fd=root_fd)
        if uid is not None or gid is not None:
            os.chown(MARKER, _or_keep(uid), _or_keep(gid), dir_fd=root_fd, follow_symlinks=False)
        atomic.sync(root_fd)


def _make_skeleton(root_fd: int, path: Path, uid: int | None, gid: int | None) -> None:
    _own(root_fd, path, uid, gid)
    version_fd = _made(_VERSION_DIRECTORY, root_fd, path, uid, gid)
    try:
        for name in _SKELETON:
            os.close(_made(name, version_fd, path, uid, gid))
        with os_errors(f"syncing {path}"):
            atomic.sync(version_fd)
            atomic.sync(root_fd)
    finally:
        os.close(version_fd)


def _made(name: str, dir_fd: int, path: Path, uid: int | None, gid: int | None) -> int:
    with os_errors(f"making {name} in {path}"):
        try:
            fd = atomic.make_directory(name, DIRECTORY_MODE, dir_fd=dir_fd)
        except FileExistsError:
            fd = atomic.open_directory(name, dir_fd=dir_fd)
    _own(fd, path / name, uid, gid)
    return fd


def _own(fd: int, path: Path, uid: int | None, gid: int | None) -> None:
    """Gives a directory of the skeleton its owner and mode; says nothing where both are right already."""
    now = os.fstat(fd)
    try:
        if _or_keep(uid) not in (-1, now.st_uid) or _or_keep(gid) not in (-1, now.st_gid):
            os.fchown(fd, _or_keep(uid), _or_keep(gid))
        if stat.S_IMODE(now.st_mode) != DIRECTORY_MODE:
            os.fchmod(fd, DIRECTORY_MODE)
    except PermissionError as error:
        raise _denied(path, now) from error


def _check_not_foreign(root_fd: int, path: Path) -> None:
    """Refuses a directory with somebody's files; what an interrupted ``init_root`` left is not that."""
    with os_errors(f"reading {path}"):
        names = [
            name for name in os.listdir(root_fd) if name not in _NOT_FOREIGN and not atomic.is_scratch(name)
        ]
    entries = path / _VERSION_DIRECTORY / "entries"
    with os_errors(f"reading {entries}"):
        orphans = entries.is_dir() and any(entries.iterdir())
    if names or orphans:
        found = ", ".join(sorted(names)[:3]) or f"{_VERSION_DIRECTORY}/entries"
        raise Invalid(
            f"{path} has no {MARKER} and is not empty (it holds {found})",
            code="RootNotEmpty",
            hint="name an empty directory; if its marker was lost, clear the directory first",
        )


def _check_skeleton(root_fd: int, path: Path) -> None:
    owner = os.fstat(root_fd).st_uid
    for parts in ((_VERSION_DIRECTORY,), *((_VERSION_DIRECTORY, name) for name in _SKELETON)):
        place = path.joinpath(*parts)
        with os_errors(f"opening {place}"):
            fd = atomic.open_below(root_fd, *parts)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        if found.st_uid != owner:
            raise Denied(
                f"{place} belongs to uid {found.st_uid}, the root to uid {owner}",
                code="UnsafeOwner",
                hint="repair owner and mode with `dlo cache init`",
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & stat.S_IWOTH:
            raise Denied(
                f"{place} can be written by everyone (mode {mode:04o})",
                code="UnsafeMode",
                hint="repair owner and mode with `dlo cache init`",
            )


def _check_writable(root_fd: int, path: Path) -> None:
    with os_errors(f"opening {path}"):
        now = os.fstat(root_fd)
        writable = os.access(".", os.W_OK | os.X_OK, dir_fd=root_fd, effective_ids=True)
    if not writable:
        raise _denied(path, now)


def _denied(path: Path, found: os.stat_result) -> Denied:
    return Denied(
        f"{path} cannot be written: it belongs to uid {found.st_uid}, gid {found.st_gid}, mode "
        f"{stat.S_IMODE(found.st_mode):04o}; this process runs as uid {os.geteuid()}, gid {os.getegid()}",
        hint="give the directory to that user (`dlo cache init`), and mount it for writing",
    )


def _not_directory(path: Path) -> Invalid:
    return Invalid(
        f"{path} is not a directory", code="RootNotDirectory", hint="name a directory as the cache root"
    )


def _broken_marker(path: Path) -> Invalid:
    return Invalid(
        f"{path / MARKER} is not a marker of a cache root",
        code="RootBroken",
        hint="restore or clear the root",
    )


def _or_keep(number: int | None) -> int:
    return -1 if number is None else number
