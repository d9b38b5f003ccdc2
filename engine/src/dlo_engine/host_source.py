"""Where a block's bytes come from on the host, and how they get onto a device stream.

One class per way, all called in the copy thread only. A way that needs no host copy at all (an entry
registered with CUDA) is one more class here. Must not choose slots or order; must not keep a tensor over a
mapping alive.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from dlo_engine.config import Backing
from dlo_engine.specs import BlockImage
from dlo_engine.streams import Streams

STAGING_PIECE = 32 << 20
STAGING_COUNT = 2


class HostSource(Protocol):
    """A way from the host copy of the weights to device memory. `kind` is the backing it amounts to."""

    kind: Backing

    def copy(self, image: BlockImage, start: int, stop: int, destination: torch.Tensor, stream: Any) -> None:
        """Bring bytes [start, stop) of the image to `destination` (uint8, as long), in order on `stream`.

        May return before the device has run the copy; the image must stay mapped until it has.
        """

    def close(self) -> None:
        """Give up what the way holds. Copies are over."""


class MappedSource:
    """Straight from the mapping into slots in host memory (device cpu)."""

    kind: Backing = "MappedCache"

    def copy(
        self,
        image: BlockImage,
        start: int,
        stop: int,
        destination: torch.Tensor,
        stream: Any,  # noqa: ARG002
    ) -> None:
        """A real copy: parameters never lie in the mapping."""
        if stop > start:
            image.read(start, stop, destination.numpy())

    def close(self) -> None:
        """Holds nothing."""


def pinned_buffer(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, so that a copy out of it runs asynchronously."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class StagedSource:
    """From the mapping into pinned pieces by host threads, from there to the device on the copy stream.

    Two pieces of 32 MiB take turns: one is filled while the other is on the bus.
    """

    kind: Backing = "StagedCache"

    def __init__(
        self,
        streams: Streams,
        *,
        threads: int = 4,
        piece_bytes: int = STAGING_PIECE,
        count: int = STAGING_COUNT,
        allocate: Callable[[int], torch.Tensor] = pinned_buffer,
    ) -> None:
        self._streams = streams
        self._piece = piece_bytes
        self._staging = [allocate(piece_bytes) for _ in range(count)]
        self._sent: list[Any] = [None] * count
        self._turn = 0
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "dlo-staging") if threads > 1 else None

    def copy(self, image: BlockImage, start: int, stop: int, destination: torch.Tensor, stream: Any) -> None:
        """Returns when the last piece is on the stream."""
        for begin in range(start, stop, self._piece):
            end = min(begin + self._piece, stop)
            turn, self._turn = self._turn, (self._turn + 1) % len(self._staging)
            if self._sent[turn] is not None:
                # Without this wait the piece would be overwritten while the bus still reads it.
                self._streams.synchronize(self._sent[turn])
            staged = self._staging[turn][: end - begin]
            self._fill(staged.numpy(), image, begin, end)
            self._streams.copy_async(destination[begin - start : end - start], staged, stream)
            self._sent[turn] = self._streams.record(stream)

    def _fill(self, target: np.ndarray[Any, Any], image: BlockImage, start: int, stop: int) -> None:
        if self._pool is None:
            image.read(start, stop, target)
            return
        share = -(-(stop - start) // self._threads)
        shares = [(low, min(low + share, stop)) for low in range(start, stop, share)]
        done = [
            self._pool.submit(image.read, low, high, target[low - start : high - start])
            for low, high in shares
        ]
        for part in done:
            part.result()

    def close(self) -> None:
        """Stop the threads and free the pinned memory."""
        if self._pool is not None:
            self._pool.shutdown()
        self._staging.clear()
