"""Files entries: source files byte for byte, their digests checked, shared between entries by hard link."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dlo_cache import files_entry, store
from dlo_cache.entry import open_entry
from dlo_cache.errors import Cancelled, Corrupt, Invalid, NoSpace, Unavailable
from dlo_cache.files_entry import build_files_entry
from dlo_cache.presence import Built
from dlo_cache.root import Root, init_root
from dlo_cache.verify import verify_entry
from unit.cache.store.checkpoints import MemoryFile

FILES = (
    MemoryFile("vae/model.safetensors", bytes(range(256)) * 300),
    MemoryFile("vae/config.json", b"{}"),
    MemoryFile("model_index.json", b'{"_class_name": "Tiny"}'),
    MemoryFile("text_encoder/empty.txt", b""),
    MemoryFile("text_encoder/last.txt", b"last"),
)


def built(root: Root, files: Sequence[MemoryFile] = FILES, **changes: Any) -> Built:
    """An entry of ``files``."""
    arguments: dict[str, Any] = {"select": "All", "producer": {"by": "test"}} | changes
    return build_files_entry(root, files, **arguments)


def test_holds_the_files_byte_for_byte(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, bytes, sizes and digests; an empty file, a file of many pieces; read-only folders all the way
    down."""
    monkeypatch.setattr(files_entry, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(files_entry, "_BUFFER_BYTES", 777)
    each = built(root)
    for file in FILES:
        path = each.path / file.name
        assert path.read_bytes() == file.data
        assert path.stat().st_mode & 0o777 == 0o444
        assert path.parent.stat().st_mode & 0o777 == 0o555
    with open_entry(each.path, manifest_sha256=each.manifest_sha256) as entry:
        assert verify_entry(entry) == each.bytes == sum(file.size for file in FILES)
    assert store.inspect(root, each.key).producer == {"by": "test", "select": "All", "streamed": []}


def test_the_key_depends_on_names_and_content_only(root: Root, tmp_path: Path) -> None:
    """Order, selection and producer do not matter; a name or a byte does."""
    first = built(root)
    other = init_root(tmp_path / "other")
    again = built(other, FILES[::-1], select="PipelineRest", streamed=["transformer"], producer={})
    assert (again.key, again.manifest_sha256) == (first.key, first.manifest_sha256)
    renamed = MemoryFile("vae/other.json", FILES[1].data)
    changed = MemoryFile(FILES[1].name, b"[]")
    keys = {first.key, *(built(root, [*FILES[:1], file, *FILES[2:]]).key for file in (renamed, changed))}
    assert len(keys) == 3
    assert built(root).reused


def test_bytes_that_are_not_those_of_the_digest_are_refused(root: Root) -> None:
    """The file that changed is named, nothing is left."""
    wrong = MemoryFile("vae/config.json", b"{ }", claimed_sha256=FILES[1].sha256)
    with pytest.raises(Unavailable, match=r"vae/config\.json") as caught:
        built(root, [FILES[0], wrong])
    assert caught.value.code == "SourceChanged"
    assert os.listdir(root.entries_dir) == os.listdir(root.ingest_dir) == []


def test_shares_files_by_hard_link(root: Root) -> None:
    """A file of the same content lies on the disk once, also under another name; the space asked for is
    less."""
    first = built(root)
    read: list[str] = []
    more = [
        MemoryFile("copy/model.safetensors", FILES[0].data, on_read=lambda: read.append("model")),
        MemoryFile("new.txt", b"new"),
    ]
    second = built(root, more)
    assert read == []
    assert (second.path / more[0].name).stat().st_ino == (first.path / FILES[0].name).stat().st_ino
    assert (second.path / more[0].name).stat().st_nlink == 2
    store.remove(root, first.key)
    with open_entry(second.path) as entry:
        assert verify_entry(entry) == second.bytes
    assert (second.path / more[0].name).read_bytes() == FILES[0].data


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM])
def test_copies_where_no_link_can_be_made(root: Root, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A file system or a limit that refuses links costs space, not the entry."""
    first = built(root)

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    second = built(root, FILES[:2])
    assert (second.path / FILES[0].name).read_bytes() == FILES[0].data
    assert (second.path / FILES[0].name).stat().st_ino != (first.path / FILES[0].name).stat().st_ino


def test_damage_is_not_spread_by_link(root: Root) -> None:
    """A file whose bytes went bad is copied afresh from the source."""
    first = built(root)
    damage(first.path / FILES[0].name)
    second = built(root, FILES[:2])
    assert (second.path / FILES[0].name).read_bytes() == FILES[0].data
    with open_entry(first.path) as entry, pytest.raises(Corrupt):
        verify_entry(entry)


def test_a_bad_file_takes_every_entry_that_holds_it(root: Root) -> None:
    """Quarantine follows the links of the file named; entries without it stay."""
    first, second, third = built(root), built(root, FILES[:2]), built(root, FILES[1:3])
    gone = store.quarantine(root, first.key, "bad bytes", files=[FILES[0].name])
    assert set(gone) == {first.key, second.key}
    assert [info.key for info in store.list_entries(root)] == [third.key]


def test_a_selection_of_all_leaves_nothing_out(root: Root) -> None:
    """Streamed components belong to ``PipelineRest``."""
    with pytest.raises(Invalid, match="all files"):
        built(root, select="All", streamed=["transformer"])


@pytest.mark.parametrize("names", [("a", "a/b"), ("a", "a"), ()])
def test_names_must_fit_together(root: Root, names: tuple[str, ...]) -> None:
    """A file that is a folder too, a name twice, or no files at all."""
    with pytest.raises(Invalid):
        built(root, [MemoryFile(name, b"x") for name in names])
    assert os.listdir(root.ingest_dir) == []


def test_cancel_and_full_disk_leave_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for layout entries."""
    with pytest.raises(Cancelled):
        built(root, cancel=lambda: True)

    def full(*_arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NoSpace) as caught:
            built(root)
    assert caught.value.code == "DiskFull"
    assert os.listdir(root.entries_dir) == os.listdir(root.ingest_dir) == []
    assert not built(root).reused


def damage(path: Path) -> None:
    """Flips one bit in the middle of a read-only file, keeping its size."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    path.chmod(0o444)
