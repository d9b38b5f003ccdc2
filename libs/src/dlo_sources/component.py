"""One component of a pipeline, from its folder: which files, which tensors, all checked against each other.

Only headers are read. An index and the shards it names must agree exactly, for quantised weights too: a
tensor that is silently absent stays uninitialised and only shows in the pictures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlo_cache.errors import BadHeader
from dlo_cache.header import PAD_PREFIX, parse_header
from dlo_cache.source import Component, SourceTensor

from dlo_sources.errors import SourceError, SourceIncomplete, SourceInvalid, SourceUntrusted
from dlo_sources.files import CheckpointFile
from dlo_sources.folder import CheckpointFolder, check_name
from dlo_sources.weights import choose_weights, is_side_file

CONFIG: Final = "config.json"
#: A hundred times what large models have. The process that reads strangers' checkpoints has no memory limit.
MOST_TENSORS: Final = 300_000
CONFIG_LIMIT: Final = 2 << 20
# Classes that have settings and vocabularies but never weights.
_WEIGHTLESS: Final = re.compile(
    r".*(Tokenizer|TokenizerFast|Processor|FeatureExtractor|FeatureExtractorFast|Scheduler)"
)
_UNFINISHED: Final = {"Empty", "Truncated", "LfsPointer"}
_FETCH: Final = "fetch the checkpoint again, or wait until it has arrived"


def read_component(
    folder: CheckpointFolder, name: str, library: str, class_name: str, variant: str
) -> Component:
    """The component ``name``; raises a SourceError that names file and tensor for whatever is not whole."""
    names = folder.names(name)
    side = [found for found in names if is_side_file(found)]
    if not names:
        raise SourceIncomplete(f"component {name}: its folder {name} is empty", hint=_FETCH, component=name)
    if _WEIGHTLESS.fullmatch(class_name):
        return Component(name, library, class_name, {}, tuple(map(folder.file, side)), (), {})
    if f"{name}/{CONFIG}" not in names:
        raise SourceIncomplete(f"component {name}: {name}/{CONFIG} is missing", hint=_FETCH, component=name)
    config = read_config(folder, f"{name}/{CONFIG}")
    stated = config.get("_class_name", class_name)
    if stated != class_name:
        raise SourceInvalid(
            f"component {name}: {name}/{CONFIG} is of a {str(stated)[:80]!r}, model_index.json of a {class_name!r}",
            hint="correct the file that is wrong: layouts and engines go by the class",
            component=name,
        )
    local = [found.removeprefix(f"{name}/") for found in names]
    chosen = choose_weights(local, where=name, library=library, variant=variant)
    if chosen.index_file is not None:
        index_name = f"{name}/{chosen.index_file}"
        placed = _read_index(folder, index_name)
        shards = _find_shards(folder, name, index_name, placed)
        side.append(index_name)
    else:
        shards, placed = {f"{name}/{chosen.single_file}": folder.file(f"{name}/{chosen.single_file}")}, {}
    tensors: dict[str, SourceTensor] = {}
    for shard_name, shard in shards.items():
        held = _read_tensors(shard)
        if chosen.index_file is not None:
            wanted = placed[shard_name.removeprefix(f"{name}/")]
            _check_placed(shard_name, wanted, held, f"{name}/{chosen.index_file}")
        tensors.update(held)
        check_count(len(tensors), name)
    weights = tuple(shards.values())
    files = sorted([*map(folder.file, side), *weights], key=lambda file: file.name)
    return Component(name, library, class_name, config, tuple(files), weights, tensors)


def read_config(folder: CheckpointFolder, name: str) -> dict[str, Any]:
    """The JSON object of a configuration, which stays in memory; raises SourceInvalid for a huge one."""
    size = folder.file(name).size
    if size > CONFIG_LIMIT:
        raise SourceInvalid(f"{name} has {size} bytes, more than {CONFIG_LIMIT}", file=name)
    return folder.json(name)


def check_count(tensors: int, where: str) -> None:
    """Raises SourceInvalid for more tensors than any model has."""
    if tensors > MOST_TENSORS:
        raise SourceInvalid(
            f"{where} has more than {MOST_TENSORS} tensors",
            hint="get the checkpoint from a source that you trust",
        )


def _read_index(folder: CheckpointFolder, index_name: str) -> dict[str, list[str]]:
    """Shard name in the component's folder to its tensors; names are judged, nothing else is opened."""
    weight_map = folder.json(index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceInvalid(f"{index_name} has no weight_map", hint=_FETCH, file=index_name)
    placed: dict[str, list[str]] = defaultdict(list)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise SourceInvalid(
                f"{index_name} places tensor {tensor} in no file", file=index_name, tensor=tensor
            )
        placed[shard].append(tensor)
    for shard, tensors in placed.items():
        try:
            check_name(shard)
        except SourceUntrusted as error:
            raise SourceUntrusted(
                f"{index_name} places tensor {tensors[0]} in {shard!r}, which is no plain path inside the"
                " component's folder; it was not opened",
                hint="get the checkpoint from a source that you trust",
                file=shard,
                tensor=tensors[0],
            ) from error
        if not shard.endswith(".safetensors"):
            raise SourceInvalid(
                f"{index_name} places tensor {tensors[0]} in {shard}, which is no safetensors file",
                hint="convert the checkpoint to safetensors",
                file=shard,
            )
    return placed


def _find_shards(
    folder: CheckpointFolder, component: str, index_name: str, placed: Mapping[str, Sequence[str]]
) -> dict[str, CheckpointFile]:
    """The shards that the index names, sorted by name; none is opened before all are known to be there."""
    shards = {}
    for shard, tensors in sorted(placed.items()):
        name = f"{component}/{shard}"
        try:
            shards[name] = folder.file(name)
        except SourceIncomplete as error:
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            raise SourceIncomplete(
                f"{error.message}; {index_name} places tensor {tensors[0]}{more} in it",
                hint=error.hint,
                file=name,
                tensor=tensors[0],
            ) from error
    return shards


def _read_tensors(file: CheckpointFile) -> dict[str, SourceTensor]:
    try:
        header = parse_header(file.read, file.size, file.name)
    except BadHeader as error:
        kind: type[SourceError] = SourceIncomplete if error.reason in _UNFINISHED else SourceInvalid
        hint = error.hint or (_FETCH if kind is SourceIncomplete else "get the file from its origin again")
        raise kind(error.message, hint=hint, file=file.name, reason=error.reason) from error
    tensors = {}
    for tensor in header.tensors:
        if tensor.name.startswith(PAD_PREFIX):
            raise SourceInvalid(
                f"{file.name}: tensor name {tensor.name} is reserved", file=file.name, tensor=tensor.name
            )
        offset = header.data_offset + tensor.begin
        tensors[tensor.name] = SourceTensor(
            tensor.name, file, tensor.dtype, tensor.shape, offset, tensor.nbytes
        )
    return tensors


def _check_placed(shard: str, wanted: Sequence[str], held: Mapping[str, Any], index_name: str) -> None:
    for tensor in wanted:
        if tensor not in held:
            raise SourceIncomplete(
                f"{shard} does not hold tensor {tensor}, which {index_name} places in it",
                hint="index and shard are of different revisions: fetch both again",
                file=shard,
                tensor=tensor,
            )
    stray = held.keys() - set(wanted)
    if stray:
        tensor = min(stray)
        raise SourceInvalid(
            f"{shard} holds tensor {tensor}, which {index_name} does not place in it",
            hint="index and shard are of different revisions: fetch both again",
            file=shard,
            tensor=tensor,
        )
