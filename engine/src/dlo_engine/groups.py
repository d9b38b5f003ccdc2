"""Process groups of one engine: who computes together, who copies together, who agrees with whom.

Global rank = data index * tensor + tensor rank. A replica is the ranks of one data index; a weight group the
ranks of one tensor rank. One process alone makes no group at all. Must not be used from two threads, but for
the weight group, which is the copy thread's.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlo_engine.allgather import WeightGroup
from dlo_engine.tp import TensorGroup

TIMEOUT = datetime.timedelta(minutes=10)


class Groups:
    """This rank's place and groups. `weights` is there when `gather` was asked for and data > 1."""

    def __init__(
        self, rank: int, tensor: int, data: int, *, rendezvous: str, device: torch.device, gather: bool
    ) -> None:
        """Joins the world over `rendezvous` (a `file://` URL) when there is more than one rank."""
        self.rank, self.tensor_size, self.data_size = rank, tensor, data
        self.tensor_rank, self.data_index = rank % tensor, rank // tensor
        self.world = tensor * data
        self.replica = TensorGroup(None, self.tensor_rank, tensor)
        self.weights: WeightGroup | None = None
        self._replica_control: dist.ProcessGroup | None = None
        self._open = self.world > 1
        if not self._open:
            return
        cuda = device.type == "cuda"
        # The world group is the control plane: small messages between hosts' memories, always gloo.
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=self.world, timeout=TIMEOUT
        )
        backend = "nccl" if cuda else "gloo"
        # Every rank makes every group, in one order.
        for index in range(data):
            ranks = range(index * tensor, (index + 1) * tensor)
            control = _group(ranks, "gloo")
            compute = _group(ranks, backend) if cuda else control
            if index == self.data_index:
                self._replica_control = control
                self.replica = TensorGroup(compute, self.tensor_rank, tensor)
        if gather and data > 1:
            for column in range(tensor):
                group = _group(range(column, self.world, tensor), backend)
                if column == self.tensor_rank and group is not None:
                    self.weights = WeightGroup(group, self.data_index, data)

    @property
    def first(self) -> bool:
        """Whether this rank is its replica's tensor rank 0: it talks to encoders, decoder and client."""
        return self.tensor_rank == 0

    def all_true(self, value: bool, *, wave: bool = False) -> bool:
        """Whether `value` is true on every rank of the replica, or with `wave` of the whole engine.

        Every rank concerned must ask. Blocks until all have.
        """
        group = None if wave else self._replica_control
        if not self._open or (group is None and not wave):
            return value
        flag = torch.tensor(int(value), dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        return bool(flag.item())

    def messages(self, mine: str) -> list[str]:
        """Every rank's text in rank order. All ranks must ask."""
        if not self._open:
            return [mine]
        texts: list[str] = [""] * self.world
        dist.all_gather_object(texts, mine)
        return texts

    def share_tensors(
        self, tensors: Sequence[torch.Tensor] | None, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of the replica's tensor rank 0 on all of its ranks, on `device`; others pass None."""
        group = self._replica_control
        if group is None:
            return tuple(tensors or ())
        source = self.data_index * self.tensor_size
        shapes = [[(tuple(t.shape), t.dtype) for t in tensors] if tensors is not None else None]
        dist.broadcast_object_list(shapes, src=source, group=group)
        shared = []
        for index, (shape, dtype) in enumerate(shapes[0] or []):
            if tensors is not None:
                tensor = tensors[index].contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, src=source, group=self.replica.group)
            shared.append(tensor)
        return tuple(shared)

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        if self._open:
            self._open = False
            dist.destroy_process_group()


def _group(ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
    """A group of these ranks; None on other ranks and for one rank alone, which needs none."""
    if len(ranks) == 1:
        return None
    group: Any = dist.new_group(list(ranks), backend=backend, timeout=TIMEOUT)
    return group if dist.get_rank() in ranks else None
