"""Runs actions: three lanes, one action at a time in each, and tells when one has ended.

``room`` frees room, ``build`` resolves and builds, ``care`` verifies and warms beside it. There is no queue:
whoever owns the executor looks again and plans anew when something ends. Must not decide what to run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from dlo_cache.progress import Cancel

from dlo_agent.actions import Action, Lane
from dlo_agent.work import Result

LANES: Final[tuple[Lane, ...]] = ("room", "build", "care")

Run = Callable[[Action, Cancel], Result]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an action ended: with a result, or with an error."""

    action: Action
    result: Result
    error: Exception | None
    seconds: float


@dataclass(slots=True)
class _Running:
    action: Action
    cancel: threading.Event = field(default_factory=threading.Event)


class Executor:
    """The lanes. ``on_end`` is called from a lane's thread whenever an action has ended."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        self._lanes: dict[Lane, _Running] = {}
        self._ended: list[Outcome] = []
        self._pools = {lane: ThreadPoolExecutor(1, f"dlo-{lane}") for lane in LANES}
        self._closed = False

    def running(self) -> tuple[Action, ...]:
        """What runs now, and what has ended but was not yet taken."""
        with self._lock:
            return tuple(each.action for each in self._lanes.values())

    def start(self, action: Action, run: Run) -> bool:
        """Starts the action if its lane is idle; returns whether it did."""
        with self._lock:
            if self._closed or action.lane in self._lanes:
                return False
            running = _Running(action)
            self._lanes[action.lane] = running
        self._pools[action.lane].submit(self._do, running, run)
        return True

    def cancel(self, wanted: Callable[[Action], bool]) -> None:
        """Asks every running action that is not ``wanted`` to stop."""
        with self._lock:
            for running in self._lanes.values():
                if not wanted(running.action):
                    running.cancel.set()

    def take(self) -> list[Outcome]:
        """The actions that ended since the last call, in that order."""
        with self._lock:
            ended, self._ended = self._ended, []
            for outcome in ended:
                self._lanes.pop(outcome.action.lane, None)
            return ended

    def close(self) -> None:
        """Stops everything and waits for it; nothing starts any more."""
        with self._lock:
            self._closed = True
        self.cancel(lambda _: False)
        for pool in self._pools.values():
            pool.shutdown(wait=True)

    def _do(self, running: _Running, run: Run) -> None:
        began = time.monotonic()
        result: Result = None
        error: Exception | None = None
        try:
            result = run(running.action, running.cancel.is_set)
        except Exception as raised:
            error = raised
        with self._lock:
            self._ended.append(Outcome(running.action, result, error, time.monotonic() - began))
        self._on_end()
