"""Builds ``Files`` entries: source files byte for byte, under the rules that hold for every entry.

A file that another ``Files`` entry of the root holds already becomes a further name of it; the others are
copied in one pass, their sha256 checked on the way. Must not choose files: the caller did, by
``PipelineRest`` or ``All``.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, Final, Literal

from dlo_cache.errors import Invalid
from dlo_cache.image_writer import ImageWriter
from dlo_cache.ingest import Ingest, begin, hold_keys
from dlo_cache.keys import files_key
from dlo_cache.manifest import FileRecord, Manifest
from dlo_cache.names import split_path
from dlo_cache.oserrors import os_errors
from dlo_cache.piece_reader import Bytes, ReadJob, read_pieces, source_changed
from dlo_cache.presence import Built, built, present
from dlo_cache.progress import Cancel, Progress, check_cancel, report
from dlo_cache.reserve import allocated, reserve
from dlo_cache.root import Root
from dlo_cache.sharing import Shared, opened_for_link, shared_files
from dlo_cache.source import SourceFile

Selection = Literal["PipelineRest", "All"]

_BUFFER_BYTES: Final = 32 << 20
_PIECE_BYTES: Final = 16 << 20
_ROOM_BYTES: Final = 1 << 20
_NO_LINK: Final = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP)


def build_files_entry(
    root: Root,
    files: Sequence[SourceFile],
    *,
    select: Selection,
    streamed: Sequence[str] = (),
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    producer: Mapping[str, object],
    lock_timeout_seconds: float = 600.0,
    waited: Callable[[float], None] | None = None,
) -> Built:
    """The entry that holds ``files`` verbatim under their own relative names; built unless it is there.

    ``select`` and ``streamed`` say for people how the files were chosen; the name depends on the files alone.
    Raises Invalid for an unsafe name or a missing sha256 before anything is written; Unavailable
    (SourceChanged) for bytes that are not those of the digest; NoSpace, Busy, Denied, Cancelled as for layout
    entries. Nothing unfinished is left. ``waited`` is told the seconds until the writers' locks were had.
    """
    if select == "All" and streamed:
        raise Invalid(
            "a selection of all files leaves no component out", hint="drop `streamed`, or use PipelineRest"
        )
    ordered = sorted(files, key=lambda file: file.name)
    _check_names(ordered)
    key, preimage = files_key(ordered)
    note = {**producer, "select": select, "streamed": list(streamed)}
    held = hold_keys(root, [key], timeout_seconds=lock_timeout_seconds, cancel=cancel, waited=waited)
    with held:
        found = present(root, key)
        if found is not None:
            return found
        build = _FilesBuild(root, key, preimage, ordered, progress, cancel)
        return build.run(note)


class _FilesBuild:
    """One build; the caller holds the key's lock."""

    def __init__(
        self,
        root: Root,
        key: str,
        preimage: Mapping[str, Any],
        files: Sequence[SourceFile],
        progress: Progress | None,
        cancel: Cancel | None,
    ) -> None:
        self._root = root
        self._key = key
        self._preimage = preimage
        self._files = files
        self._progress = progress
        self._cancel = cancel
        self._subject = f"files entry {key[:12]}"
        self._total = sum(file.size for file in files)
        self._done = 0
        self._digests: dict[str, str] = {}

    def run(self, producer: Mapping[str, object]) -> Built:
        shared = shared_files(self._root)
        reserve(self._root, self._needed(shared), len(self._files) + 8, subject=f"building {self._subject}")
        with (
            os_errors(f"building {self._subject}"),
            ThreadPoolExecutor(2, "dlo-sync") as syncer,
            ThreadPoolExecutor(3, "dlo-copy") as pool,
            begin(self._root, self._key, syncer=syncer) as ingest,
        ):
            copied = [file for file in self._files if not self._link(ingest, file, shared)]
            self._copy(ingest, copied, pool)
            check_cancel(self._cancel, f"building {self._subject}")
            manifest = self._manifest()
            data = manifest.to_bytes()
            path = ingest.commit(data, producer)
        report(self._progress, "publish", self._subject, 1, 1)
        return built(path, manifest, hashlib.sha256(data).hexdigest(), reused=False)

    def _needed(self, shared: Mapping[tuple[str, int], Shared]) -> int:
        new = [file for file in self._files if (file.sha256, file.size) not in shared]
        return sum(allocated(file.size) for file in new) + _ROOM_BYTES

    def _link(self, ingest: Ingest, file: SourceFile, shared: Mapping[tuple[str, int], Shared]) -> bool:
        """Makes the file a link to one that is there; False where it must be copied."""
        known = shared.get((file.sha256 or "", file.size))
        if known is None:
            return False
        check_cancel(self._cancel, f"building {self._subject}")
        with opened_for_link(self._root, known) as place:
            if place is None:
                return False
            try:
                ingest.link(file.name, place[0], source_fd=place[1])
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                return False
        self._digests[file.name] = known.record.digest
        self._advance(file.size)
        return True

    def _copy(self, ingest: Ingest, files: Sequence[SourceFile], pool: ThreadPoolExecutor) -> None:
        with ExitStack() as stack:
            largest = max((file.size for file in files), default=0)
            writer = ImageWriter(pool, min(_BUFFER_BYTES, max(largest, 1)))
            stack.callback(writer.drop)
            pieces: Generator[Bytes] = read_pieces((job for file in files for job in _jobs(file)), pool=pool)
            stack.enter_context(closing(pieces))
            for file in files:
                self._copy_file(ingest, file, writer, pieces)
            writer.wait()

    def _copy_file(
        self, ingest: Ingest, file: SourceFile, writer: ImageWriter, pieces: Generator[Bytes]
    ) -> None:
        fd = ingest.create(file.name)
        writer.start(fd, b"")
        writer.begin_tensor(file.name, file.size)
        sha256 = hashlib.sha256()
        for job in _jobs(file):
            check_cancel(self._cancel, f"building {self._subject}")
            piece = next(pieces)
            sha256.update(piece.data)
            writer.append(piece)
            self._advance(job.nbytes)
        if sha256.hexdigest() != file.sha256:
            raise source_changed(file, f"its sha256 is {sha256.hexdigest()}, not {file.sha256}")

        def written(digests: Mapping[str, str]) -> None:
            self._digests.update(digests)
            ingest.seal(fd)

        writer.finish(written)

    def _manifest(self) -> Manifest:
        records = [
            FileRecord(file.name, None, file.size, 0, self._digests[file.name]) for file in self._files
        ]
        return Manifest(self._key, self._preimage, tuple(records), ())

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        report(self._progress, "build", self._subject, self._done, self._total)


def _jobs(file: SourceFile) -> Iterator[ReadJob]:
    for offset in range(0, file.size, _PIECE_BYTES):
        yield ReadJob(file, offset, min(_PIECE_BYTES, file.size - offset))


def _check_names(files: Sequence[SourceFile]) -> None:
    """Raises Invalid for names that lead out of the entry, or of which one is a folder of another."""
    names = {split_path(file.name) for file in files}
    for name in names:
        for depth in range(1, len(name)):
            if name[:depth] in names:
                raise Invalid(f"{'/'.join(name[:depth])} is a file and a folder at once", code="UnsafePath")
