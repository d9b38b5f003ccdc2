"""Re-hashes an open entry's bytes against its manifest.

Work is divided by bytes among threads (BLAKE3 lets other threads run while it hashes) and, with ``part``,
among the ranks of an engine: every rank checks its share and together they have checked every byte, fillers
and headers included. Must not decide what happens to a bad entry.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from blake3 import blake3

from dlo_cache.entry import Entry
from dlo_cache.errors import Corrupt, Invalid
from dlo_cache.keys import FILES_KIND
from dlo_cache.manifest import file_digest
from dlo_cache.mapping import MappedFile
from dlo_cache.progress import Cancel, Progress, check_cancel, report

SLICE_BYTES: Final = 16 * 2**20
"""Bytes hashed between two looks at whether the work shall stop."""
WIDE_BYTES: Final = 64 * 2**20
"""A whole file above this size is hashed by all threads at once: it has one digest and cannot be divided."""


@dataclass(frozen=True, slots=True)
class _Check:
    """One piece of work: ``nbytes`` at ``begin`` of a file's data, a tensor or (kind Files) the whole file.

    With ``digest`` None it is the frame instead: the header's bytes and the fillers between the tensors.
    """

    file: MappedFile
    tensor: str | None
    begin: int
    nbytes: int
    digest: str | None


def verify_entry(
    entry: Entry,
    *,
    part: tuple[int, int] = (0, 1),
    threads: int | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> int:
    """Checks the bytes of ``entry``, or of share ``part[0]`` of ``part[1]``; returns how many were checked.

    ``threads`` defaults to the processors this process may use. Raises Corrupt naming entry, file and
    tensor, or Cancelled. ``progress`` is called from the working threads, one at a time.
    """
    index, count = part
    if not 0 <= index < count:
        raise Invalid(f"part {index} of {count} parts")
    checks = _share(_checks(entry), index, count)
    workers = threads or len(os.sched_getaffinity(0))
    run = _Run(entry, checks, workers, progress, cancel)
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        futures = [pool.submit(run.check, check) for check in checks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            run.stop = True
            raise
    return run.done


def _checks(entry: Entry) -> list[_Check]:
    """All there is to check, in the manifest's order."""
    checks = []
    if entry.kind == FILES_KIND:
        for file, record in zip(entry.files, entry.manifest.files, strict=True):
            checks.append(_Check(file, None, 0, record.nbytes, record.digest))
        return checks
    files = {file.name: file for file in entry.files}
    for file in entry.files:
        fillers = file.nbytes - sum(tensor.nbytes for tensor in file.tensors.values())
        checks.append(_Check(file, None, 0, file.data_offset + fillers, None))
    for tensor in entry.manifest.tensors:
        checks.append(_Check(files[tensor.file], tensor.name, tensor.offset, tensor.nbytes, tensor.digest))
    return checks


def _share(checks: Iterable[_Check], index: int, count: int) -> list[_Check]:
    """Share ``index`` of ``count``, largest first: a check goes to the share with the fewest bytes so far."""
    loads = [(0, share) for share in range(count)]
    mine = []
    for check in sorted(checks, key=lambda check: -check.nbytes):
        load, share = heapq.heappop(loads)
        heapq.heappush(loads, (load + check.nbytes, share))
        if share == index:
            mine.append(check)
    return mine


class _Run:
    """What the threads of one verification share: how far they are, and whether they shall stop."""

    def __init__(
        self,
        entry: Entry,
        checks: list[_Check],
        workers: int,
        progress: Progress | None,
        cancel: Cancel | None,
    ) -> None:
        self.stop = False
        self.done = 0
        self._entry, self._workers, self._progress, self._cancel = entry, workers, progress, cancel
        self._total = sum(check.nbytes for check in checks)
        self._digests = {record.name: record.digest for record in entry.manifest.files}
        self._tensor_digests: dict[str, list[str]] = {record.name: [] for record in entry.manifest.files}
        for tensor in entry.manifest.tensors:
            self._tensor_digests[tensor.file].append(tensor.digest)
        self._lock = threading.Lock()

    def check(self, check: _Check) -> None:
        """Does one piece of work; raises Corrupt or Cancelled, and then lets the other threads stop soon."""
        try:
            if check.digest is None:
                self._check_frame(check)
            else:
                self._check_digest(check, check.digest)
        except BaseException:
            self.stop = True
            raise

    def _check_digest(self, check: _Check, digest: str) -> None:
        wide = check.tensor is None and check.nbytes > WIDE_BYTES
        hasher = blake3(max_threads=self._workers if wide else 1)
        step = SLICE_BYTES * (self._workers if wide else 1)
        end = check.begin + check.nbytes
        with check.file.data as data:  # an error that is raised here must not keep the mapping alive
            for start in range(check.begin, end, step):
                if self.stop:
                    return
                check_cancel(self._cancel, f"verifying {self._entry.path}")
                stop = min(start + step, end)
                hasher.update(data[start:stop])
                self._advance(stop - start)
        if hasher.hexdigest() != digest:
            what = "its bytes" if check.tensor is None else f"tensor {check.tensor}"
            raise self._corrupt(check, f"{what} differ from what was published")

    def _check_frame(self, check: _Check) -> None:
        file = check.file
        if file_digest(file.header(), self._tensor_digests[file.name]) != self._digests[file.name]:
            raise self._corrupt(check, "its header differs from what was published")
        at = 0
        for tensor in (*file.tensors.values(), None):
            end = file.nbytes if tensor is None else tensor.offset
            if end > at and np.frombuffer(file.data[at:end], np.uint8).any():
                raise self._corrupt(check, f"the filler at byte {at} of its data is not zero")
            at = end if tensor is None else tensor.offset + tensor.nbytes
        self._advance(check.nbytes)

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            report(self._progress, "verify", self._entry.key, self.done, self._total)

    def _corrupt(self, check: _Check, what: str) -> Corrupt:
        return Corrupt(
            f"entry {self._entry.path}: file {check.file.name}: {what}",
            hint="the entry is damaged; remove it and let it be built again",
            entry=str(self._entry.path),
            key=self._entry.key,
            file=check.file.name,
            tensor=check.tensor,
        )
