"""What a block is made of: named tensors at offsets inside one run of bytes, and views of them in a buffer.

A block image is byte for byte what a device slot holds; of an entry it is one file's data section. Must not allocate
device memory and must not know where the bytes come from.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from dlo_engine.errors import BadEntry

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors dtype words and their torch types."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an image: its name inside the block, and where its bytes lie in the image."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """This tensor inside a uint8 buffer that holds the image from its first byte. Shares memory."""
        if self.nbytes == 0:  # no storage to view: an empty tensor owns nothing
            return torch.empty(self.shape, dtype=self.dtype, device=buffer.device)
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class Segment(NamedTuple):
    """A run of an image's bytes: where it begins in the image, and where it lies on the host (read-only)."""

    offset: int
    data: memoryview


@dataclass(frozen=True, eq=False)
class BlockImage:
    """The bytes of one block on the host and the tensors in them, named within the block.

    An entry's image is one segment. Without an entry the segments are tensors wherever a checkpoint has them,
    in order; the gaps between them have no value. No tensor spans two segments.
    """

    name: str
    segments: tuple[Segment, ...]
    tensors: tuple[TensorSpec, ...]
    nbytes: int

    def read(self, start: int, stop: int, target: np.ndarray[Any, Any]) -> None:
        """Copy bytes [start, stop) into `target` (uint8, as long); gaps are left as they are.

        numpy lets go of the interpreter lock meanwhile.
        """
        first = max(0, bisect.bisect_right(self.segments, start, key=lambda segment: segment.offset) - 1)
        for offset, data in self.segments[first:]:
            if offset >= stop:
                break
            low, high = max(start, offset), min(stop, offset + data.nbytes)
            if low < high:
                part = np.frombuffer(data[low - offset : high - offset], dtype=np.uint8)
                np.copyto(target[low - start : high - start], part)

    def tensor_data(self, spec: TensorSpec) -> memoryview:
        """The bytes of one of the image's tensors."""
        for offset, data in self.segments:
            if offset <= spec.offset and spec.offset + spec.nbytes <= offset + data.nbytes:
                return data[spec.offset - offset : spec.offset - offset + spec.nbytes]
        return memoryview(b"")

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor of the block as a view of a buffer that holds the image."""
        return {spec.name: spec.view(buffer) for spec in self.tensors}


def whole(name: str, data: memoryview, tensors: tuple[TensorSpec, ...] = ()) -> BlockImage:
    """An image whose bytes lie together."""
    return BlockImage(name, (Segment(0, data),) if data.nbytes else (), tensors, data.nbytes)


class StoredTensor(Protocol):
    """A tensor as an entry's file describes it (`dlo_cache.entry.TensorView`)."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def block_image(
    name: str,
    data: memoryview | tuple[Segment, ...],
    tensors: Iterable[StoredTensor],
    *,
    nbytes: int | None = None,
) -> BlockImage:
    """An image from stored tensors: of one entry file's data, or of segments that make up `nbytes`.

    `name` is the block ("transformer_blocks.3"), or "" for the resident rest. Raises BadEntry for a dtype torch
    has no type for, a tensor outside the data or of another length, and a tensor that is not the block's.
    """
    segments = data if isinstance(data, tuple) else ((Segment(0, data),) if data.nbytes else ())
    total = nbytes if nbytes is not None else sum(segment.data.nbytes for segment in segments)
    prefix = f"{name}." if name else ""
    specs = []
    for stored in tensors:
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise BadEntry(f"Tensor {stored.name} has the type {stored.dtype}, which torch does not have")
        expected = math.prod(stored.shape) * dtype.itemsize
        if stored.nbytes != expected or stored.offset < 0 or stored.offset + expected > total:
            raise BadEntry(f"Tensor {stored.name} does not fit the data of its file")
        if not stored.name.startswith(prefix):
            raise BadEntry(f"Tensor {stored.name} lies in the file of block {name}")
        specs.append(
            TensorSpec(stored.name[len(prefix) :], dtype, tuple(stored.shape), stored.offset, stored.nbytes)
        )
    return BlockImage(name, segments, tuple(specs), total)
