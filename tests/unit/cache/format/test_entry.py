"""Opening entries: what is not exactly as published is not opened, and nothing is evicted under a reader."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlo_cache import locks, mapping
from dlo_cache.canonical import canonical_json
from dlo_cache.entry import open_entry
from dlo_cache.errors import Busy, CacheError, Corrupt, Denied, Invalid, NewerFormat, NotFound
from unit.cache.format.entries import (
    Shaped,
    block_tensors,
    flip,
    mapped_paths,
    open_descriptors,
    overwrite,
    tensor_data,
    write_files_entry,
    write_layout_entry,
)

FIRST = "000-blocks.0.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A published entry of three blocks and a resident file."""
    write_layout_entry(tmp_path / "entry")
    return tmp_path / "entry"


@contextmanager
def writable(directory: Path) -> Iterator[None]:
    """Lets a test change the folder's names for a while."""
    directory.chmod(0o755)
    yield
    directory.chmod(0o555)


def evictable(directory: Path) -> bool:
    """Whether an evictor could take its lock now."""
    fd = os.open(directory / "lease", os.O_RDWR)
    try:
        return not locks.write_would_block(fd)
    finally:
        os.close(fd)


def refused(directory: Path, kind: type[CacheError], words: str) -> None:
    """Opening fails with this kind and these words, and leaves neither lease nor descriptor nor mapping."""
    gc.collect()
    before = open_descriptors()
    with pytest.raises(kind, match=words) as caught:
        open_entry(directory)
    assert type(caught.value) is kind
    assert open_descriptors() == before
    assert not [path for path in mapped_paths() if str(directory) in path]


def test_every_byte_is_where_the_entry_says(directory: Path) -> None:
    """Views, addresses and shapes of all tensors; blocks in execution order, the resident file apart."""
    with open_entry(directory) as entry:
        assert [file.group for file in entry.blocks] == ["blocks.0", "blocks.1", "single.0"]
        assert entry.blocks[0].name == FIRST
        assert entry.resident is not None
        assert list(entry.resident.tensors) == ["proj_out.weight"]
        assert list(entry.blocks[0].tensors) == [tensor.name for tensor in block_tensors("blocks.0")]
        for file in entry.files:
            assert file.data.readonly
            assert len(file.data) == file.nbytes
            assert file.address % 4096 == 0
            assert not any(name.startswith("__dlo_pad") for name in file.tensors)
            for tensor in file.tensors.values():
                assert tensor.offset % 256 == 0
                assert file.view(tensor.name) == tensor_data(tensor.name, tensor.nbytes)
                raw = ctypes.string_at(file.address + tensor.offset, tensor.nbytes)
                assert raw == tensor_data(tensor.name, tensor.nbytes)
    assert entry.nbytes == sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def test_dtypes_and_shapes_are_kept(directory: Path) -> None:
    """Float32 islands, fp8, a 0-d scale and an empty tensor in one bf16 block."""
    with open_entry(directory) as entry:
        found = {
            name.split(".")[-1]: (view.dtype, view.shape) for name, view in entry.blocks[1].tensors.items()
        }
    assert found == {
        "weight": ("BF16", (16, 33)),
        "scale": ("F32", ()),
        "nothing": ("F32", (0, 16)),
        "island": ("F32", (1, 6, 16)),
        "quantised": ("F8_E4M3", (5,)),
    }


def test_the_manifest_is_known_by_its_digest(directory: Path) -> None:
    """What was handed over must be what lies there."""
    sha256 = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    with open_entry(directory, manifest_sha256=sha256) as entry:
        assert entry.manifest_sha256 == sha256
        assert entry.key == entry.manifest.key
    with pytest.raises(Corrupt, match="was handed over"):
        open_entry(directory, manifest_sha256="0" * 64)
    assert evictable(directory)


def test_files_are_mapped_shared_and_read_only(directory: Path) -> None:
    """One mapping a file, not writable, not private: all workers of a node share one copy."""
    with open_entry(directory) as entry:
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]
        assert len(lines) == len(entry.files)
        assert all(line.split()[1] == "r--s" for line in lines)
        with pytest.raises(TypeError):
            entry.files[0].data[0] = 1
    assert not [path for path in mapped_paths() if str(directory) in path]


def test_the_lease_is_held_from_open_to_close(directory: Path) -> None:
    """An evictor must wait for the last reader and no longer."""
    first, second = open_entry(directory), open_entry(directory)
    assert not evictable(directory)
    assert first.close()
    assert not evictable(directory)
    assert second.close()
    assert evictable(directory)


def test_the_lease_lasts_until_the_last_view_is_gone(directory: Path) -> None:
    """A consumer that still holds bytes keeps them valid, mapped, and the entry in its place."""
    entry = open_entry(directory)
    array = np.frombuffer(entry.blocks[0].data, np.uint8)
    part = entry.blocks[1].view("blocks.1.weight")
    whole = entry.blocks[2].data
    assert not entry.close()
    assert array[:8].tobytes() == tensor_data("blocks.0.weight", 1056)[:8]
    assert part == tensor_data("blocks.1.weight", 1056)
    assert not evictable(directory)
    assert whole[:1056] == tensor_data("single.0.weight", 1056)
    del array, whole
    assert not evictable(directory)
    del part
    assert evictable(directory)
    assert not [path for path in mapped_paths() if str(directory) in path]


def test_a_closed_entry_says_so(directory: Path) -> None:
    """Use after close is an error of ours; closing again is harmless."""
    entry = open_entry(directory)
    assert entry.close()
    assert entry.closed
    assert entry.close()
    with pytest.raises(Invalid, match="after its entry was closed"):
        _ = entry.files[0].data
    with pytest.raises(Invalid, match="after its entry was closed"):
        _ = entry.files[0].address


def test_an_entry_that_is_forgotten_lets_go(directory: Path) -> None:
    """No close: the lease goes with the object."""
    entry = open_entry(directory)
    del entry
    gc.collect()
    assert evictable(directory)


def test_a_files_entry_that_is_forgotten_lets_go(tmp_path: Path) -> None:
    """Its descriptors too, mapped or not."""
    write_files_entry(tmp_path / "entry", {"a": b"x", "b": b"y", "empty": b""})
    before = open_descriptors()
    entry = open_entry(tmp_path / "entry")
    assert bytes(entry.files[0].data) == b"x"
    del entry
    gc.collect()
    assert open_descriptors() == before
    assert evictable(tmp_path / "entry")


def test_a_killed_reader_leaves_no_lease(directory: Path) -> None:
    """The kernel releases the lease of a process that died."""
    code = (
        "import pathlib, sys, time\nfrom dlo_cache.entry import open_entry\n"
        "entry = open_entry(pathlib.Path(sys.argv[1]))\nprint('open', flush=True)\ntime.sleep(60)"
    )
    reader = subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        assert not evictable(directory)
    finally:
        reader.kill()
        reader.communicate()
    assert evictable(directory)


def test_an_entry_that_is_being_removed_is_busy(directory: Path) -> None:
    """The evictor's lock wins over readers that come later, and leaves nothing of them."""
    fd = os.open(directory / "lease", os.O_RDWR)
    locks.acquire_write(fd, subject="the entry")
    refused(directory, Busy, f"entry {directory} is being removed")
    os.close(fd)
    assert open_entry(directory).close()


def test_case_11_nothing_of_zero_bytes_is_mapped(tmp_path: Path) -> None:
    """A block whose tensors are all empty has no mapping, no address and an empty view."""
    blocks = {"blocks.0": [Shaped("blocks.0.pad", "F32", (0,)), Shaped("blocks.0.more", "F32", (0, 16))]}
    write_layout_entry(tmp_path / "entry", blocks, resident=())
    with open_entry(tmp_path / "entry") as entry:
        (file,) = entry.files
        assert (file.nbytes, file.address, len(file.data)) == (0, 0, 0)
        assert bytes(file.view("blocks.0.more")) == b""
        assert entry.resident is None
        assert not [path for path in mapped_paths() if str(tmp_path) in path]
    assert evictable(tmp_path / "entry")


def test_files_entries_are_mapped_when_asked(tmp_path: Path) -> None:
    """Kind Files is a folder to be used as the source's; its bytes are mapped only for those who ask."""
    contents = {"model_index.json": b"{}", "vae/config.json": b'{"a": 1}', "vae/empty.txt": b""}
    write_files_entry(tmp_path / "entry", contents)
    with open_entry(tmp_path / "entry") as entry:
        assert (entry.kind, entry.blocks, entry.resident) == ("Files", (), None)
        assert not [path for path in mapped_paths() if str(tmp_path) in path]
        assert json.loads((entry.directory / "vae" / "config.json").read_text()) == {"a": 1}
        assert {file.name: bytes(file.data) for file in entry.files} == contents
    assert evictable(tmp_path / "entry")


def test_there_is_nothing(tmp_path: Path) -> None:
    """A missing entry, an empty folder, a file, a link to an entry."""
    refused(tmp_path / "absent", NotFound, "absent")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", NotFound, "empty")
    (tmp_path / "file").write_bytes(b"")
    refused(tmp_path / "file", Invalid, "file")
    write_layout_entry(tmp_path / "entry")
    (tmp_path / "link").symlink_to(tmp_path / "entry")
    refused(tmp_path / "link", Invalid, "link")


@pytest.mark.parametrize("name", ["manifest.json", "lease", FIRST])
def test_links_in_an_entry_are_not_followed(directory: Path, tmp_path: Path, name: str) -> None:
    """A link in the place of any file, even to the same bytes, is refused."""
    with writable(directory):
        (directory / name).rename(tmp_path / "elsewhere")
        (directory / name).symlink_to(tmp_path / "elsewhere")
    refused(directory, Invalid, "opening entry")


@pytest.mark.parametrize("name", ["lease", FIRST])
def test_a_pipe_in_an_entry_does_not_block(directory: Path, name: str) -> None:
    """Opening a pipe would wait for a writer for ever."""
    with writable(directory):
        (directory / name).unlink()
        os.mkfifo(directory / name)
    refused(directory, Invalid, "opening entry")


def test_case_19_lengths_are_checked_before_anything_is_mapped(directory: Path) -> None:
    """A file that is empty, short by a byte, or long by one is named with both sizes."""
    path = directory / FIRST
    size = path.stat().st_size
    for length in (0, size - 1, size + 1):
        path.chmod(0o644)
        os.truncate(path, length)
        path.chmod(0o444)
        refused(directory, Corrupt, f"{FIRST} has {length} bytes, not {size}")


def test_case_19_a_missing_file_or_manifest(directory: Path) -> None:
    """What a power cut may leave of an entry that was renamed too early."""
    with writable(directory):
        (directory / FIRST).unlink()
    refused(directory, Corrupt, f"{FIRST} is missing")
    overwrite(directory / "manifest.json", 0, b"")
    os.chmod(directory / "manifest.json", 0o644)
    os.truncate(directory / "manifest.json", 0)
    refused(directory, Corrupt, "no valid JSON")


def test_the_header_must_say_what_the_manifest_says(directory: Path) -> None:
    """A header of another shape but the same size is found before any view is made."""
    header = (directory / FIRST).read_bytes()[:4096]
    overwrite(directory / FIRST, header.index(b"[16,33]"), b"[33,16]")
    refused(directory, Corrupt, r"blocks\.0\.weight is not in its header as in the manifest")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"F32"', b'"I32"'),
        (b"blocks.0.scale", b"blocks.0.scalf"),
        (b'"pt"', b'"tf"'),
        (b'"U8"', b'"I8"'),
        (b"{", b"["),
    ],
)
def test_any_other_header_is_refused(directory: Path, old: bytes, new: bytes) -> None:
    """Another dtype or name, other metadata, another kind of filler, broken JSON."""
    header = (directory / FIRST).read_bytes()[:4096]
    overwrite(directory / FIRST, header.index(old), new)
    refused(directory, Corrupt, FIRST)


def test_a_damaged_manifest_names_the_entry(directory: Path) -> None:
    """A flipped byte in the manifest."""
    flip(directory / "manifest.json", 100)
    refused(directory, Corrupt, "entry .*entry: manifest is no valid JSON")


def test_an_entry_of_a_later_format_is_told_apart(directory: Path) -> None:
    """It is not called damaged."""
    with writable(directory):
        (directory / "manifest.json").unlink()
        (directory / "manifest.json").write_bytes(canonical_json({"formatVersion": 9}))
    refused(directory, NewerFormat, "version 9")


@pytest.mark.parametrize("mode", [0o575, 0o557])
def test_a_folder_that_others_may_write_is_refused(directory: Path, mode: int) -> None:
    """Anyone in the group, or anyone at all, could exchange the bytes."""
    directory.chmod(mode)
    refused(directory, Denied, "can be written by others")


def test_a_file_that_others_may_write_is_refused(directory: Path) -> None:
    """The same for one file."""
    (directory / FIRST).chmod(0o466)
    refused(directory, Denied, FIRST)


def test_an_entry_taken_away_while_it_is_opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is renamed away between opening it and getting the lease: the reader backs out."""
    take = locks.acquire_read

    def renamed_first(fd: int) -> None:
        directory.rename(directory.with_name("trash"))
        directory.mkdir(mode=0o555)
        take(fd)

    monkeypatch.setattr(locks, "acquire_read", renamed_first)
    refused(directory, NotFound, "was removed while it was opened")


def test_opening_needs_no_right_to_write(directory: Path) -> None:
    """A read-only mount is enough: no file is opened for writing."""
    code = (
        "import os, pathlib, sys\n"
        "from dlo_cache.entry import open_entry\n"
        "entry = open_entry(pathlib.Path(sys.argv[1]))\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    link = pathlib.Path('/proc/self/fd', fd)\n"
        "    if link.is_symlink() and sys.argv[1] in os.readlink(link):\n"
        "        print(pathlib.Path('/proc/self/fdinfo', fd).read_text().split()[3])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True
    )
    flags = [int(word, 8) for word in done.stdout.split()]
    assert len(flags) == len(list(directory.glob("*.safetensors"))) + 1  # one a mapping, and the lease
    assert not any(flag & os.O_ACCMODE for flag in flags)


def test_threads_that_meet_at_a_file_map_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifying thread and the one that loads both ask first: one mapping, of the right file."""
    made: list[int] = []
    real = mapping._LeasedMap

    def slow(fd: int, *args: Any, **options: Any) -> Any:
        made.append(fd)
        time.sleep(0.05)  # long enough for the other thread to come by
        return real(fd, *args, **options)

    monkeypatch.setattr(mapping, "_LeasedMap", slow)
    write_files_entry(tmp_path / "entry", {"a/b": b"content"})
    with open_entry(tmp_path / "entry") as entry:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: bytes(entry.files[0].data), range(4)))
        assert found == [b"content"] * 4
        assert len(made) == 1
