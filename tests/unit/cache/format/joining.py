"""Cutting as the builder does and joining again as tensor parallelism means it, in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from dlo_cache.layout import Cut, Layout
from numpy.typing import NDArray

Array = NDArray[Any]


def apply(cut: Cut, whole: Array) -> Array:
    """One rank's part."""
    if cut.dim is None:
        return whole
    parts = [np.take(whole, range(start, stop), axis=cut.dim) for start, stop in cut.ranges]
    return np.concatenate(parts, axis=cut.dim)


def ranks(
    layout: Layout, name: str, whole: Array, size: int, config: Mapping[str, Any]
) -> list[tuple[Cut, Array]]:
    """Cut and part of every rank."""
    cuts = [layout.cut(name, whole.shape, size, rank, config) for rank in range(size)]
    return [(cut, apply(cut, whole)) for cut in cuts]


def join(parts: Sequence[tuple[Cut, Array]], shape: tuple[int, ...]) -> Array:
    """The whole tensor from every rank's part; each element must come from exactly one rank."""
    if parts[0][0].dim is None:
        return parts[0][1]
    dim = parts[0][0].dim
    whole = np.zeros(shape, parts[0][1].dtype)
    written = np.zeros(shape[dim], int)
    for cut, part in parts:
        at = 0
        for start, stop in cut.ranges:
            target = [slice(None)] * len(shape)
            target[dim] = slice(start, stop)
            whole[tuple(target)] = np.take(part, range(at, at + stop - start), axis=dim)
            written[start:stop] += 1
            at += stop - start
    assert (written == 1).all()
    return whole
