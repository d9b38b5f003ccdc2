"""The copy engine: one thread that brings block images into slots, in the order asked for, ahead of compute.

The same code serves every device; `streams.py` says what a stream is. Races it prevents, each by one wait:
a slot is refilled only after the event that the compute stream recorded behind the last kernel that read it;
a kernel runs only after the event behind the copy (and the gather) that filled its slot. The compute stream
is asked for in the computing thread, never inside the copy thread. Must not choose slots or order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dlo_engine.errors import EngineError
from dlo_engine.host_source import HostSource
from dlo_engine.slots import Slot
from dlo_engine.specs import BlockImage
from dlo_engine.streams import Streams

Recorder = Callable[[str, str, int], None]
"""`recorder(event, block, slot)`; events: submit, copy-begin, copy-end, ready, free. For tests and traces."""


class TransferFailed(EngineError):
    """A block could not be brought to the device."""

    code = "TransferFailed"


class Gather(Protocol):
    """How the ranks of a weight group share the copying of one block (`allgather.WeightGroup`)."""

    def byte_range(self, nbytes: int) -> tuple[int, int]:
        """The bytes of an image of `nbytes` that this rank copies; may be empty."""

    def rebuild(self, buffer: torch.Tensor, nbytes: int) -> None:
        """Make the whole image in `buffer` out of every rank's bytes, on the current stream."""


@dataclass(eq=False)
class Load:
    """One copy of one block into one slot, from `submit` until nothing refers to it."""

    image: BlockImage
    slot: Slot
    after: tuple[Any, ...]
    """Events that must have come before the first byte of the slot may change."""
    enqueued: threading.Event = field(default_factory=threading.Event)
    ready: Any = None
    error: BaseException | None = None


@dataclass
class Timings:
    """Device time and bytes since the last `take_timings`."""

    copy_ms: float = 0.0
    wait_ms: float = 0.0
    copied_bytes: int = 0


class CopyEngine:
    """Copies blocks into slots. All methods but the thread's own belong to the computing thread."""

    def __init__(
        self,
        streams: Streams,
        source: HostSource,
        *,
        gather: Gather | None = None,
        recorder: Recorder | None = None,
        poison: bool = False,
    ) -> None:
        """`poison` overwrites a slot before it is refilled, so that a read too early shows (tests)."""
        self.streams = streams
        self.source = source
        self._gather = gather
        self._record = recorder or (lambda _event, _block, _slot: None)
        self._poison = poison
        self._free: dict[int, Any] = {}
        self._last: dict[int, Load] = {}
        self._queue: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._copies: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._copied_bytes = 0
        self._thread = threading.Thread(target=self._run, name="dlo-copy", daemon=True)
        self._closed = False
        self._thread.start()

    # ---- computing thread --------------------------------------------------------------------------------

    def submit(self, image: BlockImage, slot: Slot) -> Load:
        """Ask for `image` in `slot`, behind everything asked for before. Returns at once."""
        if self._poison:
            slot.buffer.fill_(0xFF)
            self._free[slot.index] = self.streams.record(self.streams.compute())
        # The event behind the last kernel that read the slot. A load that nobody came to read is no reader,
        # but its gather may still write the slot from another stream: the copy thread waits for that too.
        free = self._free.pop(slot.index, None)
        load = Load(image, slot, (free,) if free is not None else ())
        self._record("submit", image.name, slot.index)
        self._queue.put(load)
        return load

    def wait(self, load: Load) -> None:
        """Hold back the compute stream until the load is in its slot. Raises TransferFailed."""
        compute = self.streams.compute()
        before = self.streams.record(compute)
        load.enqueued.wait()
        if load.error is not None:
            raise TransferFailed(
                f"Copying block {load.image.name} failed: {load.error}", hint="see the cause above"
            ) from load.error
        # A kernel must not read the slot before the copy stream has filled it.
        self.streams.wait(compute, load.ready)
        self._waits.append((before, self.streams.record(compute)))
        self._record("ready", load.image.name, load.slot.index)

    def release(self, load: Load) -> None:
        """The kernels that read the slot are all on the compute stream: mark the place behind them."""
        self._record("free", load.image.name, load.slot.index)
        self._free[load.slot.index] = self.streams.record(self.streams.compute())

    def fill(self, image: BlockImage, buffer: torch.Tensor) -> None:
        """Bring a whole image into a buffer of its own (residents), and wait until it is there."""
        done = Load(image, Slot(-1, buffer), ())
        self._queue.put(done)
        done.enqueued.wait()
        if done.error is not None:
            raise TransferFailed(
                f"Loading {image.name or 'the resident weights'} failed: {done.error}"
            ) from (done.error)
        self.streams.synchronize(done.ready)

    def drain(self) -> None:
        """Block until every load asked for is over, on the host and on the device. Errors stay with loads."""
        mark = threading.Event()
        self._queue.put(Load(_NOTHING, Slot(-1, torch.empty(0, dtype=torch.uint8)), (), enqueued=mark))
        mark.wait()
        self.streams.drain()

    def take_timings(self) -> Timings:
        """What happened since the last call. Waits for the copies that are still under way."""
        self.drain()
        copies, self._copies = self._copies, []
        waits, self._waits = self._waits, []
        copied, self._copied_bytes = self._copied_bytes, 0
        elapsed = self.streams.elapsed_ms
        return Timings(
            sum(elapsed(begin, end) for begin, end in copies),
            sum(elapsed(begin, end) for begin, end in waits),
            copied,
        )

    def abandon(self) -> None:
        """Let go without waiting: a gather may wait for a rank that is gone. The process must end soon."""
        self._closed = True
        self._queue.put(None)

    def close(self) -> None:
        """Finish what is queued, stop the thread, give up the host side. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.drain()
        self._queue.put(None)
        self._thread.join()
        self.source.close()

    # ---- copy thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        entered = False
        while (load := self._queue.get()) is not None:
            try:
                if not entered:
                    # Inside the try: a device that cannot be used must fail the load, not leave it waiting.
                    self.streams.enter_thread()
                    entered = True
                if load.image is not _NOTHING:
                    self._copy(load)
            except BaseException as error:
                load.error = error
            finally:
                load.enqueued.set()

    def _copy(self, load: Load) -> None:
        streams, slot, image = self.streams, load.slot, load.image
        resident = slot.index < 0
        for event in load.after:
            # The slot's last reader must be through before the first byte changes.
            streams.wait(streams.copy, event)
        previous = None if resident else self._last.get(slot.index)
        if previous is not None and previous.ready is not None:
            streams.wait(streams.copy, previous.ready)
        self._record("copy-begin", image.name, slot.index)
        begun = streams.record(streams.copy)
        start, stop = 0, image.nbytes
        if self._gather is not None and not resident:
            start, stop = self._gather.byte_range(image.nbytes)
        self.source.copy(image, start, stop, slot.buffer[start:stop], streams.copy)
        load.ready = streams.record(streams.copy)
        if not resident:
            self._copies.append((begun, load.ready))
            self._copied_bytes += stop - start
            self._last[slot.index] = load
        if self._gather is not None and not resident:
            # The gather reads this rank's bytes: they must have arrived.
            streams.wait(streams.gather, load.ready)
            with streams.on(streams.gather):
                self._gather.rebuild(slot.buffer, image.nbytes)
            load.ready = streams.record(streams.gather)
        self._record("copy-end", image.name, slot.index)


_NOTHING = BlockImage("", (), (), 0)
