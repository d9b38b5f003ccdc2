"""The state machine of a forward pass over streamed blocks: which block sits in which slot, and what is next.

Loads follow a predicted order: the layout's at first, then the order of the last whole step. A block may be
skipped, repeated or come in another place; what was not predicted is loaded on demand. Every choice depends
only on the order of calls, never on time, so ranks that run the same forwards choose alike (AllGather needs
that). Must not touch streams, parameters or modules. Everything runs in the computing thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
        self._order = [name for name in order if name in self._images]
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
            self._order, self._seen = self._seen, []
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
            entry = self._victim(keep=())
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

    def _after(self, name: str) -> int:
        """Position in the predicted order behind `name`: the next one ahead, else the first before."""
        split = self._position
        order = [*enumerate(self._order)]
        for index, block in (*order[split:], *order[:split]):
            if block == name:
                return index + 1
        return split

    def _upcoming(self) -> Iterator[str]:
        """Distinct blocks in the order they are expected, on into the next step."""
        return iter(dict.fromkeys([*self._order[self._position :], *self._order[: self._position]]))

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
                entry = self._victim(keep=wanted)
                if entry is None:
                    return
                self._load(name, entry)

    def _holding(self, name: str) -> _Entry | None:
        return next((entry for entry in self._table if entry.block == name), None)

    def _victim(self, keep: Sequence[str]) -> _Entry | None:
        """The slot to refill: an empty one, else the one whose block is needed last and is not to be kept."""
        rank = {name: index for index, name in enumerate(self._upcoming())}
        free = [entry for entry in self._table if entry.users == 0 and entry.block not in keep]
        return max(free, key=lambda entry: rank.get(entry.block or "", len(rank)), default=None)

    def _load(self, name: str, entry: _Entry) -> None:
        entry.load = self._engine.submit(self._images[name], entry.slot)
