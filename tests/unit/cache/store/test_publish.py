"""The publish transaction itself: the order of its durable steps, what it refuses, what it sweeps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dlo_cache.build import build_layout_entries
from dlo_cache.errors import Busy, Exists, Invalid
from dlo_cache.files_entry import build_files_entry
from dlo_cache.ingest import begin, hold_keys, sweep_ingest
from dlo_cache.recovery import recover
from dlo_cache.removal import evict
from dlo_cache.root import Root
from dlo_cache.store import list_entries
from unit.cache.store import checkpoints

KEY = "ab" * 32


def trace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records every sync with the path synced, and every rename, unlink and mode, in order."""
    events: list[tuple[str, str]] = []

    def path_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def traced(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            events.append((name, describe(*arguments, **named)))
            return real(*arguments, **named)

        monkeypatch.setattr(os, name, call)

    traced("fsync", path_of)
    traced("rename", lambda _source, target, **fds: f"{path_of(fds['dst_dir_fd'])}/{target}")
    traced("unlink", lambda name, dir_fd: f"{path_of(dir_fd)}/{name}")
    traced("fchmod", lambda fd, mode: f"{mode:o} {path_of(fd)}")
    return events


def test_case_19_every_step_in_its_order(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync files, manifest after all others, then the folder, rename, mode, and the parent folder last of
    all."""
    events = trace(monkeypatch)
    built = build_layout_entries(
        root, checkpoints.component(), checkpoints.layout(), tensor_size=1, producer={}
    )[0]
    renamed = events.index(("rename", str(built.path)))
    stage = next(path for name, path in events if name == "fsync" and path.endswith("manifest.json"))[
        : -len("/manifest.json")
    ]
    before = [
        path.removeprefix(stage)
        for name, path in events[:renamed]
        if name == "fsync" and path.startswith(stage)
    ]
    assert before[-2:] == ["/manifest.json", ""]
    assert sorted(before[:-1]) == sorted(f"/{name}" for name in os.listdir(built.path))
    after = events[renamed + 1 :]
    assert after == [("fchmod", f"555 {built.path}"), ("fsync", str(root.entries_dir))]


def test_a_reused_entry_is_made_durable_before_it_is_reported(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its publisher may have died before the last sync; whoever finds the entry completes mode and sync."""
    first = build_layout_entries(
        root, checkpoints.component(), checkpoints.layout(), tensor_size=1, producer={}
    )[0]
    first.path.chmod(0o755)
    events = trace(monkeypatch)
    build_layout_entries(root, checkpoints.component(), checkpoints.layout(), tensor_size=1, producer={})
    assert events[-2:] == [("fchmod", f"555 {first.path}"), ("fsync", str(root.entries_dir))]


def test_an_eviction_is_durable_before_bytes_are_freed(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writable, renamed, synced; were files unlinked first, a power cut could bring back half an entry."""
    built = build_layout_entries(
        root, checkpoints.component(), checkpoints.layout(), tensor_size=1, producer={}
    )[0]
    events = trace(monkeypatch)
    evict(root, built.key)
    assert events[0] == ("fchmod", f"755 {built.path}")
    assert events[1][0] == "rename"
    assert Path(events[1][1]).parent == root.trash_dir
    assert events[2] == ("fsync", str(root.entries_dir))
    unlinked = [at for at, (name, _) in enumerate(events) if name == "unlink"]
    assert len(unlinked) == 4 + 3
    assert min(unlinked) > 2


def test_after_the_rename_only_the_log_hears_of_a_failed_mode(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry is published; recovery repairs the mode later."""
    real = os.fchmod

    def fail(fd: int, mode: int) -> None:
        if mode == 0o555:
            raise PermissionError(1, "Operation not permitted")
        real(fd, mode)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "fchmod", fail)
        built = build_layout_entries(
            root, checkpoints.component(), checkpoints.layout(), tensor_size=1, producer={}
        )
    assert [record.message for record in caplog.records] == ["Left an entry's directory writable"]
    assert recover(root).modes == (built[0].key,)


def test_nothing_is_visible_before_commit(root: Root) -> None:
    """A stage under way is no entry, and leaving without commit removes it, sub-folders too."""
    with hold_keys(root, [KEY], timeout_seconds=0), begin(root, KEY) as ingest:
        ingest.seal(ingest.create("deep/er/file"))
        assert list_entries(root) == []
        assert len(os.listdir(root.ingest_dir)) == 1
    assert os.listdir(root.ingest_dir) == []


def test_descriptors_are_closed_whatever_happens(root: Root) -> None:
    """Neither a finished nor an abandoned build leaves a descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    build_layout_entries(root, checkpoints.component(), checkpoints.layout(), tensor_size=2, producer={})

    def fail() -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError):
        build_layout_entries(
            root, checkpoints.component(on_read=fail), checkpoints.layout(), tensor_size=4, producer={}
        )
    with begin(root, KEY) as ingest:
        ingest.create("never-sealed")
    assert len(os.listdir("/proc/self/fd")) == before


def test_commit_refuses_a_name_that_is_taken(root: Root) -> None:
    """A directory with content under the key is never replaced."""
    (root.entries_dir / KEY).mkdir()
    (root.entries_dir / KEY / "something").touch()
    with begin(root, KEY) as ingest, pytest.raises(Exists):
        ingest.commit(b"{}", {})
    assert os.listdir(root.entries_dir / KEY) == ["something"]
    assert os.listdir(root.ingest_dir) == []


@pytest.mark.parametrize(
    "key", ["", "..", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n", "a" * 63 + "/"]
)
def test_a_key_is_64_hexadecimal_digits(root: Root, key: str) -> None:
    """Nothing else becomes the name of a stage, a lock or an entry."""
    with pytest.raises(Invalid) as caught, begin(root, key):
        pass
    assert caught.value.code == "InvalidKey"
    with pytest.raises(Invalid), hold_keys(root, [key], timeout_seconds=0):
        pass
    assert os.listdir(root.ingest_dir) == os.listdir(root.locks_dir) == []


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/etc/passwd", "a/../../x", "", "a//b", ".", "a/./b", "a\0b", "\ud800"),
        *("x" * 300, "a/" * 20 + "b"),
        *("manifest.json", "lease", "producer.json"),
    ],
)
def test_file_names_cannot_leave_the_entry(root: Root, name: str) -> None:
    """Names that lead out, or that the store keeps for itself, are refused before anything is written."""
    with pytest.raises(Invalid):
        build_files_entry(root, [checkpoints.MemoryFile(name, b"x")], select="All", producer={})
    assert os.listdir(root.entries_dir) == os.listdir(root.ingest_dir) == []


def test_a_link_in_the_place_of_a_store_folder_is_not_followed(root: Root, tmp_path: Path) -> None:
    """Whoever swaps ``ingest`` for a link gets an error and no bytes elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root.ingest_dir.rmdir()
    root.ingest_dir.symlink_to(elsewhere)
    with pytest.raises(Invalid) as caught, begin(root, KEY):
        pass
    assert caught.value.code == "UnsafePath"
    assert list(elsewhere.iterdir()) == []


def test_case_20_sweep_takes_dead_stages_only(root: Root) -> None:
    """A stage whose builder holds the key's lock stays; of a dead one only the lock file is left, and does
    not block."""
    with hold_keys(root, [KEY], timeout_seconds=0), begin(root, KEY) as ingest:
        dead = root.ingest_dir / f"{'cd' * 32}.{'0' * 32}"
        (dead / "sub").mkdir(parents=True)
        (dead / "sub" / "file").touch()
        (dead / "sub").chmod(0o555)
        (root.ingest_dir / "somebody-else").mkdir()
        assert sweep_ingest(root) == (dead.name,)
        ingest.create("still-here")
        with pytest.raises(Busy), hold_keys(root, [KEY], timeout_seconds=0.01):
            pass
    assert os.listdir(root.ingest_dir) == ["somebody-else"]
    assert sorted(os.listdir(root.locks_dir)) == [f"{KEY}.lock", f"{'cd' * 32}.lock"]
    with hold_keys(root, [KEY, "cd" * 32], timeout_seconds=0):
        pass
