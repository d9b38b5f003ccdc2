"""A toy model with block lists of any widths, and one call that streams it.

For tests of the streaming core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from dlo_engine.host_source import MappedSource
from dlo_engine.placement import Placed, place, plan_residency
from dlo_engine.slots import DeviceMemory
from dlo_engine.streams import streams_for
from dlo_engine.transfer import CopyEngine, Recorder
from fakes.block_images import images_of
from torch import nn

WIDTH = 8


class ToyBlock(nn.Module):
    """x + up(relu(down(x))) with `rows` hidden features, and a scale kept in float32 as a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, rows)
        self.up = nn.Linear(rows, WIDTH, bias=False)
        self.register_buffer("scale", torch.rand((), dtype=torch.float32) + 0.5)
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 8] -> [..., 8]."""
        hidden: torch.Tensor = self.down(x)
        y: torch.Tensor = x + self.scale.to(x.dtype) * self.up(hidden.relu())
        return y


class ToyModel(nn.Module):
    """Lists of blocks in the order of `lists`; `order` may name them in another order, or some not at all."""

    def __init__(self, lists: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        for name, rows in lists.items():
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, nn.ModuleList(ToyBlock(count) for count in rows))
        self.block_names = tuple(
            f"{name}.{index}" for name, rows in lists.items() for index in range(len(rows))
        )
        self.order: Sequence[str] = self.block_names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the blocks in `order`."""
        x = self.first(x)
        for name in self.order:
            x = self.get_submodule(name)(x)
        return x


def toy_pair(
    lists: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[ToyModel, ToyModel]:
    """The same model twice: with weights, and on `meta`. The scale buffers stay float32."""
    torch.manual_seed(seed)
    reference = ToyModel(lists)
    for module in reference.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    with torch.device("meta"):
        empty = ToyModel(lists)
    return reference.eval().requires_grad_(False), empty.eval().requires_grad_(False)


def stream_toy(
    reference: ToyModel,
    empty: ToyModel,
    *,
    slots: int = 2,
    resident: int = 0,
    recorder: Recorder | None = None,
    poison: bool = True,
) -> Placed:
    """Stream `empty` with the weights of `reference`, on the host."""
    blocks, rest = images_of(reference, reference.block_names)
    device = torch.device("cpu")
    engine = CopyEngine(streams_for(device), MappedSource(), recorder=recorder, poison=poison)
    plan = plan_residency(
        [block.nbytes for block in blocks], resident=resident, budget=None, slots=slots, group_size=1
    )
    return place(empty, blocks, rest, plan, engine, DeviceMemory(device))
