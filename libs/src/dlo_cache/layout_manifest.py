"""Keys and manifests of ``Layout`` entries, made from what was asked for and what was written. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlo_cache.image_plan import ImagePlan
from dlo_cache.keys import layout_key
from dlo_cache.layout import Layout
from dlo_cache.manifest import FileRecord, Manifest, TensorRecord, file_digest
from dlo_cache.source import Component


@dataclass(frozen=True, slots=True)
class LayoutKey:
    """The name of one coordinate's entry and what it is the digest of."""

    rank: int
    key: str
    preimage: Mapping[str, Any]


def layout_keys(
    component: Component,
    layout: Layout,
    *,
    dtype: str,
    quantization: str,
    tensor_size: int,
    tensor_ranks: Sequence[int],
) -> list[LayoutKey]:
    """The keys of the entries for ``tensor_ranks``; raises Invalid for a source file whose sha256 is not
    known."""
    keys = []
    for rank in tensor_ranks:
        key, preimage = layout_key(
            component.files,
            component=component.name,
            layout_id=layout.id,
            layout_digest=layout.digest,
            dtype=dtype,
            quantization=quantization,
            tensor_size=tensor_size,
            tensor_rank=rank,
        )
        keys.append(LayoutKey(rank, key, preimage))
    return keys


def render_manifest(
    name: LayoutKey, plans: Sequence[ImagePlan], index: int, digests: Mapping[str, Mapping[str, str]]
) -> Manifest:
    """The manifest of coordinate ``index`` of ``plans``; ``digests`` holds, by file and tensor, the BLAKE3
    written."""
    files: list[FileRecord] = []
    tensors: list[TensorRecord] = []
    for plan in plans:
        records = _tensors(plan, index, digests[plan.name])
        image = plan.images[index]
        digest = file_digest(image.header, (record.digest for record in records))
        files.append(FileRecord(plan.name, plan.group, image.nbytes, len(image.header), digest))
        tensors += records
    return Manifest(name.key, name.preimage, tuple(files), tuple(tensors))


def _tensors(plan: ImagePlan, index: int, digests: Mapping[str, str]) -> list[TensorRecord]:
    spots = [spot for spot in plan.images[index].placements if not spot.is_pad]
    return [
        TensorRecord(
            name=spot.name,
            dtype=spot.dtype,
            shape=spot.shape,
            file=plan.name,
            offset=spot.begin,
            nbytes=spot.nbytes,
            digest=digests[spot.name],
            source_name=tensor.source.name,
            source_file=tensor.source.file.name,
            role=tensor.role,
        )
        for spot, tensor in zip(spots, plan.tensors, strict=True)
    ]
