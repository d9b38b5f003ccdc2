"""Which files of a component's folder are its weights, decided by their names alone.

An index says so and ends the search. Without one there must be exactly one whole file of the usual name.
Anything else is refused with what was found, because files of another revision would load just as well and
only make worse pictures. Pure: names in, names out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from dlo_sources.errors import SourceAmbiguous, SourceIncomplete, SourceInvalid

STEMS: Final[dict[str, tuple[str, ...]]] = {
    "diffusers": ("diffusion_pytorch_model",),
    "transformers": ("model",),
}
_ANY_STEM: Final = ("diffusion_pytorch_model", "model")

_SAFETENSORS: Final = ".safetensors"
_SHARD: Final = re.compile(
    r"(?P<stem>.+)-(?P<place>\d{5})-of-(?P<count>\d{5})(?:\.(?P<variant>[A-Za-z0-9_]+))?\.safetensors"
)
_INDEX: Final = re.compile(r".+\.index(\.[A-Za-z0-9_]+)?\.json")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NEVER_NEEDED: Final = (
    *_PICKLES,
    *(_SAFETENSORS, ".msgpack", ".onnx", ".onnx_data", ".pb", ".h5", ".gguf", ".npz", ".ot", ".tflite"),
    *(".incomplete", ".lock", ".part", ".tmp", ".py"),
)
_FETCH: Final = "fetch the rest of the checkpoint, or wait until it has arrived"
_MOST_SHARDS: Final = 100_000


class WeightSet(NamedTuple):
    """What to read: the index file, or the one file that holds everything."""

    index_file: str | None
    single_file: str | None


def choose_weights(names: Sequence[str], *, where: str, library: str, variant: str) -> WeightSet:
    """The set of weights among ``names``, the files of the component's folder ``where``.

    With a ``variant`` its set counts, or the plain one if there is none of that variant. Raises
    SourceAmbiguous naming the sets, SourceIncomplete naming what is missing, SourceInvalid if there are
    only pickles.
    """
    top = [name for name in names if "/" not in name]
    stems = STEMS.get(library, _ANY_STEM)
    if variant:
        found = _find(top, where, stems, variant)
        if found is not None:
            return found
    found = _find(top, where, stems, "")
    if found is not None:
        return found
    raise _nothing(top, where, stems)


def has_variant(names: Sequence[str], library: str, variant: str) -> bool:
    """Whether the folder holds anything of that variant."""
    stems = STEMS.get(library, _ANY_STEM)
    wanted = {_index_name(stem, variant) for stem in stems} | {_single_name(stem, variant) for stem in stems}
    return any(name in wanted for name in names)


def is_side_file(name: str) -> bool:
    """Whether a file belongs to a component whatever set of weights is chosen: settings, vocabularies and
    the like.

    Weights of any format, indexes, unfinished downloads and code are not.
    """
    return not name.endswith(_NEVER_NEEDED) and not _INDEX.fullmatch(name)


def _index_name(stem: str, variant: str) -> str:
    return f"{stem}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json"


def _single_name(stem: str, variant: str) -> str:
    return f"{stem}.{variant}.safetensors" if variant else f"{stem}.safetensors"


def _find(names: Sequence[str], where: str, stems: Sequence[str], variant: str) -> WeightSet | None:
    indexes = [name for name in (_index_name(stem, variant) for stem in stems) if name in names]
    if len(indexes) == 1:
        return WeightSet(indexes[0], None)
    singles = [name for name in (_single_name(stem, variant) for stem in stems) if name in names]
    sets = _shard_sets(names, variant)
    own_sets = [shards for (stem, _), shards in sorted(sets.items()) if stem in stems]
    candidates = [*indexes, *singles, *(shards[min(shards)] for shards in own_sets)]
    if len(candidates) > 1:
        raise SourceAmbiguous(
            f"{where} holds more than one set of weights and no index that says which one counts:"
            f" {', '.join(f'{where}/{name}' for name in candidates)}",
            hint="remove the files that do not belong to it",
            candidates=candidates,
        )
    if singles:
        return WeightSet(None, singles[0])
    for (stem, count), shards in sorted(sets.items()):
        _refuse_shards_alone(where, stem, count, shards, _index_name(stems[0], variant))
    return None


def _shard_sets(names: Sequence[str], variant: str) -> dict[tuple[str, int], dict[int, str]]:
    """Numbered shards by stem and count: place -> name."""
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        found = _SHARD.fullmatch(name)
        if found is None:
            continue
        stem, _, in_stem = found["stem"].partition(".") if variant else (found["stem"], "", "")
        if (found["variant"] or in_stem or "") == variant:
            sets.setdefault((stem, int(found["count"])), {})[int(found["place"])] = name
    return sets


def _refuse_shards_alone(where: str, stem: str, count: int, shards: dict[int, str], index: str) -> None:
    missing = [place for place in range(1, min(count, _MOST_SHARDS) + 1) if place not in shards]
    if missing:
        first = f"{stem}-{missing[0]:05d}-of-{count:05d}{_SAFETENSORS}"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SourceIncomplete(
            f"{where} is not whole: {where}/{first}{more} of {count} shards is missing, and so is the index",
            hint=_FETCH,
            file=f"{where}/{first}",
        )
    raise SourceIncomplete(
        f"{where} holds {count} shards such as {min(shards.values())}, but not the index {where}/{index}",
        hint=_FETCH,
        file=f"{where}/{index}",
    )


def _nothing(names: Sequence[str], where: str, stems: Sequence[str]) -> SourceIncomplete | SourceInvalid:
    expected = f"{where}/{_single_name(stems[0], '')}"
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return SourceInvalid(
            f"{where} has its weights as pickles only ({pickles[0]}), which are never opened",
            hint="convert the checkpoint to safetensors",
        )
    others = [name for name in names if name.endswith(_SAFETENSORS) or ".incomplete" in name]
    there = f"; there are {', '.join(others[:5])}" if others else ""
    return SourceIncomplete(
        f"{where} has no weights: neither {expected} nor an index{there}",
        hint="name the variant if these are its weights, or fetch the checkpoint again",
        file=expected,
    )
