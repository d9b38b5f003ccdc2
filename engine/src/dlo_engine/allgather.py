"""AllGather transfer: the ranks of a weight group copy a share of each block and rebuild it together.

A weight group is the data-parallel ranks with one tensor rank: they need the same bytes. Every rank must run
the same loads in the same order, which holds because the order depends only on the order of forwards. Must
not be asked from two threads: the copy thread owns its process group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from dlo_cache.residency import byte_range, share


class WeightGroup:
    """`size` ranks that hold the same entry. The slot of a block has `size * share(nbytes, size)` bytes."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size

    def byte_range(self, nbytes: int) -> tuple[int, int]:
        """The bytes this rank copies and registers: whole pages, nothing past the end, possibly nothing."""
        return byte_range(nbytes, self._size, self._rank)

    def rebuild(self, buffer: torch.Tensor, nbytes: int) -> None:
        """In place in the slot: rank r's share lies at r * share. Bytes behind the image are undefined."""
        part = share(nbytes, self._size)
        mine = buffer[self._rank * part : (self._rank + 1) * part]
        dist.all_gather_into_tensor(buffer[: self._size * part], mine, group=self._group)
