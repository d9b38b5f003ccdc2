"""What a build reads of which source file, in its order: how much of a remote checkpoint lies on the disk at
once. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dlo_cache.build import PIECE_BYTES
from dlo_cache.dtypes import itemsize
from dlo_cache.image_plan import ImagePlan
from dlo_cache.source import SourceFile

_AHEAD: Final = 3  # pieces that the builder holds or has asked for


@dataclass(frozen=True)
class Reads:
    """``nbytes`` read of each file by name; ``files`` that are read at all; ``peak`` bytes of them at once if
    each goes after its last piece."""

    nbytes: dict[str, int]
    files: tuple[SourceFile, ...]
    peak: int


def reads_of(passes: Iterable[Sequence[ImagePlan]]) -> Reads:
    """The reads of the passes of one build."""
    order: list[str] = []
    files: dict[str, SourceFile] = {}
    nbytes: Counter[str] = Counter()
    for plans in passes:
        for plan in plans:
            for tensor in plan.tensors:
                source = tensor.source
                for rows in tensor.cut.pieces(itemsize(source.dtype), PIECE_BYTES):
                    files[source.file.name] = source.file
                    nbytes[source.file.name] += rows.nbytes
                    order.append(source.file.name)
    return Reads(dict(nbytes), tuple(files.values()), _peak(order, files))


def _peak(order: Sequence[str], files: dict[str, SourceFile]) -> int:
    last = {name: at for at, name in enumerate(order)}
    held: set[str] = set()
    going: deque[tuple[int, str]] = deque()
    peak = 0
    for at, name in enumerate(order):
        while going and going[0][0] + _AHEAD <= at:
            held.discard(going.popleft()[1])
        held.add(name)
        peak = max(peak, sum(files[each].size for each in held))
        if last[name] == at:
            going.append((at, name))
    return peak
