"""Brings an entry into the page cache, in the order in which its blocks run, and measures what is there.

Pages come in by big populating reads (MADV_POPULATE_READ), which keeps them in large folios: pages that came
in by small reads register with a GPU several times slower. One window at a time is mapped, so the memory that
this process itself holds does not grow with the entry. Where the kernel has no such call, big sequential
reads do it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from dlo_cache import atomic
from dlo_cache.entry import open_entry
from dlo_cache.names import split_path
from dlo_cache.oserrors import os_errors, translated
from dlo_cache.progress import Cancel, Progress, check_cancel, report
from dlo_cache.root import Root

MADV_POPULATE_READ: Final = 22  # Linux 5.14; Python has no name for it
WINDOW_BYTES: Final = 64 << 20
_READ_BYTES: Final = 16 << 20
_NO_SUCH_ADVICE: Final = (errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Warmed:
    """What a warm-up did: bytes of the entry, and of them those in memory afterwards."""

    key: str
    bytes: int
    resident: int


def warm_entry(
    root: Root, key: str, *, progress: Progress | None = None, cancel: Cancel | None = None
) -> Warmed:
    """Reads the whole entry ``key`` into the page cache under a reader's lease. Raises NotFound, Busy,
    Corrupt, Unavailable, Cancelled."""
    with open_entry(root.entries_dir / key) as entry:
        done = resident = 0
        for record in entry.manifest.files:
            with _opened(root, key, record.name) as fd, os_errors(f"warming {record.name} of entry {key}"):
                for offset in range(0, record.nbytes, WINDOW_BYTES):
                    check_cancel(cancel, f"warming entry {key[:12]}")
                    length = min(WINDOW_BYTES, record.nbytes - offset)
                    resident += _warm_window(fd, offset, length)
                    done += length
                    report(progress, "read", f"entry {key[:12]}", done, entry.nbytes)
        return Warmed(key, done, resident)


def resident_bytes(root: Root, key: str) -> int:
    """How many bytes of the entry are in memory; nothing is read in. The owner of the files may ask."""
    with open_entry(root.entries_dir / key) as entry:
        found = 0
        for record in entry.manifest.files:
            with _opened(root, key, record.name) as fd, os_errors(f"looking at {record.name} of entry {key}"):
                for offset in range(0, record.nbytes, WINDOW_BYTES):
                    length = min(WINDOW_BYTES, record.nbytes - offset)
                    with _mapped(fd, offset, length) as window:
                        found += _resident(window, length)
        return found


def _warm_window(fd: int, offset: int, length: int) -> int:
    """Brings one window in; returns its bytes in memory."""
    with _mapped(fd, offset, length) as window:
        try:
            window.madvise(MADV_POPULATE_READ, 0, length)
        except OSError as error:
            if error.errno not in _NO_SUCH_ADVICE:
                raise
            _read_through(fd, offset, length)
        return _resident(window, length)


def _read_through(fd: int, offset: int, length: int) -> None:
    buffer = bytearray(min(_READ_BYTES, length))
    at = 0
    while at < length:
        count = os.preadv(fd, [memoryview(buffer)[: length - at]], offset + at)
        if count == 0:
            return
        at += count


def _resident(window: mmap.mmap, length: int) -> int:
    """Bytes of a mapped window that are in memory."""
    pages = -(-length // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * pages)()
    view = np.frombuffer(window, np.uint8)
    address = view.ctypes.data
    del view  # it would keep the window from being unmapped
    if _libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), seen) != 0:
        code = ctypes.get_errno()
        raise translated(OSError(code, os.strerror(code)), "asking what is in memory")
    count = sum(page & 1 for page in bytes(seen))
    return min(count * mmap.PAGESIZE, length)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@contextmanager
def _mapped(fd: int, offset: int, length: int) -> Iterator[mmap.mmap]:
    window = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    try:
        yield window
    finally:
        window.close()


@contextmanager
def _opened(root: Root, key: str, name: str) -> Iterator[int]:
    *folders, leaf = split_path(name)
    with root.opened("entries") as entries_fd, os_errors(f"opening {name} of entry {key}"):
        folder_fd = atomic.open_below(entries_fd, key, *folders)
        try:
            fd = atomic.open_file(leaf, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
    try:
        yield fd
    finally:
        os.close(fd)
