"""The crash table: a process dies before each of its durable system calls; afterwards absent or whole, never
half."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest
from dlo_cache.build import build_layout_entries
from dlo_cache.entry import open_entry
from dlo_cache.files_entry import build_files_entry
from dlo_cache.ingest import hold_keys
from dlo_cache.recovery import recover
from dlo_cache.removal import evict, quarantine
from dlo_cache.root import Root, init_root, open_root
from dlo_cache.store import list_entries
from dlo_cache.verify import verify_entry
from unit.cache.store import checkpoints
from unit.cache.store.processes import KILLED, in_child, killed_before

MOST_CALLS = 400


def build_one(root: Root) -> str:
    """One layout entry of one coordinate."""
    layout = checkpoints.layout()
    source = checkpoints.component(checkpoints.arrays(blocks=1))
    return build_layout_entries(root, source, layout, tensor_size=1, producer={})[0].key


def build_files(root: Root, extra: bytes = b"") -> str:
    """A files entry in sub-folders; with ``extra``, another that shares all but one file by link."""
    files = [
        checkpoints.MemoryFile("model_index.json", b"{}" + extra),
        checkpoints.MemoryFile("vae/config.json", b"config"),
        checkpoints.MemoryFile("vae/model.safetensors", b"weights" * 100),
    ]
    return build_files_entry(root, files, select="All", producer={}).key


def assert_sound(root: Root) -> None:
    """Whatever is visible is whole, before any recovery; recovery leaves no leftover and no lock."""
    for info in list_entries(root):
        assert info.problem == ""
        with open_entry(info.path) as entry:
            verify_entry(entry)
    recover(open_root(root.path))
    assert os.listdir(root.ingest_dir) == []
    assert os.listdir(root.trash_dir) == []
    for info in list_entries(root):
        assert stat.S_IMODE(info.path.stat().st_mode) == 0o555
    keys = [name.removesuffix(".lock") for name in os.listdir(root.locks_dir)]
    with hold_keys(root, keys, timeout_seconds=0):
        pass


def die_at_every_call(work: Callable[[], None], check: Callable[[], None]) -> int:
    """Runs ``work`` in children killed before call 0, 1, 2, …, ``check``ing after each, until one survives;
    the count."""
    for call in range(MOST_CALLS):
        status = in_child(killed_before(call, work))
        check()
        if status == 0:
            return call
        assert status == KILLED
    raise AssertionError("the work never ended")


def test_publish(root: Root) -> None:
    """Killed anywhere in a build: the next one succeeds and the entry is whole."""
    seen: set[int] = set()

    def check() -> None:
        seen.add(len(os.listdir(root.entries_dir)))
        assert_sound(root)
        for info in list_entries(root):
            evict(root, info.key)

    assert die_at_every_call(lambda: ignore(build_one(root)), check) > 25
    assert seen == {0, 1}
    build_one(root)
    assert_sound(root)


def test_publish_of_linked_files(root: Root) -> None:
    """The same for a files entry with sub-folders and hard links; the entry that lends them stays whole."""
    lender = build_files(root)

    def check() -> None:
        assert_sound(root)
        for info in list_entries(root):
            if info.key != lender:
                evict(root, info.key)
        assert (root.entries_dir / lender).is_dir()

    assert die_at_every_call(lambda: ignore(build_files(root, b"more")), check) > 25


@pytest.mark.parametrize(
    "remove", [evict, lambda root, key: quarantine(root, key, "test")], ids=["evict", "quarantine"]
)
def test_removal(root: Root, remove: Callable[[Root, str], None]) -> None:
    """Killed anywhere in an eviction or quarantine: the entry is whole or gone, and can be built again."""
    key = build_one(root)
    seen: set[bool] = set()

    def check() -> None:
        seen.add((root.entries_dir / key).exists())
        assert_sound(root)
        build_one(root)

    assert die_at_every_call(lambda: remove(root, key), check) >= 4
    assert seen == {True, False}


def test_init_root(root: Root) -> None:
    """Killed anywhere in ``init_root``: the next call makes the root, and no directory without a marker
    opens."""
    made = [0]

    def path_now() -> str:
        return f"root-{made[0]}"

    def check() -> None:
        path = root.path.parent / path_now()
        again = init_root(path)
        assert open_root(path) == again
        assert sorted(os.listdir(again.ingest_dir)) == sorted(
            name for name in os.listdir(again.ingest_dir) if name.startswith("probe.")
        )
        made[0] += 1

    assert die_at_every_call(lambda: ignore(init_root(root.path.parent / path_now())), check) > 20


def ignore(_value: object) -> None:
    """Turns a call with a result into work."""
