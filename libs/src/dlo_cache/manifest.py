"""The manifest of an entry: what its files and tensors are, and the digest of each.

Values and their one canonical text. Nothing in it differs between equal entries: no time, path, host or
user. Reading one proves that it agrees with itself (key, totals, digests of digests); it says nothing of
the files' bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from dlo_cache.canonical import canonical_json, strict_json
from dlo_cache.errors import Corrupt, Invalid, NewerFormat
from dlo_cache.header import ALIGNMENT, PAGE, tensor_bytes
from dlo_cache.keys import FILES_KIND, FORMAT_VERSION, LAYOUT_KIND, check_preimage, key_of
from dlo_cache.names import split_path

RESIDENT_FILE: Final = "resident.safetensors"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_BLOCK: Final = re.compile(r"[A-Za-z0-9_.]{1,140}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One data file.

    ``group`` is its block ("transformer_blocks.3"), None for the resident file and for kind Files.
    ``data_offset`` is where the data section starts, 0 for kind Files. ``digest`` is the BLAKE3 of the
    header's bytes followed by the raw digests of its tensors in order; for kind Files of all bytes.
    """

    name: str
    group: str | None
    nbytes: int
    data_offset: int
    digest: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of an entry; ``offset`` counts from the start of its file's data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    digest: str
    source_name: str
    source_file: str
    role: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One entry. Files are in execution order, the resident file last; tensors in byte order."""

    key: str
    preimage: Mapping[str, Any]
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]

    @property
    def kind(self) -> str:
        """``Layout`` or ``Files``."""
        return str(self.preimage["kind"])

    @property
    def component(self) -> str | None:
        """The component that a Layout entry holds a part of."""
        return self.preimage.get("component")

    @property
    def coordinate(self) -> tuple[int, int] | None:
        """Tensor-parallel rank and size of a Layout entry."""
        if self.kind == FILES_KIND:
            return None
        return self.preimage["tensorRank"], self.preimage["tensorSize"]

    @property
    def total_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)

    @property
    def content_digest(self) -> str:
        """BLAKE3 over the canonical list of file digests: equal for entries of equal content."""
        return content_digest(self.files)

    def tensors_of(self, file: str) -> tuple[TensorRecord, ...]:
        """The tensors in one file, in byte order."""
        return tuple(tensor for tensor in self.tensors if tensor.file == file)

    def to_bytes(self) -> bytes:
        """The canonical text, one line without an end; equal entries give equal bytes."""
        return canonical_json(_document(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The manifest in ``data``; raises NewerFormat, or Corrupt if ``to_bytes`` would write otherwise."""
        return _parse(data)


def file_digest(header: bytes, tensor_digests: Iterable[str]) -> str:
    """The digest of a block image from its leading bytes and its tensors' digests (hexadecimal) in order."""
    hasher = blake3(header)
    for digest in tensor_digests:
        hasher.update(bytes.fromhex(digest))
    return hasher.hexdigest()


def content_digest(files: Iterable[FileRecord]) -> str:
    """The digest of an entry's content from its files' names, sizes and digests in the manifest's order."""
    return blake3(canonical_json([[file.name, file.nbytes, file.digest] for file in files])).hexdigest()


def block_file_name(index: int, block: str) -> str:
    """The file of the block at place ``index``; raises Invalid for a block that makes no file name."""
    if not _BLOCK.fullmatch(block):
        raise Invalid(f"block {block!r} makes no plain file name")
    return f"{index:03d}-{block}.safetensors"


def _document(manifest: Manifest) -> dict[str, Any]:
    return {
        "formatVersion": FORMAT_VERSION,
        "inputKey": manifest.key,
        "preimage": dict(manifest.preimage),
        "files": [
            {
                "name": file.name,
                "group": file.group,
                "bytes": file.nbytes,
                "dataOffset": file.data_offset,
                "digest": file.digest,
            }
            for file in manifest.files
        ],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "file": tensor.file,
                "offset": tensor.offset,
                "bytes": tensor.nbytes,
                "digest": tensor.digest,
                "sourceName": tensor.source_name,
                "sourceFile": tensor.source_file,
                "role": tensor.role,
            }
            for tensor in manifest.tensors
        ],
        "totalBytes": manifest.total_bytes,
        "contentDigest": manifest.content_digest,
    }


def _parse(data: bytes) -> Manifest:
    try:
        document = strict_json(data, "manifest")
    except Invalid as error:
        raise Corrupt(error.message) from error
    version = document.get("formatVersion") if isinstance(document, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise NewerFormat(
            f"the manifest has format version {version}; this version reads up to {FORMAT_VERSION}",
            hint="upgrade, or let the entry be built again",
        )
    if version != FORMAT_VERSION:
        raise Corrupt("the manifest states no format version that this version reads")
    try:
        manifest = _from_document(document)
        _check(manifest)
        text = manifest.to_bytes()
    except (KeyError, TypeError, ValueError, AttributeError, Invalid) as error:
        raise Corrupt(f"the manifest lacks a field or has a wrong one: {error}") from error
    if text != data:
        raise Corrupt(
            "the manifest does not agree with itself: its totals, digests or fields are not canonical"
        )
    return manifest


def _from_document(document: Mapping[str, Any]) -> Manifest:
    files = tuple(
        FileRecord(file["name"], file["group"], file["bytes"], file["dataOffset"], file["digest"])
        for file in document["files"]
    )
    tensors = tuple(
        TensorRecord(
            name=tensor["name"],
            dtype=tensor["dtype"],
            shape=tuple(tensor["shape"]),
            file=tensor["file"],
            offset=tensor["offset"],
            nbytes=tensor["bytes"],
            digest=tensor["digest"],
            source_name=tensor["sourceName"],
            source_file=tensor["sourceFile"],
            role=tensor["role"],
        )
        for tensor in document["tensors"]
    )
    return Manifest(document["inputKey"], dict(document["preimage"]), files, tensors)


def _check(manifest: Manifest) -> None:
    """Raises ValueError for what the canonical text alone would not show."""
    if key_of(manifest.preimage) != manifest.key:
        raise ValueError("the input key is not that of the preimage")
    check_preimage(manifest.preimage)
    if manifest.kind == FILES_KIND:
        held = [{"name": file.name, "size": file.nbytes} for file in manifest.files]
        listed = [{"name": file["name"], "size": file["size"]} for file in manifest.preimage["files"]]
        if manifest.tensors or held != listed:
            raise ValueError("its files are not those of the preimage, or it has tensors")
    files = {file.name: file for file in manifest.files}
    if len(files) != len(manifest.files) or len({tensor.name for tensor in manifest.tensors}) != len(
        manifest.tensors
    ):
        raise ValueError("a file or tensor stands twice")
    for file in manifest.files:
        _check_file(file, manifest.kind)
    order = {name: at for at, name in enumerate(files)}
    last = (-1, 0)
    for tensor in manifest.tensors:
        file = files[tensor.file]
        end = tensor.offset + tensor.nbytes
        if tensor.offset < 0 or tensor.offset % ALIGNMENT or end > file.nbytes - file.data_offset:
            raise ValueError(f"tensor {tensor.name} does not lie in the data section of {file.name}, aligned")
        if tensor.nbytes != tensor_bytes(tensor.dtype, tensor.shape) or not _DIGEST.fullmatch(tensor.digest):
            raise ValueError(f"tensor {tensor.name} has a size or digest that cannot be")
        if (order[tensor.file], tensor.offset) < last:
            raise ValueError(f"tensor {tensor.name} is out of order")
        last = (order[tensor.file], end)


def _check_file(file: FileRecord, kind: str) -> None:
    sizes = (file.nbytes, file.data_offset)
    if not all(type(size) is int and size >= 0 for size in sizes) or file.data_offset > file.nbytes:
        raise ValueError(f"file {file.name} has a size that cannot be")
    parts = split_path(file.name)
    if kind == LAYOUT_KIND and len(parts) > 1:
        raise ValueError(f"file {file.name} lies in a folder")
    if not _DIGEST.fullmatch(file.digest):
        raise ValueError(f"file {file.name} has no digest")
    if kind == LAYOUT_KIND and isinstance(file.group, str) == (file.name == RESIDENT_FILE):
        raise ValueError(f"file {file.name} has a group that cannot be")
    if kind == LAYOUT_KIND and (file.data_offset == 0 or file.data_offset % PAGE):
        raise ValueError(f"file {file.name}: its data section starts at {file.data_offset}, not at a page")
    if kind == FILES_KIND and (file.data_offset or file.group is not None):
        raise ValueError(f"file {file.name} has a group or a header")
