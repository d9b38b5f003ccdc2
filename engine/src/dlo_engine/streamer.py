"""The state machine of a forward pass over streamed blocks: which block sits in which slot, and what is next.

Loads follow a predicted order: the layout's at first, then the order of the last whole step. A block may be
skipped, repeated or come in another place; what was not predicted is loaded on demand. Every choice depends
only on the order of calls, never on time, so ranks that run the same forwards choose alike (AllGather needs
that). Must not touch streams, parameters or modules. Everything runs in the computing thread.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from dlo_engine.slots import Slot, SlotPool
from dlo_engine.specs import BlockImage
from dlo_engine.transfer import CopyEngine, Load


@dataclass(eq=False)
class _Entry:
    """What one slot holds. `users` counts forwards that are running on it (a block may call itself)."""

    slot: Slot
    load: Load | None = None
    users: int = 0

    @property
    def block(self) -> str | None:
        return self.load.image.name if self.load else None


class Streamer:
    """Keeps the next blocks of the predicted order in the slots. `images` are the streamed blocks by name."""

    def __init__(
        self, images: Mapping[str, BlockImage], order: Sequence[str], pool: SlotPool, engine: CopyEngine
    ) -> None:
        self._images = dict(images)
        self._predict([name for name in order if name in self._images])
        self._engine = engine
        self._pool = pool
        self._table = [_Entry(slot) for slot in pool.slots]
        self._position = 0
        self._seen: list[str] = []

    @property
    def order(self) -> tuple[str, ...]:
        """The order that is predicted for the coming step."""
        return tuple(self._order)

    def start(self) -> None:
        """Begin to fill the slots, before the first step asks."""
        self._prefetch()

    def begin_step(self) -> None:
        """A forward of the whole model begins: the last one's order becomes the prediction."""
        if self._seen:
            if self._seen != self._order:
                self._predict(self._seen)
            self._seen = []
        self._position = 0
        self._prefetch()

    def acquire(self, name: str) -> int:
        """Make `name` usable by the kernels that follow and return its slot. Pair with `release`.

        Loads on demand where the prediction failed. Raises TransferFailed when its copy failed.
        """
        self._seen.append(name)
        self._position = self._after(name)
        entry = self._holding(name)
        if entry is None:
            entry = self._victim()
            if entry is None:
                raise RuntimeError(f"block {name} needs a slot while all {len(self._table)} are in use")
            self._load(name, entry)
        assert entry.load is not None  # noqa: S101 - _load and _holding see to it
        entry.users += 1
        self._prefetch()
        self._engine.wait(entry.load)
        return entry.slot.index

    def release(self, name: str) -> None:
        """The kernels of `name` are all started: its slot may take the next block behind them."""
        entry = self._holding(name)
        if entry is None or entry.load is None or entry.users == 0:
            raise RuntimeError(f"block {name} is released without being in use")
        entry.users -= 1
        if entry.users == 0:
            self._engine.release(entry.load)
            self._prefetch()

    def reset(self) -> None:
        """After any error: finish what is under way and forget what the slots hold."""
        self._engine.drain()
        for entry in self._table:
            entry.load, entry.users = None, 0
        self._seen = []
        self._position = 0

    # ---- choices -----------------------------------------------------------------------------------------

    def _predict(self, order: list[str]) -> None:
        """Make `order` the prediction, with the places where each block stands in it."""
        self._order = order
        self._places: dict[str, list[int]] = {}
        for index, name in enumerate(order):
            self._places.setdefault(name, []).append(index)

    def _next(self, name: str) -> int | None:
        """Where `name` stands next in the predicted order: ahead, else from its start; None if nowhere."""
        places = self._places.get(name)
        if places is None:
            return None
        return places[bisect.bisect_left(places, self._position) % len(places)]

    def _after(self, name: str) -> int:
        """The position behind `name`; where it is now if the block was not predicted."""
        index = self._next(name)
        return self._position if index is None else index + 1

    def _upcoming(self) -> Iterator[str]:
        """Distinct blocks in the order they are expected, on into the next step. Lazy: few are asked for."""
        given: set[str] = set()
        for index in chain(range(self._position, len(self._order)), range(self._position)):
            name = self._order[index]
            if name not in given:
                given.add(name)
                yield name

    def _prefetch(self) -> None:
        """Ask for the next blocks, as many as there are slots that nothing runs on."""
        room = sum(entry.users == 0 for entry in self._table)
        busy = {entry.block for entry in self._table if entry.users}
        wanted: list[str] = []
        for name in self._upcoming():
            if len(wanted) >= room:
                break
            if name not in busy:
                wanted.append(name)
        for name in wanted:
            if self._holding(name) is None:
                entry = self._victim()
                if entry is None:
                    return
                self._load(name, entry)

    def _holding(self, name: str) -> _Entry | None:
        return next((entry for entry in self._table if entry.block == name), None)

    def _victim(self) -> _Entry | None:
        """The slot to refill: an empty one, else the one whose block is needed last. None if all are in use."""
        free = [entry for entry in self._table if entry.users == 0]
        return max(free, key=lambda entry: self._distance(entry.block), default=None)

    def _distance(self, name: str | None) -> int:
        """How many places ahead a block is needed; the length of the order if it is not."""
        index = None if name is None else self._next(name)
        length = len(self._order)
        return length if index is None else (index - self._position) % length

    def _load(self, name: str, entry: _Entry) -> None:
        entry.load = self._engine.submit(self._images[name], entry.slot)
