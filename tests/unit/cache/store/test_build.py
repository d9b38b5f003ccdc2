"""Layout entries: right bytes for every coordinate, equal names for equal content, nothing left after a
failure."""

from __future__ import annotations

import hashlib
import os
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from dlo_cache import build
from dlo_cache.build import build_layout_entries
from dlo_cache.dtypes import numpy_dtype
from dlo_cache.entry import Entry, open_entry
from dlo_cache.errors import (
    Busy,
    Cancelled,
    Invalid,
    NoSpace,
    NotDivisible,
    Unavailable,
    UnknownTensor,
)
from dlo_cache.image_writer import ImageWriter, preferred_buffer_bytes
from dlo_cache.ingest import hold_keys
from dlo_cache.layout import Layout
from dlo_cache.presence import Built
from dlo_cache.progress import ProgressEvent
from dlo_cache.root import Root, init_root
from dlo_cache.verify import verify_entry
from unit.cache.store import checkpoints


def built(root: Root, size: int = 2, **changes: Any) -> list[Built]:
    """The tiny component's entries."""
    arguments: dict[str, Any] = {"producer": {"by": "test"}, "tensor_size": size} | changes
    source = arguments.pop("component", None) or checkpoints.component()
    layout = arguments.pop("layout", None) or checkpoints.layout()
    return build_layout_entries(root, source, layout, **arguments)


def tensors_of(entry: Entry) -> dict[str, checkpoints.Array]:
    """Every tensor of an entry, copied out of its mappings."""
    found = {}
    for file in entry.files:
        for name, view in file.tensors.items():
            raw = bytes(file.data[view.offset : view.offset + view.nbytes])
            found[name] = np.frombuffer(raw, numpy_dtype(view.dtype)).reshape(view.shape)
    return found


def assert_same(found: dict[str, checkpoints.Array], wanted: dict[str, checkpoints.Array]) -> None:
    """Same names, dtypes, shapes and bytes."""
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def assert_nothing_left(root: Root) -> None:
    """Neither an entry nor a stage."""
    assert os.listdir(root.entries_dir) == []
    assert os.listdir(root.ingest_dir) == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_coordinate_gets_its_cut_of_every_tensor(root: Root, size: int) -> None:
    """All roles, dtypes, empty and 0-d tensors, over two shards; the entry verifies byte by byte."""
    for rank, each in enumerate(built(root, size)):
        with open_entry(each.path, manifest_sha256=each.manifest_sha256) as entry:
            assert_same(tensors_of(entry), checkpoints.expected(checkpoints.arrays(), size, rank))
            assert entry.manifest.coordinate == (rank, size)
            assert verify_entry(entry) > 0


@pytest.mark.parametrize(("piece", "buffer"), [(64, 100), (1, 4096), (1000, 7)])
def test_bytes_do_not_depend_on_piece_and_buffer_sizes(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, buffer: int
) -> None:
    """Pieces of single rows and buffers that end amid a tensor give the same digests as large ones."""
    wanted = [each.content_digest for each in built(init_root(tmp_path / "other"))]
    monkeypatch.setattr(build, "PIECE_BYTES", piece)
    monkeypatch.setattr(build, "ImageWriter", lambda pool, _size: ImageWriter(pool, buffer))
    found = built(root)
    assert [each.content_digest for each in found] == wanted
    with open_entry(found[0].path) as entry:
        assert verify_entry(entry) > 0


def test_some_ranks_only(root: Root) -> None:
    """A node builds its own coordinates, in the order asked for, and reads only what they need."""
    events: list[ProgressEvent] = []
    one = built(root, 4, tensor_ranks=[3, 1], progress=events.append)
    every = built(root, 4)
    assert [each.key for each in one] == [every[3].key, every[1].key]
    assert [each.reused for each in every] == [False, True, False, True]
    total = sum(array.nbytes for array in checkpoints.arrays().values())
    read = [event for event in events if event.phase == "build"]
    assert read[-1].done == read[-1].total < total
    with open_entry(every[3].path) as entry:
        assert_same(tensors_of(entry), checkpoints.expected(checkpoints.arrays(), 4, 3))


def test_more_coordinates_than_one_pass_takes(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget of one pass, coordinates are built in several."""
    monkeypatch.setattr(build, "MOST_COORDINATES", 3)
    for rank, each in enumerate(built(root, 4)):
        with open_entry(each.path) as entry:
            assert_same(tensors_of(entry), checkpoints.expected(checkpoints.arrays(), 4, rank))


def test_any_library_reads_the_files(root: Root) -> None:
    """``safetensors.torch.load_file`` of every file returns exactly the tensors, and pads of zeros."""
    each = built(root)[1]
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(each.path.glob("*.safetensors")):
        tensors = safetensors.torch.load_file(file)
        assert not loaded.keys() & {name for name in tensors if not name.startswith("__dlo_pad.")}
        loaded |= tensors
    pads = [tensor for name, tensor in loaded.items() if name.startswith("__dlo_pad.")]
    assert pads
    assert not any(bool(pad.any()) for pad in pads)
    wanted = checkpoints.expected(checkpoints.arrays(), 2, 1)
    assert {name for name in loaded if not name.startswith("__dlo_pad.")} == set(wanted)
    for name, array in wanted.items():
        assert tuple(loaded[name].shape) == array.shape
        assert loaded[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_files_are_block_images(root: Root) -> None:
    """Blocks in execution order, data sections on pages, tensors at multiples of 256 and in the source's
    order."""
    with open_entry(built(root)[0].path) as entry:
        assert [file.group for file in entry.blocks] == ["blocks.0", "blocks.1", "single.0"]
        assert entry.resident is not None
        assert list(entry.resident.tensors) == ["embed.weight", "steps"]
        order = list(checkpoints.arrays())
        for file in entry.files:
            assert file.data_offset % 4096 == 0
            assert all(view.offset % 256 == 0 for view in file.tensors.values())
            assert sorted(file.tensors, key=order.index) == list(file.tensors)


def test_modes_are_those_of_the_format(root: Root) -> None:
    """Directory 0555, files 0444, lease 0644, whatever the umask."""
    for umask, size in ((0o000, 1), (0o077, 2)):
        with umask_of(umask):
            each = built(root, size)[0]
        assert stat.S_IMODE(each.path.stat().st_mode) == 0o555
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in each.path.iterdir()}
        assert modes.pop("lease") == 0o644
        assert set(modes.values()) == {0o444}
        assert {"manifest.json", "producer.json", "resident.safetensors"} <= set(modes)


def test_equal_input_gives_equal_entries(tmp_path: Path) -> None:
    """Two runs, two roots, two umasks, two producers: one key, one manifest byte for byte, one content
    digest."""
    found = []
    for umask, producer in ((0o022, {"by": "a"}), (0o077, {"by": "b"})):
        with umask_of(umask):
            each = built(init_root(tmp_path / producer["by"]), producer=producer)[1]
        found.append((each.key, each.content_digest, (each.path / "manifest.json").read_bytes()))
        assert each.manifest_sha256 == hashlib.sha256(found[-1][2]).hexdigest()
    assert found[0] == found[1]


def test_any_change_of_input_gives_another_key(root: Root) -> None:
    """A byte of a weight or config file, the dtype, the size or the rank of tensor parallelism: each names
    anew."""
    changed = checkpoints.arrays() | {"steps": np.arange(1, 8, dtype=np.int64)}
    rest = checkpoints.layout()
    layout = Layout(rest.id, rest.architecture, rest.groups, rest.rules[::-1], rest.keep_fp32)
    runs = [
        built(root, 2),
        built(root, 4),
        built(root, 2, dtype="float32"),
        built(root, 2, component=checkpoints.component(changed)),
        built(root, 2, component=checkpoints.component(config={"heads": 4, "other": 1})),
        built(root, 2, layout=layout),
    ]
    keys = [each.key for run in runs for each in run]
    assert len(set(keys)) == len(keys) == 14


def test_dtype_policy_casts_floats_and_spares_keep_fp32(root: Root) -> None:
    """Rounded to nearest even as torch does; integers stay; ``keepFp32`` names become float32."""
    source = {name: array for name, array in checkpoints.arrays().items() if not name.startswith("single")}
    each = built(root, 1, dtype="float16", component=checkpoints.component(source))[0]
    with open_entry(each.path) as entry:
        found = tensors_of(entry)
    assert found["steps"].dtype == np.int64
    assert found["blocks.0.out.bias"].dtype == np.float32
    for name in ("blocks.0.q.weight", "blocks.0.scale", "blocks.1.mod.weight"):
        raw = torch.from_numpy(source[name].astype(np.float32))
        assert found[name].tobytes() == raw.to(torch.float16).numpy().tobytes(), name


def test_case_37_every_tensor_has_one_place(root: Root) -> None:
    """Tensors stored under two names with equal bytes keep both names, each in its own block and in no other
    file."""
    arrays = checkpoints.arrays()
    arrays["blocks.1.q.weight"] = arrays["blocks.0.q.weight"]
    with open_entry(built(root, component=checkpoints.component(arrays))[0].path) as entry:
        places = [(name, file.group) for file in entry.files for name in file.tensors]
    assert len({name for name, _ in places}) == len(places) == len(arrays)
    assert ("blocks.1.q.weight", "blocks.1") in places


def test_reuses_a_valid_entry_and_rebuilds_a_broken_one(root: Root) -> None:
    """Case 19: an entry whose manifest or file is cut is set aside and built again; a good one is kept."""
    first = built(root)
    again = built(root)
    assert [each.reused for each in again] == [True, True]
    assert [each.manifest_sha256 for each in again] == [each.manifest_sha256 for each in first]
    for name in ("manifest.json", "000-blocks.0.safetensors", "resident.safetensors"):
        damaged = first[0].path / name
        damaged.chmod(0o644)
        damaged.write_bytes(b"")
        third = built(root)
        assert [each.reused for each in third] == [False, True], name
        assert third[0].manifest_sha256 == first[0].manifest_sha256
        with open_entry(third[0].path) as entry:
            assert verify_entry(entry) > 0
    assert len([name for name in os.listdir(root.quarantine_dir) if not name.endswith(".json")]) == 3


def link_manifest(path: Path) -> None:
    """A manifest that is a link to its like."""
    path.chmod(0o755)
    (path / "manifest.json").rename(path / "moved")
    (path / "manifest.json").symlink_to("moved")


def open_to_others(path: Path) -> None:
    """A file that others may write."""
    (path / "resident.safetensors").chmod(0o666)


def without_lease(path: Path) -> None:
    """An entry that cannot be leased."""
    path.chmod(0o755)
    (path / "lease").unlink()


@pytest.mark.parametrize("spoil", [link_manifest, open_to_others, without_lease])
def test_rebuilds_an_entry_that_cannot_be_trusted(root: Root, spoil: Callable[[Path], None]) -> None:
    """It is set aside even where its bytes may be right."""
    first = built(root, 1)[0]
    spoil(first.path)
    again = built(root, 1)[0]
    assert (again.reused, again.manifest_sha256) == (False, first.manifest_sha256)
    assert built(root, 1)[0].reused
    assert any(name.startswith(first.key) for name in os.listdir(root.quarantine_dir))


def test_removes_what_is_no_entry_where_one_belongs(root: Root) -> None:
    """An empty directory that someone made, or a file, or a link to elsewhere does not stop a build."""
    key = built(root)[0].key
    for make in (Path.mkdir, Path.touch, lambda path: path.symlink_to("/etc")):
        other = init_root(root.path.parent / f"other-{make.__name__}")
        make(other.entries_dir / key)
        assert built(other)[0].reused is False
        assert (other.entries_dir / key / "manifest.json").is_file()


def test_unknown_tensor_writes_nothing(root: Root) -> None:
    """A tensor without a rule is an error that names it."""
    arrays = checkpoints.arrays() | {"blocks.0.surprise": np.zeros(4, np.float32)}
    with pytest.raises(UnknownTensor, match=r"blocks\.0\.surprise"):
        built(root, component=checkpoints.component(arrays))
    assert_nothing_left(root)


def test_indivisible_writes_nothing(root: Root) -> None:
    """Heads that cannot be divided are named before anything is written."""
    with pytest.raises(NotDivisible, match="head counts heads = 4"):
        built(root, 3)
    assert_nothing_left(root)


@pytest.mark.parametrize("ranks", [[], [2], [-1], [0, 0]])
def test_ranks_must_be_distinct_and_below_the_size(root: Root, ranks: list[int]) -> None:
    """Nonsense ranks are refused."""
    with pytest.raises(Invalid, match="ranks"):
        built(root, 2, tensor_ranks=ranks)


def test_quantization_is_refused(root: Root) -> None:
    """A policy that is not built yet is refused by its name."""
    with pytest.raises(Invalid, match="Fp8PerTensor"):
        built(root, quantization="Fp8PerTensor")


def test_case_22_too_little_room_is_refused_before_the_first_byte(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the bytes needed and free; with head-room kept back nothing is written."""
    found = os.statvfs(root.path)
    blocks = (1 << 30) // found.f_frsize
    short = os.statvfs_result(
        (*found[:1], found.f_frsize, blocks, blocks, (66 << 20) // found.f_frsize, *found[5:])
    )
    monkeypatch.setattr(os, "statvfs", lambda _path: short)
    with pytest.raises(NoSpace) as caught:
        built(root, 4)
    assert caught.value.code == "InsufficientDisk"
    assert str(caught.value.subject["needed_bytes"]) in caught.value.message
    assert str((2 << 20) // found.f_frsize * found.f_frsize) in caught.value.message
    assert_nothing_left(root)
    assert os.listdir(root.locks_dir)


@pytest.mark.parametrize(
    "stop", [Cancelled("stop"), RuntimeError("bug"), KeyboardInterrupt(), OSError(5, "I/O error")]
)
def test_whatever_ends_a_build_leaves_nothing(root: Root, stop: BaseException) -> None:
    """An error, a bug or Ctrl-C at any read removes the stage; the locks are free afterwards."""
    for reads in (1, 5, 15):
        left = [reads]

        def fail(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise stop

        expected = Unavailable if isinstance(stop, OSError) else type(stop)
        with pytest.raises(expected):
            built(root, component=checkpoints.component(on_read=fail))
        assert_nothing_left(root)
    assert len(built(root)) == 2


def test_cancel_at_any_moment_leaves_nothing(root: Root) -> None:
    """Every question whether to stop may be answered with yes."""
    asked = 0

    def never() -> bool:
        nonlocal asked
        asked += 1
        return False

    built(root, 1, cancel=never)
    assert asked > 10
    for moment in range(asked):
        count = iter(range(asked + 1))
        with pytest.raises(Cancelled):
            built(root, 2, cancel=lambda count=count, moment=moment: next(count) >= moment)
    assert len(os.listdir(root.entries_dir)) == 1
    assert os.listdir(root.ingest_dir) == []


def test_source_that_ends_early_is_named(root: Root) -> None:
    """A file cut after it was looked at is an error of the source, not a hole in the entry."""
    source = checkpoints.component(shards=1)
    cut = checkpoints.MemoryFile(source.weights[0].name, b"", claimed_sha256=source.weights[0].sha256)
    with pytest.raises(Unavailable, match="model-1") as caught:
        built(root, component=source.with_files([cut]))
    assert caught.value.code == "SourceChanged"
    assert_nothing_left(root)


def test_case_20_a_builder_waits_for_the_key_within_bounds(root: Root) -> None:
    """The error names the entry and who holds its lock since when; other keys are not blocked."""
    key = built(init_root(root.path.parent / "other"))[1].key
    with hold_keys(root, [key], timeout_seconds=0):
        with pytest.raises(Busy, match=rf"{key}.*process {os.getpid()} on .* since 20"):
            built(root, lock_timeout_seconds=0.05)
        assert built(root, tensor_ranks=[0], lock_timeout_seconds=0.05)[0].reused is False
    assert built(root)[1].key == key


@pytest.mark.parametrize("number", [28, 122])
def test_case_22_full_disk_amid_the_build(root: Root, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """ENOSPC or EDQUOT at any write is ``DiskFull``; the stage goes, other entries stay, and it recovers by
    itself."""
    kept = built(root, 1)
    for write in (0, 2, 5):
        error = OSError(number, os.strerror(number))
        with failing("write", write, error, monkeypatch), pytest.raises(NoSpace) as caught:
            built(root, 2)
        assert caught.value.code == "DiskFull"
        assert os.listdir(root.ingest_dir) == []
        assert os.listdir(root.entries_dir) == [kept[0].key]
    assert len(built(root, 2)) == 2


def test_failed_sync_throws_the_stage_away(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO at any sync before the rename, or at the one after it: no entry, and every sync is of a new
    file."""
    images, notes, directories = 4, 3, 2
    for index in range(images + notes + directories):
        error = OSError(5, "Input/output error")
        with failing("fsync", index, error, monkeypatch), pytest.raises(Unavailable, match="Input/output"):
            built(root, 1)
        assert_nothing_left(root)
    with failing("fsync", images + notes + directories, OSError(5, "Input/output error"), monkeypatch):
        assert len(built(root, 1)) == 1


def test_memory_does_not_grow_with_the_model(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 16 MiB, cut by rows and by columns for four coordinates, pass through far less memory."""
    wide = np.arange(8 << 20, dtype=np.uint16).reshape(2048, -1).view(numpy_dtype("BF16"))
    arrays = {f"blocks.0.{name}": wide for name in ("mod.weight", "out.weight")}
    source = checkpoints.component(arrays, shards=1)
    monkeypatch.setattr(build, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(build, "preferred_buffer_bytes", lambda _writers, _budget: 128 << 10)
    tracemalloc.start()
    try:
        each = built(root, 4, component=source)[2]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    with open_entry(each.path) as entry:
        assert_same(tensors_of(entry), checkpoints.expected(arrays, 4, 2))


def test_writes_in_large_calls(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image up to the buffer's size is written in one call; buffers are 16 to 64 MiB and share one
    budget."""
    sizes: list[int] = []
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        sizes.append(len(data))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    each = built(root, 1)[0]
    for path in each.path.glob("*.safetensors"):
        assert path.stat().st_size in sizes
    mebibyte = 1 << 20
    buffers = [preferred_buffer_bytes(writers, build.WRITE_BUDGET_BYTES) for writers in range(1, 9)]
    assert all(16 * mebibyte <= size <= 64 * mebibyte for size in buffers)
    assert all(2 * (at + 1) * size <= 256 * mebibyte for at, size in enumerate(buffers))


@contextmanager
def failing(name: str, index: int, error: OSError, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the call ``index`` of ``os.<name>`` raise ``error``, once."""
    real: Callable[..., Any] = getattr(os, name)
    calls = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == index + 1:
            raise error
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        yield


@contextmanager
def umask_of(mask: int) -> Iterator[None]:
    """Runs under another umask."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
