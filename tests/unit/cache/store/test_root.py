"""Cache roots: made once, refused clearly where there is none, tried for real."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dlo_cache.errors import CacheError, Denied, Invalid, NewerFormat, NotFound, RootNotMounted, Unavailable
from dlo_cache.root import MARKER, default_root, init_root, open_root

KINDS = ["entries", "ingest", "locks", "progress", "quarantine", "source-digests", "trash"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_makes_skeleton_and_marker_with_fixed_modes(tmp_path: Path, umask: int) -> None:
    """0750 whatever the umask; parents are made as needed; the id is random."""
    before = os.umask(umask)
    try:
        root = init_root(tmp_path / "deep" / "cache")
    finally:
        os.umask(before)
    assert root.path == tmp_path / "deep" / "cache"
    assert sorted(os.listdir(root.path)) == [MARKER, "v1"]
    assert sorted(os.listdir(root.path / "v1")) == KINDS
    for path in (root.path, root.path / "v1", *(root.path / "v1" / kind for kind in KINDS)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert json.loads((root.path / MARKER).read_bytes()) == {"formatVersion": 1, "id": root.id}
    assert init_root(tmp_path / "other").id != root.id


def test_init_is_idempotent_and_mends_the_skeleton(tmp_path: Path) -> None:
    """The id stays, a folder that was removed and a mode that was changed come back, entries are
    untouched."""
    root = init_root(tmp_path / "cache")
    (root.entries_dir / "x").mkdir()
    root.trash_dir.rmdir()
    root.path.chmod(0o777)
    assert init_root(tmp_path / "cache") == root == open_root(tmp_path / "cache")
    assert os.listdir(root.entries_dir) == ["x"]
    assert stat.S_IMODE(root.path.stat().st_mode) == 0o750
    assert os.listdir(root.ingest_dir) == []


def test_init_takes_an_empty_disk_and_refuses_a_foreign_directory(tmp_path: Path) -> None:
    """``lost+found`` is what mkfs makes; somebody's files, or entries without a marker, are refused and
    named."""
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    init_root(tmp_path / "disk")
    foreign = tmp_path / "foreign"
    (foreign / "photos").mkdir(parents=True)
    with pytest.raises(Invalid, match="photos") as caught:
        init_root(foreign)
    assert caught.value.code == "RootNotEmpty"
    assert os.listdir(foreign) == ["photos"]
    orphaned = init_root(tmp_path / "orphaned")
    (orphaned.entries_dir / "x").mkdir()
    (orphaned.path / MARKER).unlink()
    with pytest.raises(Invalid) as caught:
        init_root(orphaned.path)
    assert caught.value.code == "RootNotEmpty"


def make_nothing(_path: Path) -> None:
    """Leaves the path free."""


def make_file(path: Path) -> None:
    """A file where a directory belongs."""
    path.touch()


def make_empty(path: Path) -> None:
    """What an unmounted disk looks like."""
    path.mkdir()


def make_newer(path: Path) -> None:
    """A root of a later release."""
    init_root(path)
    rewrite_marker(path, {"formatVersion": 2, "id": "0" * 32, "more": True})


def make_broken(path: Path) -> None:
    """A marker cut short."""
    init_root(path)
    rewrite_marker(path, {"formatVersion": 1})


def make_incomplete(path: Path) -> None:
    """A root that lost one of its folders."""
    init_root(path).locks_dir.rmdir()


def make_linked(path: Path) -> None:
    """A root whose folder was swapped for a link."""
    entries = init_root(path).entries_dir
    entries.rmdir()
    entries.symlink_to("/tmp")


def make_world_writable(path: Path) -> None:
    """A root whose entries anyone could write."""
    init_root(path).entries_dir.chmod(0o777)


def rewrite_marker(path: Path, marker: dict[str, Any]) -> None:
    """Gives the root another marker."""
    (path / MARKER).chmod(0o644)
    (path / MARKER).write_text(json.dumps(marker))


@pytest.mark.parametrize(
    ("make", "kind", "code"),
    [
        (make_nothing, NotFound, "RootNotFound"),
        (make_file, Invalid, "RootNotDirectory"),
        (make_empty, RootNotMounted, "RootNotMounted"),
        (make_newer, NewerFormat, "NewerFormat"),
        (make_broken, Invalid, "RootBroken"),
        (make_incomplete, NotFound, "NotFound"),
        (make_linked, Invalid, "UnsafePath"),
        (make_world_writable, Denied, "UnsafeMode"),
    ],
)
def test_open_refuses_what_is_no_root(
    tmp_path: Path, make: Callable[[Path], None], kind: type[CacheError], code: str
) -> None:
    """Each with its own code and the path in the message; nothing is written into it."""
    path = tmp_path / "cache"
    make(path)
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    with pytest.raises(kind, match=str(path)) as caught:
        open_root(path)
    assert (type(caught.value), caught.value.code) == (kind, code)
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


def test_init_refuses_a_file_and_a_newer_root(tmp_path: Path) -> None:
    """Neither is turned into a root."""
    make_file(tmp_path / "file")
    with pytest.raises(Invalid) as caught:
        init_root(tmp_path / "file")
    assert caught.value.code == "RootNotDirectory"
    with pytest.raises(CacheError):
        init_root(tmp_path / "file" / "below")
    make_newer(tmp_path / "newer")
    with pytest.raises(NewerFormat):
        init_root(tmp_path / "newer")


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no such locks."""

    def fail(*_arguments: Any) -> bytes:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", fail)


def with_hollow_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that grants every lock to everybody."""
    monkeypatch.setattr(fcntl, "fcntl", lambda _fd, _command, argument: argument)


def without_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot move directories."""

    def fail(*_arguments: Any, **_named: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", fail)


def without_directory_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that syncs files only."""
    real = os.fsync

    def fail(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) and "probe." in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(22, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize(
    "break_it", [without_locks, with_hollow_locks, without_rename, without_directory_sync]
)
def test_case_20_file_systems_that_keep_no_promises_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """At ``init_root`` and at ``open_root``, by trying; the probe leaves nothing and no marker is written."""
    made = init_root(tmp_path / "made")
    break_it(monkeypatch)
    for attempt, path in ((init_root, tmp_path / "new"), (open_root, made.path)):
        with pytest.raises(Unavailable) as caught:
            attempt(path)
        assert caught.value.code == "FilesystemUnsupported"
        assert os.listdir(path / "v1" / "ingest") == []
    assert not (tmp_path / "new" / MARKER).exists()
    assert open_root(made.path, writable=False) == made


def test_default_root_follows_the_base_directory_rules() -> None:
    """An absolute variable wins; a relative or empty one is ignored."""
    assert default_root("/x", "/home/me") == Path("/x/dlo")
    for variable in (None, "", "relative"):
        assert default_root(variable, "/home/me") == Path("/home/me/.cache/dlo")
