"""Sha256 of source files, computed once and remembered for as long as a file is unchanged.

The memory is a folder of small records, one an inode, kept by whoever owns the cache root. It only ever saves
work: a record that is missing, damaged or cannot be written costs a reading of the file and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeGuard

from dlo_cache import atomic
from dlo_cache.canonical import canonical_json, strict_json
from dlo_cache.errors import Invalid
from dlo_cache.progress import Cancel, Progress, check_cancel, report
from dlo_cache.source import SourceFile

from dlo_sources.errors import SourceIncomplete
from dlo_sources.fetch import RemoteFile
from dlo_sources.files import Identity, LocalFile

_PIECE: Final = 8 * 2**20
_MOST_THREADS: Final = 8
_RECORD_LIMIT: Final = 4096
# A change within one tick of the file system's clock may leave the times as they are, so young files are not
# remembered. Two seconds is the coarsest tick in use.
_SETTLED_NS: Final = 2_000_000_000


class DigestCache:
    """Digests by identity of the file; with ``directory`` None nothing is remembered."""

    def __init__(self, directory: Path | None, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._directory, self._clock_ns = directory, clock_ns

    def get(self, identity: Identity) -> str | None:
        """The digest of the file with exactly this identity, if it is known."""
        record = self._read(_record_name(identity))
        try:
            known, digest = Identity(*record["identity"]), record["sha256"]
        except (KeyError, TypeError):
            return None
        return digest if known == identity and _is_digest(digest) else None

    def recall(self, tag: str) -> str | None:
        """The digest of the bytes that a store names by ``tag``, if it is known."""
        record = self._read(_tag_name(tag))
        digest = record.get("sha256")
        return digest if record.get("tag") == tag and _is_digest(digest) else None

    def remember(self, tag: str, sha256: str) -> None:
        """Remembers the digest of the bytes that a store names by ``tag``."""
        self._write(_tag_name(tag), {"tag": tag, "sha256": sha256})

    def put(self, identity: Identity, sha256: str, started_ns: int) -> None:
        """Remembers a digest whose computation began at ``started_ns``, unless the file was too young."""
        if self._directory is None or started_ns - max(identity.mtime_ns, identity.ctime_ns) < _SETTLED_NS:
            return
        self._write(_record_name(identity), {"identity": list(identity), "sha256": sha256})

    def now_ns(self) -> int:
        """The time now, on the clock that file times are compared with."""
        return self._clock_ns()

    def _read(self, name: str) -> dict[str, Any]:
        if self._directory is None:
            return {}
        try:
            fd = atomic.open_directory(self._directory)
            try:
                data = atomic.read_file(name, dir_fd=fd, limit=_RECORD_LIMIT)
            finally:
                os.close(fd)
            record = strict_json(data, "digest record")
        except (OSError, Invalid):
            return {}
        return record if isinstance(record, dict) else {}

    def _write(self, name: str, record: dict[str, Any]) -> None:
        if self._directory is None:
            return
        with suppress(OSError):
            fd = atomic.open_directory(self._directory)
            try:
                atomic.replace_file(name, canonical_json(record), 0o600, dir_fd=fd)
            finally:
                os.close(fd)


def hash_files(
    files: Iterable[SourceFile],
    cache: DigestCache,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> list[SourceFile]:
    """``files`` in the same order, each with its sha256: known already, remembered, or computed now.

    Raises SourceInvalid if a file changes meanwhile, SourceIncomplete if it ends early, Cancelled.
    """
    wanted = list(files)
    run = _Run(sum(file.size for file in wanted), len(wanted), cache, progress, cancel)
    workers = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers, thread_name_prefix="hash") as pool:
        futures = [pool.submit(run.digested, file) for file in wanted]
        try:
            return [future.result() for future in futures]
        except BaseException:
            run.stop = True
            raise


class _Run:
    """What the threads of one run share."""

    def __init__(
        self, total: int, count: int, cache: DigestCache, progress: Progress | None, cancel: Cancel | None
    ) -> None:
        self.stop = False
        self._total, self._done, self._cache = total, 0, cache
        self._progress, self._cancel, self._subject = progress, cancel, f"{count} source files"
        self._lock = threading.Lock()

    def digested(self, file: SourceFile) -> SourceFile:
        if file.sha256 is None and isinstance(file, RemoteFile):
            return self._remote(file)
        if file.sha256 is not None or not isinstance(file, LocalFile):
            self._advance(file.size)
            return file
        known = self._cache.get(file.identity)
        if known is not None:
            self._advance(file.size)
            return file.with_sha256(known)
        started = self._cache.now_ns()
        digest = self._hash(file)
        if not self.stop:
            self._cache.put(file.identity, digest, started)
        return file.with_sha256(digest)

    def _remote(self, file: RemoteFile) -> SourceFile:
        known = self._cache.recall(file.tag)
        if known is not None:
            self._advance(file.size)
            return file.with_sha256(known)
        digest = file.digest(self._advance)
        self._cache.remember(file.tag, digest)
        return file.with_sha256(digest)

    def _hash(self, file: LocalFile) -> str:
        hasher = hashlib.sha256()
        buffer = bytearray(min(_PIECE, file.size))
        at = 0
        while at < file.size and not self.stop:
            check_cancel(self._cancel, f"hashing {file.name}")
            count = file.readinto(buffer, at)
            if count == 0:
                raise SourceIncomplete(f"{file.name} ends after {at} of {file.size} bytes", file=file.name)
            hasher.update(memoryview(buffer)[:count])
            at += count
            self._advance(count)
        return hasher.hexdigest()

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            report(self._progress, "hash", self._subject, self._done, self._total)


def _is_digest(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) == 64


def _tag_name(tag: str) -> str:
    return f"tag-{hashlib.sha256(tag.encode()).hexdigest()}.json"


def _record_name(identity: Identity) -> str:
    return f"{identity.device:x}-{identity.inode:x}.json"
