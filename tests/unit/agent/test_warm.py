"""The page cache: what is warmed is in memory, whatever the kernel offers, and the process stays small."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from dlo_agent import warm
from dlo_cache.errors import Cancelled, NotFound
from dlo_cache.root import Root, init_root
from unit.agent.one_node import OneNode, layout


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, str]:
    """A root with one entry."""
    root = init_root(tmp_path_factory.mktemp("warm") / "cache")
    node = OneNode(root.path)
    node.ask([layout(0)])
    key = node.settle()["entries"][0]["inputKey"]
    node.close()
    return root, key


def chill(root: Root, key: str) -> None:
    """Drops the entry's pages."""
    for path in (root.entries_dir / key).glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def test_a_cold_entry_is_brought_in(entry: tuple[Root, str]) -> None:
    """Measured before and after."""
    root, key = entry
    size = sum(path.stat().st_size for path in (root.entries_dir / key).glob("*.safetensors"))
    chill(root, key)
    assert warm.resident_bytes(root, key) < size // 10
    found = warm.warm_entry(root, key)
    assert found.bytes == found.resident == warm.resident_bytes(root, key) == size


def test_by_big_reads_where_the_kernel_has_no_such_call(
    entry: tuple[Root, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An advice that no kernel knows stands for one that this kernel does not know."""
    root, key = entry
    chill(root, key)
    monkeypatch.setattr(warm, "MADV_POPULATE_READ", 9999)
    found = warm.warm_entry(root, key)
    assert found.resident == found.bytes


def test_what_is_not_there(entry: tuple[Root, str]) -> None:
    """NotFound, not a crash; a cancelled warm-up ends."""
    root, key = entry
    with pytest.raises(NotFound):
        warm.warm_entry(root, "0" * 64)
    with pytest.raises(Cancelled):
        warm.warm_entry(root, key, cancel=lambda: True)


def test_the_process_does_not_grow_with_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 64 MiB are mapped one at a time: 320 MiB warmed, less than half of it ever held."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        for _ in range(20):
            file.write(os.urandom(1 << 20) * 16)
    before = peak()
    fd = os.open(path, os.O_RDONLY)
    resident = sum(
        warm._warm_window(fd, at, warm.WINDOW_BYTES) for at in range(0, 320 << 20, warm.WINDOW_BYTES)
    )
    os.close(fd)
    assert resident == 320 << 20
    assert peak() - before < 150 << 20


def peak() -> int:
    """Most memory that this process held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_an_agent_warms_what_it_lists_within_its_budget(tmp_path: Path) -> None:
    """After the check; what does not fit is named in status and stays Ready."""
    node = OneNode(init_root(tmp_path / "cache").path, warm_budget_bytes=6 << 20)
    node.ask([layout(0), layout(1)])
    status = node.settle()
    assert [(each["phase"], each.get("reason")) for each in status["entries"]] == [
        ("Ready", None),
        ("Ready", "InsufficientHostMemory"),
    ]
    assert status["memory"]["warmBudgetBytes"] == 6 << 20
    assert errno.EINVAL in warm._NO_SUCH_ADVICE
    node.close()
