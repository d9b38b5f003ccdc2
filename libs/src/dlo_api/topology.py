"""Ranks of one engine: how many, which coordinates each has, and which share a weight copy. Pure.

Order of ranks, fastest first: tensor, ulysses, ring, pipeline, cfg, data. `expert` adds no ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from dlo_api.v1alpha1.diffusion_deployment import Parallelism, Transfer

GroupKind = Literal["Data", "Sequence", "None"]


@dataclass(frozen=True)
class RankPlace:
    """A rank's place in every dimension, all counted from 0."""

    global_rank: int
    tensor_rank: int
    ulysses_rank: int
    ring_rank: int
    pipeline_rank: int
    cfg_rank: int
    data_rank: int
    tensor_size: int

    @property
    def coordinate(self) -> str:
        """Tensor rank / tensor size: what cache entries are cut for."""
        return coordinate(self.tensor_rank, self.tensor_size)


@dataclass(frozen=True)
class WeightGroup:
    """Ranks that share the copy of one block under AllGather.

    Attributes:
        kind: the dimension they differ in; None when there is no collective.
        size: number of ranks in each group; 1 when there is no collective.
    """

    kind: GroupKind
    size: int


def coordinate(tensor_rank: int, tensor_size: int) -> str:
    """A tensor-parallel coordinate as it is written everywhere: `0/2`."""
    return f"{tensor_rank}/{tensor_size}"


def world_size(parallelism: Parallelism) -> int:
    """Number of ranks (and GPUs) of one engine."""
    p = parallelism
    return p.tensor * p.data * p.ulysses * p.ring * p.cfg * p.pipeline


def ranks(parallelism: Parallelism) -> tuple[RankPlace, ...]:
    """Every rank's place, by global rank. All degrees must be at least 1 (an admission rule)."""
    p = parallelism
    slowest_first = (p.data, p.cfg, p.pipeline, p.ring, p.ulysses, p.tensor)
    return tuple(
        RankPlace(
            global_rank=number,
            tensor_rank=tensor,
            ulysses_rank=ulysses,
            ring_rank=ring,
            pipeline_rank=pipeline,
            cfg_rank=cfg,
            data_rank=data,
            tensor_size=p.tensor,
        )
        for number, (data, cfg, pipeline, ring, ulysses, tensor) in enumerate(
            itertools.product(*(range(size) for size in slowest_first))
        )
    )


def weight_group(parallelism: Parallelism, transfer: Transfer) -> WeightGroup:
    """Who shares a block's copy: the data group if there is one, else the sequence group, else nobody.

    Never the tensor group, whose ranks hold different bytes; nobody under RankLocal.
    """
    sequence = parallelism.ulysses * parallelism.ring
    if transfer == "AllGather" and parallelism.data > 1:
        return WeightGroup("Data", parallelism.data)
    if transfer == "AllGather" and sequence > 1:
        return WeightGroup("Sequence", sequence)
    return WeightGroup("None", 1)


def weight_groups(parallelism: Parallelism, transfer: Transfer) -> tuple[tuple[int, ...], ...]:
    """The groups themselves as global ranks, each in rank order; every rank is in exactly one."""
    kind = weight_group(parallelism, transfer).kind
    members: dict[tuple[int, ...], list[int]] = {}
    for place in ranks(parallelism):
        sequence = (place.ulysses_rank, place.ring_rank)
        others: tuple[int, ...] = (place.tensor_rank, place.pipeline_rank, place.cfg_rank)
        if kind == "Data":
            others += sequence
        elif kind == "Sequence":
            others += (place.data_rank,)
        else:
            others += (*sequence, place.data_rank)
        members.setdefault(others, []).append(place.global_rank)
    return tuple(tuple(group) for group in members.values())
