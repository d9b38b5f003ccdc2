"""Listing, finding, removing, setting aside and collecting entries."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from dlo_cache import store
from dlo_cache.build import build_layout_entries
from dlo_cache.entry import open_entry
from dlo_cache.errors import Busy, Corrupt, Invalid, NewerFormat, NotFound
from dlo_cache.files_entry import build_files_entry
from dlo_cache.presence import Built
from dlo_cache.recovery import recover
from dlo_cache.removal import QUARANTINE_KEEPS
from dlo_cache.root import Root
from unit.cache.store import checkpoints


@pytest.fixture
def built(root: Root) -> list[Built]:
    """Two layout entries."""
    return build_layout_entries(
        root, checkpoints.component(), checkpoints.layout(), tensor_size=2, producer={"by": "test"}
    )


def rewrite(path: Path, data: bytes) -> None:
    """Gives a read-only file of an entry other bytes."""
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)


def test_lists_entries_of_both_kinds(root: Root, built: list[Built]) -> None:
    """By key, with what a person wants to know; a lease shows while it is held."""
    files = build_files_entry(root, [checkpoints.MemoryFile("a/b", b"cd")], select="All", producer={})
    with open_entry(built[1].path):
        listed = {info.key: info for info in store.list_entries(root)}
    assert list(listed) == sorted([files.key, *(each.key for each in built)])
    layout = listed[built[1].key]
    assert (layout.kind, layout.component, layout.coordinate, layout.dtype) == (
        "Layout",
        "transformer",
        "1/2",
        "Source",
    )
    assert (layout.bytes, layout.files) == (built[1].bytes, 4)
    assert (layout.manifest_sha256, layout.content_digest) == (
        built[1].manifest_sha256,
        built[1].content_digest,
    )
    assert (layout.path, layout.problem, layout.leased) == (built[1].path, "", True)
    assert layout.published_time > 1.7e9
    assert (listed[files.key].kind, listed[files.key].coordinate, listed[files.key].leased) == (
        "Files",
        None,
        False,
    )
    assert listed[files.key].bytes == 2


def test_broken_entries_are_listed_with_their_problem(root: Root, built: list[Built]) -> None:
    """Case 19: no manifest, an empty one, one of another entry; a stranger's directory; a plain file."""
    rewrite(built[0].path / "manifest.json", b"")
    (root.entries_dir / ("ab" * 32)).mkdir()
    (root.entries_dir / ("ac" * 32)).mkdir()
    (root.entries_dir / ("ac" * 32) / "manifest.json").write_bytes(
        (built[1].path / "manifest.json").read_bytes()
    )
    (root.entries_dir / ("ad" * 32)).touch()
    (root.entries_dir / "notes").mkdir()
    listed = {info.key: info for info in store.list_entries(root)}
    codes = {key: info.code for key, info in listed.items() if info.problem}
    assert codes == {
        built[0].key: "Corrupt",
        "ab" * 32: "Corrupt",
        "ac" * 32: "Corrupt",
        "ad" * 32: "UnsafePath",
        "notes": "NotAnEntry",
    }
    assert listed[built[1].key].problem == ""


def test_inspect_finds_what_a_reader_would(root: Root, built: list[Built]) -> None:
    """Manifest and producer of a good entry; the wrong size of a file, which a listing does not see."""
    found = store.inspect(root, built[0].key[:8])
    assert found.manifest is not None
    assert found.manifest.key == built[0].key
    assert found.producer == {"by": "test"}
    assert found.info.problem == ""
    rewrite(built[0].path / "resident.safetensors", b"short")
    found = store.inspect(root, built[0].key)
    assert found.info.code == Corrupt.code
    assert "resident.safetensors" in found.info.problem
    assert (
        store.find(root, built[0].key)
        == store.list_entries(root)[sorted([b.key for b in built]).index(built[0].key)]
    )


def test_keys_may_be_abbreviated(root: Root, built: list[Built]) -> None:
    """A unique prefix of six digits or more; too short, ambiguous and unsafe ones are refused."""
    key = built[0].key
    found = store.find(root, key[:6])
    assert found is not None
    assert found.key == key
    assert store.find(root, "0" * 64) is None
    with pytest.raises(NotFound):
        store.remove(root, "0" * 6)
    twin = key[:10] + ("0" if key[10] != "0" else "1") * 54
    (root.entries_dir / twin).mkdir()
    with pytest.raises(Invalid) as caught:
        store.find(root, key[:8])
    assert caught.value.code == "AmbiguousKey"
    assert store.resolve(root, key[:12]) == key
    for prefix in (key[:5], "", "../../", key + "0", key.upper(), "*" * 8, key[:7] + "\n"):
        with pytest.raises(Invalid) as caught:
            store.resolve(root, prefix)
        assert caught.value.code == "InvalidKey"


def test_remove_waits_for_no_reader(root: Root, built: list[Built]) -> None:
    """A leased entry is Busy and stays whole; once the reader is gone, it goes and leaves no trash."""
    key = built[0].key
    with open_entry(built[0].path) as entry:
        with pytest.raises(Busy, match=key):
            store.remove(root, key[:10])
        assert bytes(entry.files[0].data[:4])
        assert store.find(root, key) is not None
        assert built[0].path.stat().st_mode & 0o777 == 0o555
    assert store.remove(root, key[:10]) == key
    assert store.find(root, key) is None
    assert os.listdir(root.trash_dir) == []
    with pytest.raises(NotFound):
        open_entry(built[0].path)


def test_remove_takes_broken_entries(root: Root, built: list[Built]) -> None:
    """Without a manifest, without a lease: nobody can be reading it."""
    for name in ("manifest.json", "lease"):
        (built[0].path / name).unlink()
        store.remove(root, built[0].key)
        assert not built[0].path.exists()
        build_layout_entries(root, checkpoints.component(), checkpoints.layout(), tensor_size=2, producer={})


def test_entries_of_a_later_format_are_left_alone(root: Root, built: list[Built]) -> None:
    """They are listed as such; neither gc, nor removal, nor a build touches them."""
    manifest = json.loads((built[0].path / "manifest.json").read_bytes())
    rewrite(built[0].path / "manifest.json", json.dumps(manifest | {"formatVersion": 2}).encode())
    assert {info.code for info in store.list_entries(root)} == {"", "NewerFormat"}
    with pytest.raises(NewerFormat):
        store.remove(root, built[0].key)
    done = store.gc(root, [])
    assert (done.removed, done.left) == ((built[1].key,), (built[0].key,))
    with pytest.raises(NewerFormat):
        build_layout_entries(root, checkpoints.component(), checkpoints.layout(), tensor_size=2, producer={})
    assert os.listdir(root.entries_dir) == [built[0].key]


def test_gc_keeps_what_it_is_told_and_what_is_in_use(root: Root, built: list[Built]) -> None:
    """The rest goes, broken entries included; strangers stay."""
    files = build_files_entry(root, [checkpoints.MemoryFile("a", b"b")], select="All", producer={})
    broken = root.entries_dir / ("ab" * 32)
    (broken / "sub").mkdir(parents=True)
    (root.entries_dir / "notes").mkdir()
    with open_entry(files.path):
        done = store.gc(root, {built[1].key})
    assert set(done.removed) == {built[0].key, broken.name}
    assert (done.busy, done.left, done.bytes) == ((files.key,), ("notes",), built[0].bytes)
    assert sorted(os.listdir(root.entries_dir)) == sorted([built[1].key, files.key, "notes"])


def test_quarantine_asks_no_reader_and_keeps_a_few(root: Root) -> None:
    """The entry is gone by name, a reader keeps its bytes, the reason lies beside it, and the oldest are
    pruned."""
    keys = []
    for number in range(QUARANTINE_KEEPS + 2):
        file = checkpoints.MemoryFile("a", b"%d" % number)
        each = build_files_entry(root, [file], select="All", producer={})
        keys.append(each.key)
        with open_entry(each.path) as entry:
            assert store.quarantine(root, each.key, "bit rot") == (each.key,)
            assert bytes(entry.files[0].data) == b"%d" % number
        assert store.find(root, each.key) is None
    names = sorted(os.listdir(root.quarantine_dir))
    kept = [name for name in names if not name.endswith(".reason.json")]
    assert {name.partition(".")[0] for name in kept} == set(keys[-QUARANTINE_KEEPS:])
    notes = [json.loads((root.quarantine_dir / f"{name}.reason.json").read_bytes()) for name in kept]
    assert {note["reason"] for note in notes} == {"bit rot"}
    assert len(names) == 2 * QUARANTINE_KEEPS


def test_recovery_sweeps_old_scratch_only(root: Root) -> None:
    """Temporary files of a writer at work are young and stay; those of a dead one go, as do old probes."""
    old, young = root.progress_dir / ".new-a.json.00", root.progress_dir / ".new-b.json.11"
    probe = root.ingest_dir / "probe.0123"
    old.touch()
    young.touch()
    probe.mkdir()
    for path in (old, probe):
        os.utime(path, (1, 1))
    assert set(recover(root).scratch) == {old.name, probe.name}
    assert os.listdir(root.progress_dir) == [young.name]
    assert set(recover(root, clock=lambda: young.stat().st_mtime + 7200).scratch) == {young.name}


def test_gc_goes_on_past_what_is_no_directory(root: Root, built: list[Built]) -> None:
    """A file or a link under an entry's name is left, and named; the entries behind it still go."""
    file, link = root.entries_dir / ("0" * 64), root.entries_dir / ("1" * 64)
    file.write_text("stray")
    link.symlink_to("/")
    done = store.gc(root, [])
    assert done.left == (file.name, link.name)
    assert set(done.removed) == {each.key for each in built}
    assert file.exists()
    assert link.is_symlink()
