"""Entries written by hand, so that reader and builder are tested against the same words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from dlo_cache.header import render_image_header
from dlo_cache.keys import files_key, layout_key
from dlo_cache.manifest import (
    RESIDENT_FILE,
    FileRecord,
    Manifest,
    TensorRecord,
    block_file_name,
    file_digest,
)


@dataclass(frozen=True)
class Shaped:
    """A tensor without bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Digested:
    """A source file's name, size and sha256."""

    name: str
    size: int = 3
    sha256: str | None = "0" * 64


BLOCK = (
    Shaped("weight", "BF16", (16, 33)),
    Shaped("scale", "F32", ()),
    Shaped("nothing", "F32", (0, 16)),
    Shaped("island", "F32", (1, 6, 16)),
    Shaped("quantised", "F8_E4M3", (5,)),
)


def tensor_data(name: str, nbytes: int) -> bytes:
    """Bytes that belong to a tensor's name."""
    return np.random.default_rng(list(name.encode())).bytes(nbytes)


def block_tensors(block: str) -> tuple[Shaped, ...]:
    """The usual tensors of one block."""
    return tuple(Shaped(f"{block}.{tensor.name}", tensor.dtype, tensor.shape) for tensor in BLOCK)


def write_layout_entry(
    directory: Path,
    blocks: Mapping[str, Sequence[Shaped]] | None = None,
    resident: Sequence[Shaped] = (Shaped("proj_out.weight", "BF16", (8, 16)),),
) -> Manifest:
    """Publishes an entry of kind Layout in ``directory`` with the modes of a published one."""
    if blocks is None:
        blocks = {block: block_tensors(block) for block in ("blocks.0", "blocks.1", "single.0")}
    directory.mkdir(parents=True)
    groups = [(block_file_name(at, block), block, blocks[block]) for at, block in enumerate(blocks)]
    files, records = [], []
    for name, group, tensors in [*groups, *([(RESIDENT_FILE, None, resident)] if resident else [])]:
        header, placements = render_image_header(tensors)
        data, digests = b"", []
        for placed in placements:
            content = bytes(placed.nbytes) if placed.is_pad else tensor_data(placed.name, placed.nbytes)
            data += content
            if placed.is_pad:
                continue
            digests.append(blake3(content).hexdigest())
            records.append(
                TensorRecord(
                    name=placed.name,
                    dtype=placed.dtype,
                    shape=placed.shape,
                    file=name,
                    offset=placed.begin,
                    nbytes=placed.nbytes,
                    digest=digests[-1],
                    source_name=placed.name,
                    source_file="transformer/model.safetensors",
                    role="replicated",
                )
            )
        write_read_only(directory / name, header + data)
        digest = file_digest(header, digests)
        files.append(FileRecord(name, group, len(header) + len(data), len(header), digest))
    key, preimage = layout_key(
        [Digested("transformer/model.safetensors")],
        component="transformer",
        layout_id="tiny",
        layout_digest="1" * 64,
        dtype="Source",
        quantization="None",
        tensor_size=2,
        tensor_rank=1,
    )
    return publish(directory, Manifest(key, preimage, tuple(files), tuple(records)))


def write_files_entry(directory: Path, contents: Mapping[str, bytes]) -> Manifest:
    """Publishes an entry of kind Files."""
    directory.mkdir(parents=True)
    files = []
    for name, content in sorted(contents.items()):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_read_only(path, content)
        files.append(FileRecord(name, None, len(content), 0, blake3(content).hexdigest()))
    key, preimage = files_key([Digested(name, len(content)) for name, content in contents.items()])
    return publish(directory, Manifest(key, preimage, tuple(files), ()))


def publish(directory: Path, manifest: Manifest) -> Manifest:
    """Adds lease and manifest, and takes the right to write away."""
    (directory / "lease").write_bytes(b"")
    write_read_only(directory / "manifest.json", manifest.to_bytes())
    directory.chmod(0o555)
    return manifest


def write_read_only(path: Path, data: bytes) -> None:
    """Writes a file of mode 0444."""
    path.write_bytes(data)
    path.chmod(0o444)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Changes bytes of a published file in place."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    path.chmod(0o444)


def flip(path: Path, offset: int) -> None:
    """Inverts one byte of a published file."""
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0xFF]))


def open_descriptors() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def mapped_paths() -> list[str]:
    """The files that this process has mapped, once a mapping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "/" in line]
