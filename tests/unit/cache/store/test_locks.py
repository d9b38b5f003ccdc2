"""Locks belong to open files: they exclude within and across processes and die with their holder."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dlo_cache import locks
from dlo_cache.errors import Busy, CacheError, Cancelled
from dlo_cache.ingest import hold_keys
from dlo_cache.root import Root

KEY = "ab" * 32


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[tuple[int, int, int]]:
    """Three open files of one lease: reading, reading again, and read-write."""
    path = tmp_path / "lease"
    path.touch()
    fds = (os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY), os.open(path, os.O_RDWR))
    yield fds
    for fd in fds:
        os.close(fd)


def test_readers_share_and_keep_the_evictor_out(lease: tuple[int, int, int]) -> None:
    """Until the last one lets go; the check by F_OFD_GETLK sees the same through any descriptor."""
    first, second, evictor = lease
    assert not locks.write_would_block(first)
    locks.acquire_read(first)
    locks.acquire_read(second)
    assert locks.write_would_block(evictor)
    with pytest.raises(Busy, match="entry x"):
        locks.acquire_write(evictor, subject="entry x")
    locks.release(first)
    assert locks.write_would_block(evictor)
    locks.release(second)
    assert not locks.write_would_block(evictor)
    locks.acquire_write(evictor, subject="entry x")
    assert locks.write_would_block(first)
    with pytest.raises(Busy):
        locks.acquire_read(first)


def test_a_read_only_descriptor_cannot_take_the_exclusive_lock(lease: tuple[int, int, int]) -> None:
    """So an engine with a read-only mount can never block a builder."""
    with pytest.raises(CacheError):
        locks.acquire_write(lease[0], subject="entry x")
    locks.acquire_write(lease[2], subject="entry x")


def test_closing_another_descriptor_of_the_file_keeps_the_lock(
    tmp_path: Path, lease: tuple[int, int, int]
) -> None:
    """What POSIX locks would not do."""
    locks.acquire_read(lease[0])
    os.close(os.open(tmp_path / "lease", os.O_RDONLY))
    assert locks.write_would_block(lease[2])


def test_waiting_ends_when_the_holder_lets_go(root: Root) -> None:
    """Within the time allowed, and not before."""
    held = threading.Event()

    def hold() -> None:
        with hold_keys(root, [KEY], timeout_seconds=0):
            held.set()
            time.sleep(0.2)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with pytest.raises(Busy, match=f"process {os.getpid()}"), hold_keys(root, [KEY], timeout_seconds=0.02):
        pass
    with hold_keys(root, [KEY], timeout_seconds=10):
        holder.join()
    assert os.listdir(root.locks_dir) == [f"{KEY}.lock"]


def test_waiting_can_be_cancelled(root: Root) -> None:
    """A builder that waits for another one still answers."""
    waiting = hold_keys(root, [KEY], timeout_seconds=60, cancel=lambda: True)
    with hold_keys(root, [KEY], timeout_seconds=0), pytest.raises(Cancelled), waiting:
        pass


def test_case_20_a_killed_holder_blocks_nobody(root: Root) -> None:
    """After SIGKILL the lock file with its owner's note is still there, and the lock is free."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with hold_keys(root, [KEY], timeout_seconds=0):
                os.write(writing, b"x")
                time.sleep(60)
        finally:
            os._exit(1)
    os.read(reading, 1)
    with pytest.raises(Busy, match=f"process {child} on .* since"), hold_keys(root, [KEY], timeout_seconds=0):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert f'"pid": {child}'.encode() in (root.locks_dir / f"{KEY}.lock").read_bytes()
    with hold_keys(root, [KEY], timeout_seconds=0):
        pass
    os.close(reading)
    os.close(writing)


def test_two_builders_of_the_same_keys_cannot_wait_for_each_other(root: Root) -> None:
    """Whatever order they name them in."""
    keys = [f"{number:064x}" for number in range(8)]
    done: list[int] = []

    def work(order: list[str]) -> None:
        for _ in range(10):
            with hold_keys(root, order, timeout_seconds=20):
                pass
        done.append(1)

    workers = [threading.Thread(target=work, args=(order,)) for order in (keys, keys[::-1])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert done == [1, 1]


def test_a_lock_file_made_under_a_strange_umask_opens_again(root: Root) -> None:
    """Modes are set, not inherited."""
    before = os.umask(0o777)
    try:
        with hold_keys(root, [KEY], timeout_seconds=0):
            pass
    finally:
        os.umask(before)
    assert (root.locks_dir / f"{KEY}.lock").stat().st_mode & 0o777 == 0o600
