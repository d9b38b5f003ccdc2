"""Reads pieces of source files ahead of their use, in order, into a few buffers that go round.

Plain reads, no mapping: mapped pages of the source would count as this process's memory.
Must not interpret what it reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dlo_cache.errors import CacheError, Unavailable
from dlo_cache.oserrors import os_errors
from dlo_cache.source import SourceFile

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ReadJob:
    """``nbytes`` bytes of ``file`` from ``offset``."""

    file: SourceFile
    offset: int
    nbytes: int


def read_pieces(jobs: Iterable[ReadJob], *, pool: Executor, ahead: int = 2) -> Generator[Bytes]:
    """The bytes of each job in turn, while the next ``ahead`` jobs are being read by ``pool``.

    A piece is valid until the next one is asked for. Raises Unavailable (SourceChanged) for a file that ended
    early, and the CacheError that fits for one that cannot be read.
    """
    waiting = iter(jobs)
    spare: deque[Bytes] = deque(np.empty(0, np.uint8) for _ in range(ahead + 1))
    reading: deque[Future[tuple[Bytes, int]]] = deque()

    def submit(job: ReadJob) -> None:
        reading.append(pool.submit(_read, job, spare.popleft()))

    try:
        for job in islice(waiting, ahead):
            submit(job)
        while True:
            following = next(waiting, None)
            if following is not None:
                submit(following)
            if not reading:
                return
            buffer, count = reading.popleft().result()
            yield buffer[:count]
            spare.append(buffer)
    finally:
        wait(reading)


def _read(job: ReadJob, buffer: Bytes) -> tuple[Bytes, int]:
    if len(buffer) < job.nbytes:
        buffer = np.empty(job.nbytes, np.uint8)
    read_exactly(job.file, buffer.data[: job.nbytes], job.offset)
    return buffer, job.nbytes


def read_exactly(file: SourceFile, view: memoryview, offset: int) -> None:
    """Fills ``view`` from ``file`` at ``offset``; Unavailable (SourceChanged) if the file ends before."""
    done = 0
    while done < len(view):
        with os_errors(f"reading {file.name}"):
            count = file.readinto(view[done:], offset + done)
        if count <= 0:
            raise source_changed(file, f"it ended at byte {offset + done} of the {file.size} it had")
        done += count


def source_changed(file: SourceFile, what: str) -> CacheError:
    """The error for a source file that is no longer what its digest was taken of."""
    return Unavailable(
        f"the source file {file.name} changed while it was read: {what}",
        code="SourceChanged",
        hint="let the source come to rest and build again",
        file=file.name,
    )
