"""Which bytes of a source tensor are read, and which of them each coordinate gets. Pure arithmetic on shapes.

A tensor is read in pieces of whole rows, so that memory stays bounded whatever its size. A cut along the
first dimension then takes runs of rows, a cut along a later one takes the same columns of every row. Must not
read, write or hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlo_cache.errors import Invalid
from dlo_cache.layout import Cut

Array = NDArray[Any]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows ``start`` to ``stop`` of a tensor: ``nbytes`` bytes from ``offset``, both counted from the
    tensor's begin."""

    start: int
    stop: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How one tensor of ``shape`` is cut for several coordinates, in the order of ``cuts``.

    Seen as ``rows`` × ``columns`` × ``inner`` elements: along the first dimension ``columns`` is 1 and ranges
    are of rows, along a later one ranges are of columns.
    """

    name: str
    cuts: tuple[Cut, ...]
    rows: int
    columns: int
    inner: int
    by_rows: bool

    @classmethod
    def plan(cls, name: str, shape: Sequence[int], cuts: Sequence[Cut]) -> TensorCut:
        """The plan for one tensor; raises Invalid if its cuts disagree on the dimension or run backwards."""
        dims = {cut.dim for cut in cuts if cut.dim is not None}
        if len(dims) > 1:
            raise Invalid(f"tensor {name} would be cut along several dimensions: {sorted(dims)}")
        for cut in cuts:
            edges = [edge for pair in cut.ranges for edge in pair]
            if cut.dim is not None and edges != sorted(edges):
                raise Invalid(f"tensor {name} would be cut into ranges out of order: {cut.ranges}")
        dim = dims.pop() if dims else 0
        if dim == 0:
            rows = shape[0] if shape else 1
            return cls(name, tuple(cuts), rows, 1, prod(shape[1:]), True)
        return cls(name, tuple(cuts), prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]), False)

    def pieces(self, itemsize: int, piece_bytes: int) -> Iterator[Rows]:
        """The rows that any coordinate needs, in order, in pieces of about ``piece_bytes`` (at least one row
        each)."""
        row_bytes = self.columns * self.inner * itemsize
        if row_bytes == 0:
            return
        step = max(1, piece_bytes // row_bytes)
        for begin, end in self._needed_rows():
            for start in range(begin, end, step):
                stop = min(start + step, end)
                yield Rows(start, stop, start * row_bytes, (stop - start) * row_bytes)

    def take(self, data: Array, rows: Rows, index: int) -> Iterator[Array]:
        """What coordinate ``index`` gets of ``data``, the flat elements of ``rows``: contiguous arrays, in
        order."""
        cut = self.cuts[index]
        count = rows.stop - rows.start
        if cut.dim is None:
            yield data
        elif self.by_rows:
            table = data.reshape(count, self.inner)
            for begin, end in cut.ranges:
                first, last = max(begin, rows.start), min(end, rows.stop)
                if first < last:
                    yield table[first - rows.start : last - rows.start].reshape(-1)
        else:
            cube = data.reshape(count, self.columns, self.inner)
            parts = [cube[:, begin:end] for begin, end in cut.ranges]
            yield np.concatenate(parts, axis=1).reshape(-1)

    def _needed_rows(self) -> list[Range]:
        if not self.by_rows or any(cut.dim is None for cut in self.cuts):
            return [(0, self.rows)]
        return merged(pair for cut in self.cuts for pair in cut.ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The union of half-open ranges as ascending, disjoint ones; empty ranges vanish."""
    union: list[Range] = []
    for begin, end in sorted(pair for pair in ranges if pair[0] < pair[1]):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union
