"""The read side of an entry: open it, prove that it is whole, map it, hold its lease until it is closed.

What holds after ``open_entry``: the manifest agrees with itself, every file has the stated size, and every
header says what the manifest says. Whether the bytes are right is ``verify``'s part. Everything is opened
relative to the entry's directory and no link is followed. Nothing is ever written here.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Final

from dlo_cache import atomic
from dlo_cache.errors import BadHeader, Busy, Corrupt, Denied, NotFound
from dlo_cache.header import ALIGNMENT, IMAGE_METADATA, HeaderTensor, parse_header
from dlo_cache.keys import LAYOUT_KIND
from dlo_cache.manifest import RESIDENT_FILE, FileRecord, Manifest
from dlo_cache.mapping import Lease, MappedFile, TensorView
from dlo_cache.names import LEASE, MANIFEST, split_path
from dlo_cache.oserrors import os_errors

MANIFEST_LIMIT: Final = 512 * 2**20
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


class Entry:
    """An open entry. ``files`` are the blocks in execution order, then the resident file."""

    def __init__(
        self, path: Path, manifest: Manifest, manifest_sha256: str, files: tuple[MappedFile, ...]
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.manifest_sha256 = manifest_sha256
        self.files = files
        self.closed = False

    @property
    def key(self) -> str:
        """The input key, which is the name of the entry."""
        return self.manifest.key

    @property
    def kind(self) -> str:
        """``Layout`` or ``Files``."""
        return self.manifest.kind

    @property
    def directory(self) -> Path:
        """The entry's folder; one of kind Files can be used in the place of the source's folder."""
        return self.path

    @property
    def blocks(self) -> tuple[MappedFile, ...]:
        """The files that stream, in execution order."""
        return tuple(file for file in self.files if file.group is not None)

    @property
    def resident(self) -> MappedFile | None:
        """The file of everything outside the blocks; None if nothing is."""
        return next(
            (file for file in self.files if file.name == RESIDENT_FILE and self.kind == LAYOUT_KIND), None
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return self.manifest.total_bytes

    def close(self) -> bool:
        """Unmaps the files, then releases the lease; doing it again is harmless.

        Returns False if a consumer still holds views: the bytes stay valid for it, and mapping and lease go
        with the last view.
        """
        self.closed = True
        gone = [file.close() for file in self.files]
        return all(gone)

    def __enter__(self) -> Entry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_entry(directory: Path, *, manifest_sha256: str | None = None) -> Entry:
    """Opens and maps the entry in ``directory``, holding its reader's lease until it is closed.

    ``manifest_sha256`` is what someone who knows says the manifest must be. Raises NotFound, Busy while the
    entry is being removed, Corrupt naming file and tensor, Denied if others may write it, NewerFormat.
    """
    with os_errors(f"opening entry {directory}"):
        entry_fd = atomic.open_directory(directory)
        try:
            _check_mode(entry_fd, directory)
            lease = _take_lease(directory, entry_fd)
            try:
                _check_still_there(directory, entry_fd)
                return _open_leased(directory, entry_fd, lease, manifest_sha256)
            except BaseException:
                lease.release()
                raise
        finally:
            os.close(entry_fd)


def _take_lease(directory: Path, entry_fd: int) -> Lease:
    try:
        return Lease(atomic.open_file(LEASE, dir_fd=entry_fd))
    except Busy as error:
        raise Busy(
            f"entry {directory} is being removed",
            hint="wait until it is gone, then let it be built again",
            entry=str(directory),
        ) from error


def _open_leased(directory: Path, entry_fd: int, lease: Lease, manifest_sha256: str | None) -> Entry:
    data = atomic.read_file(MANIFEST, dir_fd=entry_fd, limit=MANIFEST_LIMIT)
    sha256 = hashlib.sha256(data).hexdigest()
    if manifest_sha256 is not None and sha256 != manifest_sha256:
        raise _corrupt(directory, f"its manifest has sha256 {sha256}, but {manifest_sha256} was handed over")
    try:
        manifest = Manifest.from_bytes(data)
    except Corrupt as error:
        raise _corrupt(directory, error.message) from error
    views: dict[str, dict[str, TensorView]] = {record.name: {} for record in manifest.files}
    for tensor in manifest.tensors:
        view = TensorView(tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.nbytes)
        views[tensor.file][tensor.name] = view
    files: list[MappedFile] = []
    try:
        for record in manifest.files:
            files.append(_open_file(directory, entry_fd, record, views[record.name], lease))
            if manifest.kind == LAYOUT_KIND:
                _check_header(directory, files[-1])
                files[-1].map()
    except BaseException:
        for file in files:
            file.close()
        raise
    return Entry(directory, manifest, sha256, tuple(files))


def _open_file(
    directory: Path, entry_fd: int, record: FileRecord, tensors: Mapping[str, TensorView], lease: Lease
) -> MappedFile:
    *folders, name = split_path(record.name)
    try:
        folder_fd = atomic.open_below(entry_fd, *folders)
        try:
            fd = atomic.open_file(name, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
    except FileNotFoundError:
        raise _corrupt(directory, f"file {record.name} is missing", file=record.name) from None
    state = os.fstat(fd)
    if state.st_size != record.nbytes or state.st_mode & _WRITABLE_BY_OTHERS:
        os.close(fd)
        if state.st_size == record.nbytes:
            raise Denied(f"entry {directory}: {record.name} can be written by others", hint=_MODES)
        what = f"file {record.name} has {state.st_size} bytes, not {record.nbytes}"
        raise _corrupt(directory, what, file=record.name)
    return MappedFile(
        fd,
        name=record.name,
        group=record.group,
        nbytes=record.nbytes - record.data_offset,
        data_offset=record.data_offset,
        tensors=tensors,
        lease=lease,
    )


def _check_header(directory: Path, file: MappedFile) -> None:
    """Raises Corrupt unless its header says of every tensor what the manifest says."""
    size = file.data_offset + file.nbytes
    header_bytes = file.header()
    try:
        header = parse_header(lambda offset, length: header_bytes[offset : offset + length], size, file.name)
    except BadHeader as error:
        raise _corrupt(directory, error.message, file=file.name) from error
    if header.data_offset != file.data_offset or header.metadata != IMAGE_METADATA:
        raise _corrupt(
            directory, f"file {file.name} does not have the header of a block image", file=file.name
        )
    stated = (_seen(tensor) for tensor in header.tensors if not tensor.is_pad)
    for found, wanted in zip_longest(stated, file.tensors.values()):
        if found != wanted:
            name = (wanted or found).name
            what = f"file {file.name}: tensor {name} is not in its header as in the manifest"
            raise _corrupt(directory, what, file=file.name, tensor=name)
    for pad in header.tensors:
        if pad.is_pad and (pad.dtype != "U8" or not 0 < pad.nbytes < ALIGNMENT):
            raise _corrupt(directory, f"file {file.name}: {pad.name} is no filler", file=file.name)


def _seen(tensor: HeaderTensor) -> TensorView:
    return TensorView(tensor.name, tensor.dtype, tensor.shape, tensor.begin, tensor.nbytes)


def _check_mode(entry_fd: int, directory: Path) -> None:
    if os.fstat(entry_fd).st_mode & _WRITABLE_BY_OTHERS:
        raise Denied(f"entry {directory} can be written by others than its owner", hint=_MODES)


def _check_still_there(directory: Path, entry_fd: int) -> None:
    """Raises NotFound if the entry was taken away between opening its folder and getting the lease."""
    opened, named = os.fstat(entry_fd), os.stat(directory, follow_symlinks=False)
    if (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino):
        raise NotFound(f"entry {directory} was removed while it was opened")


def _corrupt(directory: Path, what: str, **subject: str) -> Corrupt:
    return Corrupt(f"entry {directory}: {what}", hint=_REBUILD, entry=str(directory), **subject)


_REBUILD: Final = "the entry is damaged; remove it and let it be built again"
_MODES: Final = "entries are 0555 and their files 0444; something changed that"
