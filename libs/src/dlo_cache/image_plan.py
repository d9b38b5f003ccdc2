"""Decides, before anything is read, which files an entry has and where every tensor of every coordinate lies
in them.

Sizes, names, divisibility and unknown tensors are all settled here, so that a build that cannot succeed
writes nothing. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlo_cache.cutting import TensorCut
from dlo_cache.dtypes import target_dtype
from dlo_cache.errors import Invalid
from dlo_cache.header import HeaderTensor, render_image_header
from dlo_cache.layout import Layout
from dlo_cache.manifest import RESIDENT_FILE, block_file_name
from dlo_cache.source import SourceTensor


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor on its way into the images: where it comes from, its dtype there, its role, and who gets
    what."""

    source: SourceTensor
    word: str
    role: str
    cut: TensorCut


@dataclass(frozen=True, slots=True)
class Image:
    """One coordinate's side of an image: the leading bytes and the placement of every tensor, pads
    included."""

    header: bytes
    placements: tuple[HeaderTensor, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of the data section."""
        return self.placements[-1].end if self.placements else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.data_bytes


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """One file of the entries: a block, or the resident rest. ``images`` are in the order of the
    coordinates."""

    name: str
    group: str | None
    tensors: tuple[TensorPlan, ...]
    images: tuple[Image, ...]


@dataclass(frozen=True, slots=True)
class _Shaped:
    name: str
    dtype: str
    shape: tuple[int, ...]


def plan_images(
    tensors: Mapping[str, SourceTensor],
    layout: Layout,
    *,
    dtype: str,
    tensor_size: int,
    tensor_ranks: Sequence[int],
    config: Mapping[str, Any],
) -> tuple[ImagePlan, ...]:
    """The files of the entries for ``tensor_ranks``: blocks in execution order, then the resident rest.

    Inside a file, tensors keep the order of ``tensors``. Raises UnknownTensor, NotDivisible or Invalid.
    """
    layout.check(config, tensor_size)
    by_block: dict[str | None, list[TensorPlan]] = defaultdict(list)
    for name, source in tensors.items():
        cuts = [layout.cut(name, source.shape, tensor_size, rank, config) for rank in tensor_ranks]
        word = target_dtype(dtype, source.dtype, layout.keeps_fp32(name))
        plan = TensorPlan(source, word, str(layout.rule(name).role), TensorCut.plan(name, source.shape, cuts))
        by_block[layout.block_of(name)].append(plan)
    if not by_block:
        raise Invalid("the component has no tensors")
    blocks = layout.execution_order(tensors)
    plans = [
        _image(block_file_name(index, block), block, by_block[block]) for index, block in enumerate(blocks)
    ]
    if None in by_block:
        plans.append(_image(RESIDENT_FILE, None, by_block[None]))
    return tuple(plans)


def _image(name: str, group: str | None, tensors: Sequence[TensorPlan]) -> ImagePlan:
    coordinates = len(tensors[0].cut.cuts)
    images = []
    for index in range(coordinates):
        header, placements = render_image_header(
            _Shaped(plan.source.name, plan.word, plan.cut.cuts[index].shape) for plan in tensors
        )
        images.append(Image(header, placements))
    return ImagePlan(name, group, tuple(tensors), tuple(images))
