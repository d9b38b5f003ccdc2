"""Verification: every byte counts, the damage is named, and shares of several ranks cover all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from dlo_cache import verify
from dlo_cache.entry import Entry, open_entry
from dlo_cache.errors import Cancelled, Corrupt, Invalid
from dlo_cache.progress import ProgressEvent
from dlo_cache.verify import verify_entry
from unit.cache.format.entries import Shaped, flip, write_files_entry, write_layout_entry

FIRST = "000-blocks.0.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A published entry of three blocks and a resident file."""
    write_layout_entry(tmp_path / "entry")
    return tmp_path / "entry"


def corrupt(directory: Path, part: tuple[int, int] = (0, 1)) -> Corrupt | None:
    """The error that verification ends in, if any."""
    with open_entry(directory) as entry:
        try:
            verify_entry(entry, part=part, threads=2)
        except Corrupt as error:
            return error
    return None


def test_a_good_entry_is_checked_to_the_last_byte(directory: Path) -> None:
    """The count is that of all data files, headers and fillers included."""
    with open_entry(directory) as entry:
        assert verify_entry(entry) == entry.nbytes == entry.manifest.total_bytes
        assert entry.close()


def test_every_byte_of_a_file_counts(directory: Path) -> None:
    """A flip anywhere in the data section is found: in a tensor by name, in a filler by its place."""
    path = directory / FIRST
    with open_entry(directory) as entry:
        file = entry.files[0]
        offset, nbytes = file.data_offset, file.nbytes
        tensors = list(file.tensors.values())
    for at in {*range(0, nbytes, 97), *(tensor.offset for tensor in tensors[:-1]), nbytes - 1}:
        flip(path, offset + at)
        error = corrupt(directory)
        flip(path, offset + at)
        assert error is not None, at
        held = next(
            (tensor.name for tensor in tensors if tensor.offset <= at < tensor.offset + tensor.nbytes), None
        )
        assert error.subject["tensor"] == held
        assert error.subject["file"] == FIRST
        assert (held or "filler") in error.message
    assert corrupt(directory) is None


def test_the_headers_white_space_counts(directory: Path) -> None:
    """A tab for a space changes nothing for a parser and is still not what was published."""
    path = directory / FIRST
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(4095)
        file.write(b"\t")
    path.chmod(0o444)
    error = corrupt(directory)
    assert error is not None
    assert "its header differs" in error.message


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_shares_cover_every_byte_once_and_evenly(directory: Path, count: int) -> None:
    """All shares together check all bytes, none twice; with more shares than work some have none."""
    with open_entry(directory) as entry:
        shares = [verify_entry(entry, part=(index, count), threads=1) for index in range(count)]
        assert sum(shares) == entry.nbytes
        assert shares == [verify_entry(entry, part=(index, count), threads=3) for index in range(count)]
        largest = max(entry.manifest.tensors, key=lambda tensor: tensor.nbytes).nbytes
        assert max(shares) - min(shares) <= max(largest, 8192)


@pytest.mark.parametrize("count", [2, 4])
def test_exactly_one_share_finds_a_damage(directory: Path, count: int) -> None:
    """Whatever byte is bad, one of the ranks sees it."""
    for at in (0, 4096, 4096 + 1100, 4096 + 1500, 4096 + 1600):
        flip(directory / FIRST, at) if at else None
        found = [corrupt(directory, (index, count)) for index in range(count)]
        if at:
            flip(directory / FIRST, at)
        assert len([error for error in found if error]) == (1 if at else 0), at


def test_a_part_outside_the_whole_is_refused(directory: Path) -> None:
    """There is no third of two."""
    with open_entry(directory) as entry, pytest.raises(Invalid, match="part 2 of 2"):
        verify_entry(entry, part=(2, 2))


def test_files_entries_are_checked_by_file(tmp_path: Path) -> None:
    """Kind Files: all bytes, empty files too; the bad file is named."""
    write_files_entry(
        tmp_path / "entry", {"model_index.json": b"{}", "vae/model.bin": bytes(10_000), "empty": b""}
    )
    with open_entry(tmp_path / "entry") as entry:
        assert verify_entry(entry) == 10_002
        assert sum(verify_entry(entry, part=(index, 2)) for index in range(2)) == 10_002
    flip(tmp_path / "entry" / "vae" / "model.bin", 9_999)
    error = corrupt(tmp_path / "entry")
    assert error is not None
    assert "vae/model.bin" in error.message


def test_a_large_file_is_hashed_by_all_threads_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wide path gives the same answer as the narrow one."""
    monkeypatch.setattr(verify, "WIDE_BYTES", 1000)
    monkeypatch.setattr(verify, "SLICE_BYTES", 300)
    write_files_entry(tmp_path / "entry", {"large": bytes(range(256)) * 20})
    assert corrupt(tmp_path / "entry") is None
    flip(tmp_path / "entry" / "large", 5000)
    assert corrupt(tmp_path / "entry") is not None


def test_progress_grows_to_the_total(directory: Path) -> None:
    """Events come one at a time, never fall back, and end at the whole."""
    events: list[ProgressEvent] = []
    inside = threading.Lock()

    def progress(event: ProgressEvent) -> None:
        assert inside.acquire(blocking=False)
        events.append(event)
        inside.release()

    with open_entry(directory) as entry:
        verify_entry(entry, threads=4, progress=progress)
        assert {event.phase for event in events} == {"verify"}
        assert [event.done for event in events] == sorted(event.done for event in events)
        assert events[-1].done == events[-1].total == entry.nbytes


def test_cancel_stops_within_a_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to stop is seen between slices, not only between tensors."""
    monkeypatch.setattr(verify, "SLICE_BYTES", 1000)
    write_layout_entry(tmp_path / "entry", {"b.0": [Shaped("b.0.w", "U8", (100_000,))]}, resident=())
    done: list[int] = []
    with open_entry(tmp_path / "entry") as entry:
        with pytest.raises(Cancelled):
            verify_entry(
                entry,
                threads=1,
                progress=lambda event: done.append(event.done),
                cancel=lambda: len(done) >= 3,
            )
        assert max(done) < 10_000
        assert entry.close()


def test_a_failure_stops_the_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once one tensor is bad the rest need not be read to the end."""
    monkeypatch.setattr(verify, "SLICE_BYTES", 100)
    blocks = {f"b.{at}": [Shaped(f"b.{at}.w", "U8", (50_000,))] for at in range(8)}
    write_layout_entry(tmp_path / "entry", blocks, resident=())
    flip(tmp_path / "entry" / "000-b.0.safetensors", 4096)
    done: list[int] = []
    with open_entry(tmp_path / "entry") as entry:
        with pytest.raises(Corrupt, match=r"b\.0\.w"):
            verify_entry(entry, threads=1, progress=lambda event: done.append(event.done))
        assert max(done) < 2 * 50_000


def test_a_failing_progress_callback_ends_the_run(directory: Path) -> None:
    """The caller's own error comes back as it is."""

    def progress(event: ProgressEvent) -> None:
        raise RuntimeError("disk of the caller is full")

    with open_entry(directory) as entry, pytest.raises(RuntimeError, match="of the caller"):
        verify_entry(entry, progress=progress)


def test_nothing_is_kept_of_a_verification(directory: Path) -> None:
    """After it, closing unmaps everything: no view is left in a thread or an error."""
    entry: Entry = open_entry(directory)
    verify_entry(entry, threads=3)
    assert entry.close()
