"""Writes one block image after another for one coordinate, hashing what it writes, in few large calls.

Two buffers alternate: while one is hashed and written by a thread of the pool, the caller fills the other.
Large calls matter beyond this program: pages that were written in small ones register with a GPU at a third
of the speed. Must not decide what goes where (``header`` placed the tensors) and must not make anything
visible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any, Final

import blake3
import numpy as np
from numpy.typing import NDArray

from dlo_cache import atomic

_HASH_THREADS: Final = 4
_LARGE_TENSOR_BYTES: Final = 8 << 20

Bytes = NDArray[np.uint8]
Written = Callable[[Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class _Segment:
    """The bytes ``begin`` to ``end`` of a buffer belong to one tensor's digest."""

    hasher: Any
    begin: int
    end: int


class ImageWriter:
    """Appends tensors to files in order. One file at a time; used by one thread.

    ``buffer_bytes`` is the size of the two buffers, hence of the write calls.
    """

    def __init__(self, pool: Executor, buffer_bytes: int) -> None:
        self._pool = pool
        self._size = buffer_bytes
        self._current: Bytes = np.empty(buffer_bytes, np.uint8)
        self._spare: Bytes = np.empty(buffer_bytes, np.uint8)
        self._filled = 0
        self._segments: list[_Segment] = []
        self._in_flight: Future[None] | None = None
        self._then: Callable[[], None] | None = None
        self._fd = -1
        self._hashers: dict[str, Any] = {}
        self._tensor: str | None = None
        self.position = 0

    def start(self, fd: int, header: bytes) -> None:
        """Begins the file ``fd`` with its header; the data section's position is 0 then."""
        self._fd = fd
        self._hashers = {}
        self._tensor = None
        self._append(np.frombuffer(header, np.uint8), None)
        self.position = 0

    def begin_tensor(self, name: str, nbytes: int) -> None:
        """What is appended from now on is the tensor ``name`` of ``nbytes`` bytes."""
        threads = _HASH_THREADS if nbytes >= _LARGE_TENSOR_BYTES and processors() > _HASH_THREADS else 1
        self._hashers[name] = blake3.blake3(max_threads=threads)
        self._tensor = name

    def append(self, data: NDArray[Any]) -> None:
        """Adds the bytes of a contiguous array to the current tensor; the array may be reused at once."""
        flat = data.reshape(-1).view(np.uint8)
        self._append(flat, self._hashers[self._tensor] if self._tensor is not None else None)

    def pad_to(self, position: int) -> None:
        """Fills with zeros up to ``position`` of the data section, outside any tensor."""
        self._tensor = None
        self._append(np.zeros(position - self.position, np.uint8), None)

    def finish(self, written: Written) -> None:
        """Writes what is left; once that is done, ``written`` gets the hexadecimal BLAKE3 of every tensor.

        It is called from this thread, at the latest by ``wait``, so that the next file can begin meanwhile.
        """
        self._flush()
        if self._then is not None:  # an empty file started nothing that would have waited for the one before
            self.wait()
        hashers = self._hashers
        self._then = lambda: written({name: hasher.hexdigest() for name, hasher in hashers.items()})

    def wait(self) -> None:
        """Returns once nothing is being written; raises what a write raised."""
        future, self._in_flight = self._in_flight, None
        then, self._then = self._then, None
        if future is not None:
            future.result()
        if then is not None:
            then()

    def drop(self) -> None:
        """Returns once nothing is being written, whatever became of it: for giving up."""
        if self._in_flight is not None:
            wait([self._in_flight])

    def _append(self, data: Bytes, hasher: Any) -> None:
        done = 0
        while done < len(data):
            count = min(len(data) - done, self._size - self._filled)
            end = self._filled + count
            self._current[self._filled : end] = data[done : done + count]
            if hasher is not None:
                self._segments.append(_Segment(hasher, self._filled, end))
            self._filled = end
            done += count
            if end == self._size:
                self._flush()
        self.position += len(data)

    def _flush(self) -> None:
        if self._filled == 0:
            return
        self.wait()
        view, segments = self._current[: self._filled], self._segments
        self._in_flight = self._pool.submit(_hash_and_write, self._fd, view, segments)
        self._current, self._spare = self._spare, self._current
        self._filled, self._segments = 0, []


def _hash_and_write(fd: int, data: Bytes, segments: list[_Segment]) -> None:
    for segment in segments:
        segment.hasher.update(data[segment.begin : segment.end].data)
    atomic.write_all(fd, data.data)


def preferred_buffer_bytes(writers: int, budget_bytes: int) -> int:
    """The buffer size for ``writers`` writers of two buffers each within ``budget_bytes``: 16 MiB to 64
    MiB."""
    mebibyte = 1 << 20
    return max(16 * mebibyte, min(64 * mebibyte, budget_bytes // (2 * max(writers, 1))))


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))
