"""The keyed work queue: a key is in it once, is worked on by one worker, and comes back later after a failure.

Keys become due in the order in which they were added, so none waits for ever behind a busy one. Time is handed
in, so that tests need none; only `Queue.take` waits. Must not know what a key means.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dlo_operator.keys import Key

FIRST_SECONDS: Final = 0.5
LONGEST_SECONDS: Final = 300.0
_MOST_DOUBLINGS: Final = 20
#: A Node's key gives way to those of deployments that came up to so much later: what they need of the node meanwhile
#: is then written with it, and in a burst users' changes come first. It never waits for more than that.
BEHIND_SECONDS: Final = 3.0


class Taken(NamedTuple):
    """A key that is due, and how long it waited for a worker."""

    key: Key
    waited: float


def pause(
    failures: int, jitter: float, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS
) -> float:
    """Seconds before the next try after so many failures in a row; `jitter` in 0..1 takes up to half off."""
    whole = min(first * 2.0 ** min(max(failures, 1) - 1, _MOST_DOUBLINGS), longest)
    return whole * (1.0 - 0.5 * jitter)


@dataclass
class Schedule:
    """The queue's state, with the time as an argument of everything. Not safe for threads by itself."""

    _heaps: dict[str, list[tuple[float, int, Key]]] = field(default_factory=dict)
    _due: dict[Key, float] = field(default_factory=dict)
    _running: dict[Key, float | None] = field(default_factory=dict)
    _failures: dict[Key, int] = field(default_factory=dict)
    _added: int = 0

    def add(self, key: Key, at: float) -> None:
        """Wants `key` worked on at `at`; an earlier wish stays. While it runs, it is wanted once more after."""
        if key in self._running:
            wanted = self._running[key]
            self._running[key] = at if wanted is None else min(wanted, at)
            return
        if self._due.get(key, at + 1) <= at:
            return
        self._due[key] = at
        self._added += 1
        heapq.heappush(self._heaps.setdefault(key.kind, []), (at, self._added, key))

    def pop(self, now: float) -> Taken | None:
        """The key that has been due for longest, Nodes behind; it counts as running until `finish`."""
        due = [heap for heap in self._live() if heap[0][0] <= now]
        if not due:
            return None
        at, _, key = heapq.heappop(min(due, key=_turn))
        del self._due[key]
        self._running[key] = None
        return Taken(key, now - at)

    def finish(self, key: Key, now: float, *, again_in: float | None = None, failed: bool = False) -> None:
        """Ends the work on a key; it comes back after `again_in` seconds, or when it was added meanwhile."""
        wanted = self._running.pop(key)
        self._failures[key] = self._failures.get(key, 0) + 1 if failed else 0
        if not failed:
            del self._failures[key]
        # A failed key keeps its pause, whatever is told about it meanwhile: its own writes come back as news.
        times = [] if wanted is None or (failed and again_in is not None) else [wanted]
        if again_in is not None:
            times.append(now + again_in)
        if times:
            self.add(key, min(times))

    def failures(self, key: Key) -> int:
        """Failures of the key in a row."""
        return self._failures.get(key, 0)

    def next_due(self) -> float | None:
        """When the next key is due; None when there is none."""
        return min((heap[0][0] for heap in self._live()), default=None)

    def depth(self) -> dict[str, int]:
        """Keys that wait, by kind."""
        found: dict[str, int] = {}
        for key in self._due:
            found[key.kind] = found.get(key.kind, 0) + 1
        return found

    def _live(self) -> list[list[tuple[float, int, Key]]]:
        """The heaps that have a key, one that counts first in each."""
        for heap in self._heaps.values():
            while heap and self._due.get(heap[0][2]) != heap[0][0]:
                heapq.heappop(heap)
        return [heap for heap in self._heaps.values() if heap]


def _turn(heap: list[tuple[float, int, Key]]) -> tuple[float, int]:
    """When the first key of a heap has its turn."""
    at, number, key = heap[0]
    return at + (BEHIND_SECONDS if key.kind == "Node" else 0.0), number


class Queue:
    """A `Schedule` that workers wait on."""

    def __init__(self, monotonic: Callable[[], float], rng: random.Random) -> None:
        self._monotonic = monotonic
        self._rng = rng
        self._schedule = Schedule()
        self._changed = threading.Condition()
        self._closed = False

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Wants a key worked on after `delay` seconds."""
        with self._changed:
            self._schedule.add(key, self._monotonic() + delay)
            self._changed.notify()

    def take(self, timeout: float | None = None) -> Taken | None:
        """The next due key, waiting for it; None after `timeout` seconds, or when the queue is closed."""
        with self._changed:
            end = None if timeout is None else self._monotonic() + timeout
            while not self._closed:
                now = self._monotonic()
                taken = self._schedule.pop(now)
                if taken is not None:
                    return taken
                if end is not None and now >= end:
                    return None
                nearest = [t - now for t in (end, self._schedule.next_due()) if t is not None]
                self._changed.wait(min(nearest, default=None))
            return None

    def done(self, key: Key, again_in: float | None = None) -> None:
        """Ends a successful piece of work."""
        with self._changed:
            self._schedule.finish(key, self._monotonic(), again_in=again_in)
            self._changed.notify()

    def failed(self, key: Key, *, at_least: float | None = None, first: float = FIRST_SECONDS) -> float:
        """Ends a failed piece of work; the seconds after which the key comes back."""
        with self._changed:
            failures = self._schedule.failures(key) + 1
            seconds = max(pause(failures, self._rng.random(), first=first), at_least or 0.0)
            self._schedule.finish(key, self._monotonic(), again_in=seconds, failed=True)
            self._changed.notify()
            return seconds

    def depth(self) -> dict[str, int]:
        """Keys that wait, by kind."""
        with self._changed:
            return self._schedule.depth()

    def oldest(self) -> float:
        """Seconds for which the most overdue key has waited; 0 when none is due."""
        with self._changed:
            due = self._schedule.next_due()
            return 0.0 if due is None else max(0.0, self._monotonic() - due)

    def close(self) -> None:
        """Lets every waiting worker go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
