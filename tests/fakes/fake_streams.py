"""Streams and events without a device: work is put off, and every order that the device does not promise is
tried.

Each stream is a queue of deferred work. `FakeStreams.run` executes all queues in an order drawn from a seed
that respects only what streams and events promise, so a missing wait shows as wrong bytes for some seed.
Copies read and write real memory when they are executed, not when they are put on a stream.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class FakeEvent:
    """Comes when its stream has executed everything before it."""

    name: str
    come: bool = False


@dataclass(eq=False)
class FakeStream:
    """Deferred work in order: a callable to run, or an event to wait for."""

    name: str
    queue: deque[Callable[[], None] | FakeEvent] = field(default_factory=deque)


class FakeStreams:
    """`Streams` over deferred work, with a log of every call in order: (call, stream or event, thread)."""

    def __init__(self, seed: int = 0) -> None:
        self.copy: Any = FakeStream("copy")
        self.gather: Any = FakeStream("gather")
        self._compute = FakeStream("compute")
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self.log: list[tuple[str, str, str]] = []

    def _note(self, call: str, subject: str) -> None:
        self.log.append((call, subject, threading.current_thread().name))

    def enter_thread(self) -> None:
        """Noted."""
        self._note("enter", "")

    def compute(self) -> Any:
        """The one compute stream; who asked is noted."""
        self._note("compute", "")
        return self._compute

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Noted."""
        self._note("on", stream.name)
        yield

    def record(self, stream: Any) -> Any:
        """An event behind the work so far."""
        with self._lock:
            event = FakeEvent(f"event-{len(self.log)}@{stream.name}")
            self._note("record", stream.name)
            stream.queue.append(lambda: setattr(event, "come", True))
            return event

    def wait(self, stream: Any, event: Any) -> None:
        """The stream stops there until the event has come."""
        with self._lock:
            self._note("wait", stream.name)
            stream.queue.append(event)

    def synchronize(self, event: Any) -> None:
        """Execute until the event has come."""
        with self._lock:
            self._note("synchronize", event.name)
            self._execute(lambda: event.come)

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Reads and writes when executed."""
        with self._lock:
            self._note("copy", stream.name)

            def copy() -> None:
                destination.copy_(source)

            stream.queue.append(copy)

    def launch(self, work: Callable[[], None]) -> None:
        """A kernel on the compute stream."""
        with self._lock:
            self._compute.queue.append(work)

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Both must have come; no time passes."""
        assert begin.come
        assert end.come
        return 0.0

    def drain(self) -> None:
        """Execute everything."""
        with self._lock:
            self._execute(lambda: not any(stream.queue for stream in self._all()))

    def _all(self) -> tuple[FakeStream, ...]:
        return (self.copy, self.gather, self._compute)

    def _execute(self, done: Callable[[], bool]) -> None:
        while not done():
            able = [
                stream
                for stream in self._all()
                if stream.queue and (not isinstance(stream.queue[0], FakeEvent) or stream.queue[0].come)
            ]
            assert able, "deadlock: every stream waits for an event that never comes"
            head = self._random.choice(able).queue.popleft()
            if not isinstance(head, FakeEvent):
                head()
