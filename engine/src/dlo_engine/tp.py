"""Tensor parallelism: a model's linears in local shapes, driven by the layout that cut the entry.

Column linears hold some of the output features, row linears some of the input features and sum their results
over the ranks (the bias is added once, after the sum), column-gathered linears gather their outputs so that
every rank has them whole. Must not know any architecture: what a family needs beyond linears is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from dlo_cache.layout import Layout, Role
from torch import nn
from torch.nn import functional

from dlo_engine.errors import Unsupported


class TensorGroup:
    """The ranks of one replica, in tensor-rank order. Collectives run on the current stream."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; every rank gets the same bits."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor of one shape, stacked along a new first dimension in rank order."""
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather_into_tensor(out.flatten(), tensor.contiguous().flatten(), group=self.group)
        return out


class RowLinear(nn.Module):
    """`y = sum over ranks of (x_local W_localᵀ) + b`. `weight` is [out, in_local], `bias` [out] or None."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: TensorGroup) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_local] -> [..., out], the same on every rank."""
        y = self._group.sum(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class GatheredLinear(nn.Module):
    """`y = x Wᵀ + b` with the rows of W spread over the ranks; every rank gets y whole.

    `kept[r]` are the ranges of output features that rank r holds, in its local order.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: TensorGroup,
        kept: tuple[tuple[tuple[int, int], ...], ...],
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._group = group
        pieces = []
        for rank, ranges in enumerate(kept):
            local = 0
            for start, stop in ranges:
                pieces.append((start, rank, local, local + stop - start))
                local += stop - start
        self._pieces = [(rank, begin, end) for _, rank, begin, end in sorted(pieces)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out], the same on every rank."""
        parts = self._group.gather(functional.linear(x, self.weight, self.bias))
        return torch.cat([parts[rank][..., begin:end] for rank, begin, end in self._pieces], dim=-1)


def shard(model: nn.Module, layout: Layout, config: Mapping[str, Any], group: TensorGroup) -> None:
    """Replace the linears of a model on `meta` by local ones, as the layout cuts them. In place.

    Raises Unsupported for a cut tensor that is no linear's and for a role no linear can play; the layout's
    own errors pass through (unknown tensor, heads that do not divide).
    """
    if group.size == 1:
        return
    for path, module in list(model.named_modules()):
        own = {f"{path}.{key}" if path else key: p for key, p in module.named_parameters(recurse=False)}
        if isinstance(module, nn.Linear):
            local = _local_linear(path, module, layout, config, group)
            if local is not module:
                parent, _, key = path.rpartition(".")
                # Not setattr: in a ModuleList the key is a number.
                model.get_submodule(parent)._modules[key] = local
            continue
        for name, parameter in own.items():
            cut = layout.cut(name, tuple(parameter.shape), group.size, group.rank, config)
            if cut.dim is not None:
                raise Unsupported(
                    f"The layout cuts {name}, which belongs to a {type(module).__name__}",
                    hint="only linear layers can be cut; make its rule replicated",
                )


def _local_linear(
    path: str, linear: nn.Linear, layout: Layout, config: Mapping[str, Any], group: TensorGroup
) -> nn.Module:
    role = layout.rule(f"{path}.weight").role
    cuts = [
        layout.cut(f"{path}.weight", tuple(linear.weight.shape), group.size, rank, config)
        for rank in range(group.size)
    ]
    mine = cuts[group.rank]
    if mine.dim is None:
        return linear
    bias = None
    if linear.bias is not None:
        kept = layout.cut(f"{path}.bias", tuple(linear.bias.shape), group.size, group.rank, config)
        bias = _placeholder(kept.shape)
        if (kept.dim is None) != (role is Role.ROW):
            raise Unsupported(
                f"The layout's rules for {path}.weight ({role}) and its bias do not fit together"
            )
    weight = _placeholder(mine.shape)
    if role is Role.ROW and mine.dim == 1:
        return RowLinear(weight, bias, group)
    if role is Role.COLUMN_GATHERED and mine.dim == 0:
        return GatheredLinear(weight, bias, group, tuple(cut.ranges for cut in cuts))
    if role is Role.COLUMN and mine.dim == 0:
        local = nn.Linear(mine.shape[1], mine.shape[0], bias=bias is not None, device="meta")
        local.weight = weight
        local.bias = bias
        return local
    raise Unsupported(f"The layout gives {path}.weight the role {role}, which this engine cannot run")


def _placeholder(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
