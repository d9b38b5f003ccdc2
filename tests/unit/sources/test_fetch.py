"""Files of a store as the builder reads them: looks, the stage, hitches, memory, and who holds what."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dlo_cache.errors import Cancelled, Invalid, NoSpace
from dlo_cache.progress import ProgressEvent
from dlo_cache.root import init_root
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.errors import SourceChanged, SourceInvalid, SourceUnreachable
from dlo_sources.fetch import Fetcher
from dlo_sources.pipeline import open_remote
from dlo_sources.remote import Patience, RemoteObject, read_stream
from dlo_sources.stage import FOLDER, Stage
from fakes.hub import running_hub
from unit.sources.checkpoints import put_shards, shell, tensor, tree

HASTY = Patience(attempts=3, pause_seconds=0.0)
LARGE = bytes(range(256)) * 8192  # 2 MiB


class Shelf:
    """A store in memory. ``hitches`` are offsets at which a stream breaks off, each once."""

    name, revision = "shelf", ""

    def __init__(self, files: Mapping[str, bytes], *, digests: bool = True) -> None:
        self.files = dict(files)
        self.objects = {
            name: RemoteObject(
                name, len(data), _sha256(data) if digests else None, f"shelf|{name}|{_sha256(data)}"
            )
            for name, data in files.items()
        }
        self.asked: list[tuple[str, int, int]] = []
        self.hitches: list[int] = []
        self.away = False

    def stream(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """See Store.stream."""
        self.asked.append((found.name, start, stop))
        if self.away:
            raise SourceUnreachable("the shelf is away")
        at = start
        while at < stop:
            end = min(at + 100_000, stop, *[each for each in self.hitches if each > at])
            yield self.files[found.name][at:end]
            at = end
            if at in self.hitches and at < stop:
                self.hitches.remove(at)
                raise SourceUnreachable("it broke off")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def staged(tmp_path: Path) -> list[str]:
    """What lies in the stage."""
    return sorted(os.listdir(tmp_path / FOLDER)) if (tmp_path / FOLDER).is_dir() else []


def whole(fetcher: Fetcher, name: str) -> bytes:
    """All bytes of a file, as the builder reads them."""
    file = fetcher.files[name]
    buffer = bytearray(file.size)
    assert file.readinto(buffer, 0) == file.size
    return bytes(buffer)


def test_a_stream_is_taken_up_where_it_broke() -> None:
    """Every byte once and in order; what makes progress is not given up."""
    shelf = Shelf({"a": LARGE})
    shelf.hitches = [150_000, 300_000, 450_000, 600_000, 750_000]
    found = shelf.objects["a"]
    got = b"".join(read_stream(shelf, found, 5, 1_000_000, patience=HASTY, cancel=None))
    assert got == LARGE[5:1_000_000]
    assert [start for _, start, _ in shelf.asked] == [5, 150_000, 300_000, 450_000, 600_000, 750_000]


def test_patience_ends() -> None:
    """So many attempts without a byte, then SourceUnreachable."""
    shelf = Shelf({"a": LARGE})
    shelf.away = True
    with pytest.raises(SourceUnreachable):
        list(read_stream(shelf, shelf.objects["a"], 0, 10, patience=HASTY, cancel=None))
    assert len(shelf.asked) == 3


def test_more_bytes_than_asked_for() -> None:
    """A store that does not keep to ranges is refused, not believed."""
    shelf = Shelf({"a": LARGE})
    shelf.stream = lambda found, start, stop: iter([LARGE])  # type: ignore[method-assign]  # noqa: ARG005
    with pytest.raises(SourceInvalid, match="longer"):
        list(read_stream(shelf, shelf.objects["a"], 0, 10, patience=HASTY, cancel=None))


def test_a_large_file_is_fetched_once_for_many_readers(tmp_path: Path) -> None:
    """Eight threads, one fetch; the stage has it until it is let go."""
    shelf = Shelf({"a": LARGE})
    fetcher = Fetcher(shelf, Stage(tmp_path), patience=HASTY)
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(whole(fetcher, "a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [LARGE] * 8
    assert shelf.asked == [("a", 0, len(LARGE))]
    assert staged(tmp_path) == [_sha256(LARGE)]
    fetcher.close(done=True)
    assert staged(tmp_path) == []


def test_two_names_of_the_same_bytes(tmp_path: Path) -> None:
    """One file in the stage, and it goes with the last holder."""
    shelf = Shelf({"a": LARGE, "b": LARGE})
    fetcher = Fetcher(shelf, Stage(tmp_path), patience=HASTY)
    assert whole(fetcher, "a") == whole(fetcher, "b") == LARGE
    assert len(shelf.asked) == 1
    fetcher.files["a"].close(remove=True)
    assert staged(tmp_path) == [_sha256(LARGE)]
    fetcher.files["b"].close(remove=True)
    assert staged(tmp_path) == []


def test_a_file_goes_after_its_last_expected_byte(tmp_path: Path) -> None:
    """Where room is short: read in two parts, gone after the second."""
    fetcher = Fetcher(Shelf({"a": LARGE}), Stage(tmp_path), patience=HASTY)
    fetcher.expect({"a": 2_000_000})
    fetcher.files["a"].readinto(bytearray(1_000_000), 0)
    assert staged(tmp_path) == [_sha256(LARGE)]
    fetcher.files["a"].readinto(bytearray(1_000_000), 1_000_000)
    assert staged(tmp_path) == []


@pytest.mark.parametrize("left", ["right", "wrong", "longer", "linked"])
def test_what_an_earlier_process_left(tmp_path: Path, left: str) -> None:
    """A right part is taken up; wrong bytes and a longer file are thrown away; a link is not followed."""
    (tmp_path / FOLDER).mkdir()
    path = tmp_path / FOLDER / _sha256(LARGE)
    contents = {"right": LARGE[:1_500_000], "wrong": bytes(1_500_000), "longer": LARGE + b"x"}
    if left == "linked":
        (tmp_path / "elsewhere").write_bytes(LARGE[:10])
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(contents[left])
    shelf = Shelf({"a": LARGE})
    fetcher = Fetcher(shelf, Stage(tmp_path), patience=HASTY)
    if left == "linked":
        with pytest.raises(Invalid, match="symbolic"):
            whole(fetcher, "a")
        assert (tmp_path / "elsewhere").read_bytes() == LARGE[:10]
        return
    assert whole(fetcher, "a") == LARGE
    fetched = sum(stop - start for _, start, stop in shelf.asked)
    expected = {"right": len(LARGE) - 1_500_000, "wrong": 2 * len(LARGE) - 1_500_000, "longer": len(LARGE)}
    assert fetched == expected[left]


def test_a_whole_file_of_an_earlier_process_is_hashed_again(tmp_path: Path) -> None:
    """After a power cut a file may have its size and not its bytes."""
    (tmp_path / FOLDER).mkdir()
    torn = bytearray(LARGE)
    torn[1_000_000:1_004_096] = bytes(4096)
    (tmp_path / FOLDER / _sha256(LARGE)).write_bytes(torn)
    fetcher = Fetcher(Shelf({"a": LARGE}), Stage(tmp_path), patience=HASTY)
    assert whole(fetcher, "a") == LARGE


def test_other_bytes_than_stated(tmp_path: Path) -> None:
    """Large or small, fetched whole or looked at before: SourceChanged, and nothing stays."""
    shelf = Shelf({"a": LARGE, "b": b"small"})
    shelf.files = {"a": LARGE[:-1] + b"?", "b": b"Small"}
    fetcher = Fetcher(shelf, Stage(tmp_path), patience=HASTY)
    for name in ("a", "b"):
        with pytest.raises(SourceChanged, match="other bytes"):
            whole(fetcher, name)
    with pytest.raises(SourceChanged):
        fetcher.files["b"].read(0, 2)
    assert staged(tmp_path) == []


def test_a_header_of_another_file(tmp_path: Path) -> None:
    """What was seen of a file by a short read is compared once the whole was fetched and hashed."""
    shelf = Shelf({"a": LARGE})
    shelf.files["a"] = b"forged" + LARGE[6:]
    fetcher = Fetcher(shelf, Stage(tmp_path), patience=HASTY)
    assert fetcher.files["a"].read(0, 6) == b"forged"
    shelf.files["a"] = LARGE
    with pytest.raises(SourceChanged, match="header"):
        whole(fetcher, "a")


def test_small_files_are_asked_for_once(tmp_path: Path) -> None:
    """Settings and vocabularies stay in memory: looked at, hashed and built from one answer."""
    shelf = Shelf({"config.json": b"{}"}, digests=False)
    fetcher = Fetcher(shelf, Stage(tmp_path), patience=HASTY)
    file = fetcher.files["config.json"]
    assert file.read(0, 99) == b"{}"
    assert file.digest(lambda _: None) == _sha256(b"{}")
    assert whole(fetcher, "config.json") == b"{}"
    assert shelf.asked == [("config.json", 0, 2)]
    assert staged(tmp_path) == []


def test_digests_that_a_store_does_not_state(tmp_path: Path) -> None:
    """Hashed once, kept for the build where there is room, remembered by the tag that names the bytes."""
    (tmp_path / "digests").mkdir()
    stage, shelf = Stage(tmp_path), Shelf({"a": LARGE}, digests=False)
    fetcher = Fetcher(shelf, stage, patience=HASTY)
    (file,) = hash_files(fetcher.files.values(), DigestCache(tmp_path / "digests"))
    assert file.sha256 == _sha256(LARGE)
    fetcher.close()
    again = Fetcher(shelf, stage, patience=HASTY)
    (file,) = hash_files(again.files.values(), DigestCache(tmp_path / "digests"))
    assert file.sha256 == _sha256(LARGE)
    assert whole(again, "a") == LARGE
    assert shelf.asked == [("a", 0, len(LARGE))]
    replaced = Shelf({"a": LARGE[::-1]}, digests=False)
    (file,) = hash_files(Fetcher(replaced, stage).files.values(), DigestCache(tmp_path / "digests"))
    assert file.sha256 == _sha256(LARGE[::-1])


def test_hashed_without_room(tmp_path: Path) -> None:
    """Streamed past, and nothing is kept."""
    fetcher = Fetcher(Shelf({"a": LARGE}, digests=False), Stage(tmp_path), patience=HASTY)
    fetcher.straight = True
    assert fetcher.files["a"].digest(lambda _: None) == _sha256(LARGE)
    assert staged(tmp_path) == []


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DiskFull, and the part does not stay to fill it."""
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if os.fstat(fd).st_size > 500_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    fetcher = Fetcher(Shelf({"a": LARGE}), Stage(tmp_path), patience=HASTY)
    with pytest.raises(NoSpace) as caught:
        whole(fetcher, "a")
    assert caught.value.code == "DiskFull"
    assert staged(tmp_path) == []


def test_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    """By age, by name, and never what is held."""
    stage = Stage(tmp_path)
    fetcher = Fetcher(Shelf({"a": LARGE, "b": LARGE[::-1]}), stage, patience=HASTY)
    whole(fetcher, "a")
    whole(fetcher, "b")
    fetcher.files["b"].close()
    stage.sweep(older_than_seconds=60)
    stage.sweep(keep=[_sha256(LARGE[::-1])])
    assert len(staged(tmp_path)) == 2
    stage.sweep()
    assert staged(tmp_path) == [_sha256(LARGE)]


def test_cancelled_in_the_middle(tmp_path: Path) -> None:
    """Seen between two pieces; the part stays and is taken up."""
    shelf = Shelf({"a": LARGE})
    events: list[ProgressEvent] = []
    stage = Stage(tmp_path)
    fetcher = Fetcher(shelf, stage, progress=events.append, cancel=lambda: len(events) >= 5, patience=HASTY)
    with pytest.raises(Cancelled):
        whole(fetcher, "a")
    fetcher.close()
    assert (tmp_path / FOLDER / _sha256(LARGE)).stat().st_size == 500_000
    assert whole(Fetcher(shelf, stage, patience=HASTY), "a") == LARGE
    assert shelf.asked[-1] == ("a", 500_000, len(LARGE))


def test_progress_is_in_bytes(tmp_path: Path) -> None:
    """It grows to the size of what is fetched."""
    events: list[ProgressEvent] = []
    whole(Fetcher(Shelf({"a": LARGE}), Stage(tmp_path), progress=events.append), "a")
    assert {(event.phase, event.total) for event in events} == {("read", len(LARGE))}
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert events[-1].done == len(LARGE)


def test_only_what_a_pipeline_needs_is_asked_for(tmp_path: Path) -> None:
    """Never a pickle, a picture or code, and of large weights no more than headers."""
    folder = shell(tmp_path / "ckpt")
    put_shards(folder, [tensor(f"transformer_blocks.{at}.w", "F32", (512, 1024)) for at in range(2)], 2)
    for name in ("pytorch_model.bin", "modeling.py", "diffusion_pytorch_model.fp16.safetensors"):
        (folder / name).write_bytes(b"never")
    shelf = Shelf(tree(tmp_path / "ckpt"))
    (tmp_path / "cache").mkdir()
    pipeline = open_remote(Fetcher(shelf, Stage(tmp_path / "cache")))
    assert {name.rpartition("/")[2] for name, _, _ in shelf.asked} == {
        "model_index.json",
        "config.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model-00002-of-00002.safetensors",
    }
    assert sum(stop - start for _, start, stop in shelf.asked) < 10_000
    assert len(pipeline.component("transformer").tensors) == 2


_MEASURED = """
import json, resource, sys
from pathlib import Path
from dlo_cache.build import build_layout_entries
from dlo_cache.layout import Layout
from dlo_cache.root import open_root
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.fetch import Fetcher
from dlo_sources.hub import open_hub
from dlo_sources.pipeline import open_remote
from dlo_sources.stage import Stage

root = open_root(Path(sys.argv[1]))
layout = Layout.from_json(json.dumps({
    "id": "case", "architecture": "CaseTransformer", "groups": ["transformer_blocks"],
    "rules": [{"pattern": "**", "role": "replicated"}],
}))
fetcher = Fetcher(open_hub("acme/big", "main", endpoint=sys.argv[2]), Stage(root.ingest_dir))
pipeline = open_remote(fetcher)
hash_files(pipeline.all_files(), DigestCache(None))
component = pipeline.component("transformer")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = build_layout_entries(root, component, layout, tensor_size=1, producer={})
fetcher.close(done=True)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"grown": (after - before) * 1024, "bytes": made[0].bytes}))
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """640 MiB in two shards, fetched from a hub and cut in a process of its own: at most 512 MiB."""
    folder = shell(tmp_path / "ckpt")
    placed: dict[str, str] = {}
    for part in range(2):
        name = f"diffusion_pytorch_model-{part + 1:05d}-of-00002.safetensors"
        tensors = [f"transformer_blocks.{5 * part + at}.w" for at in range(5)]
        head = {
            each: {"dtype": "BF16", "shape": [8192, 4096], "data_offsets": [at << 26, (at + 1) << 26]}
            for at, each in enumerate(tensors)
        }
        text = json.dumps(head).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (5 << 26))
        placed |= dict.fromkeys(tensors, name)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    root = init_root(tmp_path / "cache")
    with running_hub() as hub:
        hub.push("acme/big", tmp_path / "ckpt")
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED, str(root.path), hub.url],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"] > 640 << 20
    assert found["grown"] < 512 << 20
    assert staged(root.ingest_dir) == []


def test_many_threads_may_begin_the_stage_at_once(tmp_path: Path) -> None:
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        shelf = Shelf({f"f{at}": LARGE + bytes([at]) for at in range(4)}, digests=False)
        with closing(Fetcher(shelf, Stage(folder), patience=HASTY)) as fetcher:
            gate = threading.Barrier(4)

            def hashed(file: Any, gate: threading.Barrier = gate) -> None:
                gate.wait()
                hash_files([file], DigestCache(None))

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(hashed, fetcher.files.values()))
        assert len(staged(folder)) == 4


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    """What was hashed stays on the disk, but is not kept open; a build opens it again and fetches nothing."""
    shelf = Shelf({f"f{at}": LARGE + bytes([at]) for at in range(24)}, digests=False)
    fetcher = Fetcher(shelf, Stage(tmp_path), patience=HASTY)
    before = len(os.listdir("/proc/self/fd"))
    hash_files(list(fetcher.files.values()), DigestCache(None))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(staged(tmp_path)) == 24
    asked = len(shelf.asked)
    assert whole(fetcher, "f7") == shelf.files["f7"]
    assert len(shelf.asked) == asked
    fetcher.close()
