"""Device memory for weights: exact, aligned, accounted."""

from __future__ import annotations

import pytest
import torch
from dlo_engine.slots import ALIGNMENT, DeviceMemory, SlotPool

CPU = torch.device("cpu")


@pytest.mark.parametrize(("count", "slot_bytes"), [(2, 4096), (3, 8192), (4, 512)])
def test_pool_takes_exactly_its_slots(count: int, slot_bytes: int) -> None:
    """The pool allocates count * slot_bytes and nothing else; slots follow each other, each aligned."""
    memory = DeviceMemory(CPU)
    pool = SlotPool(memory, count, slot_bytes)
    assert dict(memory.allocated) == {"slots": count * slot_bytes}
    addresses = [slot.buffer.data_ptr() for slot in pool.slots]
    assert [slot.buffer.nbytes for slot in pool.slots] == [slot_bytes] * count
    assert [address - addresses[0] for address in addresses] == [i * slot_bytes for i in range(count)]
    assert all(address % ALIGNMENT == 0 for address in addresses)
    storage = pool.slots[0].buffer.untyped_storage()
    assert storage.nbytes() == count * slot_bytes


def test_no_streamed_bytes_means_no_slot() -> None:
    """Where every block stays, nothing is allocated for slots."""
    memory = DeviceMemory(CPU)
    assert SlotPool(memory, 2, 0).slots == ()
    assert not memory.allocated


def test_buffers_are_aligned_and_writable() -> None:
    """Odd sizes too; an empty buffer is allowed and costs nothing."""
    memory = DeviceMemory(CPU)
    for nbytes in (1, 777, 4097):
        buffer = memory.allocate(nbytes, "resident")
        assert buffer.data_ptr() % ALIGNMENT == 0
        assert buffer.fill_(7).sum().item() == 7 * nbytes
    assert memory.allocate(0, "resident").nbytes == 0
    assert memory.allocated["resident"] == 1 + 777 + 4097
