"""Names of entries: the sha256 of everything that decides an entry's bytes, and of nothing else.

Pure. Paths, nodes, tenants, images, data-parallel and sequence-parallel places stay out, so that whoever
needs the same bytes computes the same name. All that goes in is known before a tensor is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from dlo_cache.canonical import canonical_json
from dlo_cache.dtypes import POLICIES
from dlo_cache.errors import Invalid

FORMAT_VERSION: Final = 1
LAYOUT_KIND: Final = "Layout"
FILES_KIND: Final = "Files"
QUANTIZATIONS: Final = ("None", "Fp8PerTensor")

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class DigestedFile(Protocol):
    """A source file by name relative to the pipeline's folder, size and sha256."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str | None: ...


def layout_key(
    files: Iterable[DigestedFile],
    *,
    component: str,
    layout_id: str,
    layout_digest: str,
    dtype: str,
    quantization: str,
    tensor_size: int,
    tensor_rank: int,
) -> tuple[str, dict[str, Any]]:
    """Key and preimage of the entry for one tensor-parallel coordinate of one component.

    ``files`` are all files of the component. Raises Invalid for a file without sha256 or a word not known.
    """
    if dtype not in POLICIES or quantization not in QUANTIZATIONS:
        raise Invalid(f"unknown dtype policy {dtype!r} or quantization {quantization!r}")
    if not 0 <= tensor_rank < tensor_size:
        raise Invalid(f"tensor rank {tensor_rank} is not below tensor size {tensor_size}")
    return _named(
        {
            "formatVersion": FORMAT_VERSION,
            "kind": LAYOUT_KIND,
            "files": _file_list(files),
            "component": component,
            "layout": {"id": layout_id, "digest": layout_digest},
            "dtype": dtype,
            "quantization": quantization,
            "tensorSize": tensor_size,
            "tensorRank": tensor_rank,
        }
    )


def files_key(files: Iterable[DigestedFile]) -> tuple[str, dict[str, Any]]:
    """Key and preimage of the entry that holds ``files`` as they are; raises Invalid for an unhashed one."""
    return _named({"formatVersion": FORMAT_VERSION, "kind": FILES_KIND, "files": _file_list(files)})


def key_of(preimage: Mapping[str, Any]) -> str:
    """The key that belongs to a preimage."""
    return hashlib.sha256(canonical_json(dict(preimage))).hexdigest()


def check_preimage(preimage: Mapping[str, Any]) -> None:
    """Raises Invalid unless what readers take from a preimage is there and of its type.

    Words are not judged: a later release may know more of them.
    """
    kind, files = preimage.get("kind"), preimage.get("files")
    right = kind in (LAYOUT_KIND, FILES_KIND) and isinstance(files, list) and all(map(_is_listed, files))
    if right and kind == LAYOUT_KIND:
        rank, size = preimage.get("tensorRank"), preimage.get("tensorSize")
        layout = preimage.get("layout")
        words = [preimage.get(key) for key in ("component", "dtype", "quantization")]
        words += [layout.get("id"), layout.get("digest")] if isinstance(layout, dict) else [None]
        right = type(rank) is int and type(size) is int and 0 <= rank < size
        right = right and all(isinstance(word, str) for word in words)
    if not right:
        raise Invalid(f"the preimage of kind {kind!r} lacks a field or has a wrong one")


def _is_listed(file: Any) -> bool:
    types = {"name": str, "size": int, "sha256": str}
    return (
        isinstance(file, dict)
        and file.keys() == types.keys()
        and all(type(file[key]) is kind for key, kind in types.items())
    )


def _named(preimage: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return key_of(preimage), preimage


def _file_list(files: Iterable[DigestedFile]) -> list[dict[str, Any]]:
    listed: dict[str, dict[str, Any]] = {}
    for file in files:
        if file.sha256 is None or not _SHA256.fullmatch(file.sha256):
            raise Invalid(
                f"{file.name}: its sha256 is not known", hint="hash the source files first", file=file.name
            )
        if file.name in listed:
            raise Invalid(f"{file.name} is listed twice", file=file.name)
        listed[file.name] = {"name": file.name, "size": file.size, "sha256": file.sha256}
    if not listed:
        raise Invalid("an entry of no files has no key")
    return [listed[name] for name in sorted(listed)]
