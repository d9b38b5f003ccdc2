"""What a block is made of: named tensors at offsets inside one run of bytes, and views of them in a buffer.

A block image is the data section of one entry file, byte for byte what a device slot holds. Must not allocate
device memory and must not know where the bytes come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from dlo_engine.errors import BadEntry

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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


@dataclass(frozen=True, eq=False)
class BlockImage:
    """The bytes of one block on the host (read-only) and the tensors in them, named within the block."""

    name: str
    data: memoryview
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the image, pads included."""
        return self.data.nbytes

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor of the block as a view of a buffer that holds the image."""
        return {spec.name: spec.view(buffer) for spec in self.tensors}


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


def block_image(name: str, data: memoryview, tensors: Iterable[StoredTensor]) -> BlockImage:
    """The image of one entry file. `name` is the block ("transformer_blocks.3") or "" for the resident rest.

    Raises BadEntry for a dtype torch has no type for, a tensor outside the data or of another length, and
    a tensor that is not the block's.
    """
    prefix = f"{name}." if name else ""
    specs = []
    for stored in tensors:
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise BadEntry(f"Tensor {stored.name} has the type {stored.dtype}, which torch does not have")
        expected = math.prod(stored.shape) * dtype.itemsize
        if stored.nbytes != expected or stored.offset < 0 or stored.offset + expected > data.nbytes:
            raise BadEntry(f"Tensor {stored.name} does not fit the data of its file")
        if not stored.name.startswith(prefix):
            raise BadEntry(f"Tensor {stored.name} lies in the file of block {name}")
        specs.append(
            TensorSpec(stored.name[len(prefix) :], dtype, tuple(stored.shape), stored.offset, stored.nbytes)
        )
    return BlockImage(name, data, tuple(specs))
