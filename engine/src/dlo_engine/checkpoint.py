"""Block images straight from a checkpoint, where no layout entry was prepared: mapped in place, or cut privately.

At tensor degree 1 a block is its tensors wherever they lie in the mapped weight files, brought together by the
copy into the slot (backing MappedCheckpoint). At higher degrees this rank's part is cut into memory of its own
(backing PrivateLoad). Must not write anything and must not be chosen in silence: the caller reports the backing.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from dlo_cache.canonical import strict_json
from dlo_cache.entry import Entry
from dlo_cache.errors import Invalid
from dlo_cache.header import ALIGNMENT, parse_header, tensor_bytes
from dlo_cache.layout import Layout
from dlo_cache.mapping import MappedFile

from dlo_engine.config import Backing
from dlo_engine.errors import BadEntry
from dlo_engine.specs import BlockImage, Segment, block_image

_INDEX = re.compile(r".+\.safetensors\.index(?:\.\w+)?\.json")
_WEIGHTS = "diffusion_pytorch_model.safetensors"


class _Source(NamedTuple):
    """A tensor in a checkpoint: its bytes and what they are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class _Placed(NamedTuple):
    """A tensor's place in an image (`specs.StoredTensor`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def checkpoint_images(
    entry: Entry,
    component: str,
    layout: Layout,
    config: Mapping[str, Any],
    *,
    tensor_size: int,
    tensor_rank: int,
) -> tuple[list[BlockImage], BlockImage, Backing]:
    """Blocks in execution order, the rest, and the backing they amount to.

    `entry` holds the component's files verbatim. Raises BadEntry where its weights are not whole, and the
    layout's errors.
    """
    sources = {source.name: source for source in _tensors(entry, component)}
    order = layout.execution_order(sources)
    groups: dict[str, list[_Source]] = {name: [] for name in (*order, "")}
    for source in sources.values():
        layout.rule(source.name)  # an unknown tensor is an error here as well
        groups[layout.block_of(source.name) or ""].append(source)
    mapped = tensor_size == 1
    images = {}
    for name, members in groups.items():
        parts = members
        if not mapped:
            parts = [_cut(source, layout, config, tensor_size, tensor_rank) for source in members]
        images[name] = _image(name, parts, private=not mapped)
    return [images[name] for name in order], images[""], "MappedCheckpoint" if mapped else "PrivateLoad"


def _tensors(entry: Entry, component: str) -> Iterator[_Source]:
    """Every tensor of a component's weights; with an index exactly those that it names, from those files."""
    files = {file.name: file for file in entry.files}
    names, owner = _weight_files(files, component)
    found = set()
    for name in names:
        file = files.get(name)
        if file is None:
            raise BadEntry(f"Weight file {name}, which the index names, is not in the Files entry")
        data = file.data
        header = parse_header(_reader(data), len(data), name)
        for tensor in header.tensors:
            if owner is None or owner.get(tensor.name) == name:
                found.add(tensor.name)
                start = header.data_offset + tensor.begin
                yield _Source(tensor.name, tensor.dtype, tensor.shape, data[start : start + tensor.nbytes])
    missing = sorted(set(owner or ()) - found)
    if missing:
        raise BadEntry(f"Tensor {missing[0]} is not in the file that the index of {component} names")


def _reader(data: memoryview) -> Callable[[int, int], bytes]:
    return lambda offset, length: bytes(data[offset : offset + length])


def _weight_files(files: Mapping[str, MappedFile], component: str) -> tuple[list[str], dict[str, str] | None]:
    """The weight files of a component, and with an index which tensor lies in which."""
    own = [name for name in files if name.startswith(f"{component}/")]
    indexes = [name for name in own if _INDEX.fullmatch(name)]
    if len(indexes) == 1:
        owner = {
            tensor: f"{component}/{name}"
            for tensor, name in _weight_map(files[indexes[0]], indexes[0]).items()
        }
        return sorted(set(owner.values())), owner
    weights = [name for name in own if name.endswith(".safetensors")]
    if f"{component}/{_WEIGHTS}" in weights:
        return [f"{component}/{_WEIGHTS}"], None
    if len(weights) == 1 and not indexes:
        return weights, None
    raise BadEntry(
        f"The Files entry holds {len(weights)} weight files and {len(indexes)} indexes of {component}",
        hint="prepare the whole pipeline (select All) with one set of weights",
    )


def _weight_map(file: MappedFile, name: str) -> Mapping[str, str]:
    try:
        index = strict_json(bytes(file.data), name)
    except Invalid as error:
        raise BadEntry(error.message, hint=error.hint) from error
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise BadEntry(f"{name} has no weight_map")
    return placed


def _cut(
    source: _Source, layout: Layout, config: Mapping[str, Any], tensor_size: int, tensor_rank: int
) -> _Source:
    """This rank's part of a tensor, in memory of its own."""
    cut = layout.cut(source.name, source.shape, tensor_size, tensor_rank, config)
    if cut.dim is None:
        return source
    item = tensor_bytes(source.dtype, ())
    array = np.frombuffer(source.data, np.uint8).reshape(*source.shape, item)
    index = (slice(None),) * cut.dim
    parts = [array[(*index, slice(start, stop))] for start, stop in cut.ranges]
    joined = np.ascontiguousarray(np.concatenate(parts, axis=cut.dim)).reshape(-1)
    return _Source(source.name, source.dtype, cut.shape, joined.data)


def _image(name: str, sources: Iterable[_Source], *, private: bool) -> BlockImage:
    """An image of tensors at multiples of 256 bytes, in the order given."""
    placed, segments, offset = [], [], 0
    for source in sources:
        nbytes = source.data.nbytes
        placed.append(_Placed(source.name, source.dtype, source.shape, offset, nbytes))
        if nbytes:
            segments.append(Segment(offset, source.data))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if private and offset:
        # Private: a shared one would be charged as shared memory, which plans and limits count apart.
        anonymous = mmap.mmap(-1, offset, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = np.frombuffer(anonymous, np.uint8)
        for segment in segments:
            memory[segment.offset : segment.offset + segment.data.nbytes] = np.frombuffer(
                segment.data, np.uint8
            )
        segments = [Segment(0, memory.data.toreadonly())]
    return block_image(name, tuple(segments), placed, nbytes=offset)
