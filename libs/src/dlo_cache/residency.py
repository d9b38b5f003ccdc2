"""Which blocks stay on the device, how large a slot must be, and how a block is shared among ranks.

Pure arithmetic over block sizes in bytes, in execution order. Nothing here knows of devices, files or time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from dlo_cache.errors import Invalid

PAGE: Final = 4096


def spread(block_bytes: Sequence[int], count: int) -> tuple[int, ...]:
    """Indices of ``count`` resident blocks, spread evenly by bytes over the execution order.

    The bytes of one pass are divided into ``count`` equal stretches, and in the middle of each the nearest
    block stays resident, so that the copy engine never has a long run of streamed blocks to catch up with.
    """
    total_blocks = len(block_bytes)
    if not 0 <= count <= total_blocks:
        raise Invalid(
            f"{count} resident blocks of {total_blocks}", hint="use a number from 0 to the number of blocks"
        )
    total = sum(block_bytes)
    # Twice each block's middle, times count, against odd multiples of the total: whole numbers, no rounding.
    middles, at = [], 0
    for size in block_bytes:
        middles.append((2 * at + size) * count)
        at += size
    chosen: list[int] = []
    first = 0
    for stretch in range(count):
        target = (2 * stretch + 1) * total
        last = total_blocks - (count - stretch)
        best = min(range(first, last + 1), key=lambda index: (abs(middles[index] - target), index))
        chosen.append(best)
        first = best + 1
    return tuple(chosen)


def fit(block_bytes: Sequence[int], budget_bytes: int, slots: int, group_size: int = 1) -> tuple[int, ...]:
    """The largest spread set of residents that fits ``budget_bytes`` together with ``slots`` slots for the
    rest.

    Raises Invalid if not even the slots fit.
    """
    for count in range(len(block_bytes), -1, -1):
        resident = spread(block_bytes, count)
        needed = sum(block_bytes[index] for index in resident) + slots * slot_bytes(
            block_bytes, resident, group_size
        )
        if needed <= budget_bytes:
            return resident
    needed = slots * slot_bytes(block_bytes, (), group_size)
    raise Invalid(
        f"a device memory budget of {budget_bytes} bytes is too small: {slots} slots alone need {needed}",
        hint="raise the budget, or use more tensor-parallel ranks",
        needed=needed,
    )


def slot_bytes(block_bytes: Sequence[int], resident: Collection[int], group_size: int = 1) -> int:
    """Bytes of a device slot: the largest streamed block, rounded up to whole shares; 0 if none streams."""
    streamed = (size for index, size in enumerate(block_bytes) if index not in resident)
    return share(max(streamed, default=0), group_size) * group_size


def share(nbytes: int, group_size: int, page: int = PAGE) -> int:
    """Bytes that a rank copies of a block of ``nbytes``, in whole pages; the last rank may get less."""
    return -(-nbytes // (group_size * page)) * page


def byte_range(nbytes: int, group_size: int, rank: int, page: int = PAGE) -> tuple[int, int]:
    """The bytes that ``rank`` copies, possibly none; ranges meet, share no page and end at ``nbytes``."""
    if not 0 <= rank < group_size:
        raise Invalid(f"rank {rank} is not below the group's size {group_size}")
    step = share(nbytes, group_size, page)
    return min(rank * step, nbytes), min((rank + 1) * step, nbytes)
