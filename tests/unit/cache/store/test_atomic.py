"""Small durable writes and removals, relative to an open directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dlo_cache import atomic


@pytest.fixture
def place(tmp_path: Path) -> Iterator[int]:
    """A descriptor of the test's directory."""
    fd = atomic.open_directory(tmp_path)
    yield fd
    os.close(fd)


def test_replaces_a_file_whole(tmp_path: Path, place: int) -> None:
    """New content, exact mode, no scratch left; a link in the place is replaced, not written through."""
    (tmp_path / "target").write_text("untouched")
    (tmp_path / "file").symlink_to("target")
    atomic.replace_file("file", b"one", 0o640, dir_fd=place)
    atomic.replace_file("file", b"two", 0o640, dir_fd=place)
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"two"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "target").read_text() == "untouched"
    assert sorted(os.listdir(tmp_path)) == ["file", "target"]


def test_a_failed_replacement_leaves_the_old_file(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the sync or at the rename: old bytes, no scratch."""
    atomic.replace_file("file", b"old", 0o644, dir_fd=place)
    for name in ("fsync", "rename", "write"):
        with monkeypatch.context() as patch:

            def fail(*_arguments: object, **_named: object) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="Input/output"):
                atomic.replace_file("file", b"new", 0o644, dir_fd=place)
        assert (tmp_path / "file").read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]


def test_small_files_are_synced_before_and_after_they_get_their_name(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes first, the directory last; that holds for a replaced file and for one made once."""
    events: list[str] = []

    def traced(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **fds: Any) -> Any:
            synced = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else ""
            events.append("fsync folder" if synced == str(tmp_path) else name)
            return real(*arguments, **fds)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "link"):
        traced(name)
    atomic.replace_file("file", b"one", 0o640, dir_fd=place)
    assert events == ["fsync", "rename", "fsync folder"]
    events.clear()
    atomic.create_file_once("other", b"one", 0o640, dir_fd=place)
    assert events == ["fsync", "link", "fsync folder"]


def test_creates_a_file_only_once(tmp_path: Path, place: int) -> None:
    """The second caller learns that it came late."""
    assert atomic.create_file_once("file", b"first", 0o444, dir_fd=place)
    assert not atomic.create_file_once("file", b"second", 0o444, dir_fd=place)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_opens_regular_files_only(tmp_path: Path, place: int) -> None:
    """Links, pipes and directories are refused, without waiting for the pipe's other end."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(OSError, match=r"link|regular|directory"):
            atomic.open_file(name, dir_fd=place)
    (tmp_path / "large").write_bytes(b"x" * 11)
    assert atomic.read_file("large", dir_fd=place, limit=11) == b"x" * 11
    with pytest.raises(OSError, match="larger than 10"):
        atomic.read_file("large", dir_fd=place, limit=10)


def test_removes_trees_but_not_what_links_point_to(tmp_path: Path, place: int) -> None:
    """Read-only folders go; files and folders behind links stay; a name that is not there is no error."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").touch()
    (tree / "a" / "link").symlink_to(outside)
    (tree / "a" / "b").chmod(0o555)
    (tmp_path / "alias").symlink_to(outside)
    for name in ("tree", "alias", "absent"):
        atomic.remove_tree(name, dir_fd=place)
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["precious"]


def test_opens_nothing_below_a_link(tmp_path: Path, place: int) -> None:
    """A link on the way is refused, not only in the last part."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    os.close(atomic.open_below(place, "real", "deep"))
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        atomic.open_below(place, "link", "deep")
