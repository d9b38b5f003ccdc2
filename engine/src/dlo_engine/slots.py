"""Device memory for weights: the accounted allocator, and the slots that streamed blocks take turns in.

Must not copy anything and must not decide which block goes where.
"""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass

import torch

ALIGNMENT = 512
"""Every buffer starts at a multiple of this many bytes: kernels are chosen by pointer alignment."""


class DeviceMemory:
    """Allocates byte buffers on one device and keeps account of them by purpose ("slots", "resident")."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated: Counter[str] = Counter()

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        """A uint8 buffer of exactly `nbytes`, aligned to 512 bytes, contents undefined.

        Freed with the tensor.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":
            # An anonymous mapping starts on a page; torch's own host allocator promises 64 bytes only. Private:
            # a shared one would be charged as shared memory, which plans and limits count apart.
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if buffer.data_ptr() % ALIGNMENT:
            raise AssertionError(f"buffer at {buffer.data_ptr():#x} is not aligned to {ALIGNMENT} bytes")
        self.allocated[purpose] += nbytes
        return buffer


@dataclass(eq=False)
class Slot:
    """One device buffer that holds one streamed block at a time."""

    index: int
    buffer: torch.Tensor


class SlotPool:
    """`count` slots of `slot_bytes` each, allocated once.

    With no bytes (nothing streams) there is no slot.
    """

    def __init__(self, memory: DeviceMemory, count: int, slot_bytes: int) -> None:
        if slot_bytes % ALIGNMENT:
            raise AssertionError(f"slots of {slot_bytes} bytes cannot follow each other at {ALIGNMENT} bytes")
        self.slot_bytes = slot_bytes
        self.slots: tuple[Slot, ...] = ()
        if slot_bytes:
            self._buffer = memory.allocate(count * slot_bytes, "slots")
            self.slots = tuple(
                Slot(index, self._buffer[index * slot_bytes : (index + 1) * slot_bytes])
                for index in range(count)
            )
