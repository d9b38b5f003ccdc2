"""Digests of source files: computed once, remembered only for exactly the file that was hashed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from dlo_cache.errors import Cancelled
from dlo_cache.progress import ProgressEvent
from dlo_sources import digests
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.errors import SourceInvalid
from dlo_sources.files import LocalFile, look_at

LATER = 10 * 10**9


@pytest.fixture
def files(tmp_path: Path) -> list[LocalFile]:
    """Three files, one of them empty."""
    contents = {"a": b"alpha" * 1000, "b": b"", "c": bytes(70_000)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return [look_at(name, tmp_path / name) for name in contents]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where digests are remembered."""
    path = tmp_path / "source-digests"
    path.mkdir()
    return path


def cache_at(directory: Path | None, shift_ns: int = LATER) -> DigestCache:
    """A cache whose clock is ahead, so that the files count as settled."""
    return DigestCache(directory, clock_ns=lambda: time.time_ns() + shift_ns)


def expected(files: list[LocalFile]) -> list[str]:
    """The true digests."""
    return [hashlib.sha256(file.path.read_bytes()).hexdigest() for file in files]


def test_digests_are_those_of_the_bytes(files: list[LocalFile]) -> None:
    """In the order given, with no memory."""
    hashed = hash_files(files, DigestCache(None))
    assert [file.sha256 for file in hashed] == expected(files)
    assert [file.name for file in hashed] == ["a", "b", "c"]


def test_a_second_run_reads_nothing(
    files: list[LocalFile], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged files are known, also to another cache over the same folder."""
    first = hash_files(files, cache_at(directory))

    def no_reading(self: LocalFile, buffer: object, offset: int) -> int:
        raise AssertionError("read again")

    monkeypatch.setattr(LocalFile, "readinto", no_reading)
    assert hash_files(files, cache_at(directory)) == first


def test_young_files_are_not_remembered(files: list[LocalFile], directory: Path) -> None:
    """A change within the file system's tick could go unseen, so a file must have settled."""
    hash_files(files, cache_at(directory, 0))
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("change", ["content", "times", "inode", "size"])
def test_any_change_is_seen(files: list[LocalFile], directory: Path, change: str) -> None:
    """Other bytes, other times, another file of the same bytes, another size."""
    hash_files(files, cache_at(directory))
    path = files[0].path
    before = path.stat()
    if change == "content":
        path.write_bytes(b"ALPHA" * 1000)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # ctime still tells
    elif change == "times":
        os.utime(path, ns=(1, 1))
    elif change == "inode":
        path.rename(path.with_name("old"))
        path.write_bytes(b"other" * 1000)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        path.write_bytes(b"alpha")
    (hashed,) = hash_files([look_at("a", path)], cache_at(directory))
    assert hashed.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[]", b"\xff", b'{"identity":[1],"sha256":"x"}', b"x" * 5000]
)
def test_a_damaged_memory_costs_a_reading_and_nothing_else(
    files: list[LocalFile], directory: Path, damage: bytes
) -> None:
    """Whatever a record holds, the answer is right, and the record is mended."""
    hash_files(files, cache_at(directory))
    for record in directory.iterdir():
        record.chmod(0o600)
        record.write_bytes(damage)
    assert [file.sha256 for file in hash_files(files, cache_at(directory))] == expected(files)
    assert all(len(json.loads(record.read_text())["sha256"]) == 64 for record in directory.iterdir())


def test_a_record_of_another_file_is_not_believed(files: list[LocalFile], directory: Path) -> None:
    """The identity in the record counts, not only its name."""
    hash_files(files, cache_at(directory))
    records = sorted(directory.iterdir())
    first, second = (record.read_bytes() for record in records[:2])
    records[0].write_bytes(second)
    records[1].write_bytes(first)
    assert [file.sha256 for file in hash_files(files, cache_at(directory))] == expected(files)


def test_a_missing_folder_is_no_obstacle(files: list[LocalFile], tmp_path: Path) -> None:
    """Nothing is remembered and nothing fails."""
    assert [file.sha256 for file in hash_files(files, cache_at(tmp_path / "absent"))] == expected(files)


def test_a_known_digest_is_kept(files: list[LocalFile]) -> None:
    """A file whose digest came with it is not read."""
    known = files[0].with_sha256("f" * 64)
    assert hash_files([known], DigestCache(None)) == [known]


def test_a_file_that_changes_meanwhile_has_no_digest(files: list[LocalFile], directory: Path) -> None:
    """Neither an answer nor a record."""
    with files[2].path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(SourceInvalid, match="c changed"):
        hash_files(files[2:], cache_at(directory))
    assert list(directory.iterdir()) == []


def test_a_file_that_changes_between_two_pieces(
    files: list[LocalFile], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look before every piece finds it."""
    monkeypatch.setattr(digests, "_PIECE", 10_000)

    def progress(event: ProgressEvent) -> None:
        with files[2].path.open("r+b") as file:
            file.write(b"x")

    with pytest.raises(SourceInvalid, match="c changed"):
        hash_files(files[2:], cache_at(directory), progress)
    assert list(directory.iterdir()) == []


def test_progress_grows_to_the_total(files: list[LocalFile], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all files, in one figure."""
    monkeypatch.setattr(digests, "_PIECE", 10_000)
    events: list[ProgressEvent] = []
    hash_files(files, DigestCache(None), events.append)
    assert {(event.phase, event.total) for event in events} == {("hash", 75_000)}
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert events[-1].done == 75_000


def test_cancel(files: list[LocalFile], directory: Path) -> None:
    """Seen before every piece; nothing is remembered."""
    with pytest.raises(Cancelled):
        hash_files(files[::2], cache_at(directory), cancel=lambda: True)
    assert list(directory.iterdir()) == []
