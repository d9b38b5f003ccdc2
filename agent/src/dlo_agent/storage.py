"""Holds the cache root: finds it, proves it, takes the agent's lock on it, notices when it goes.

A root that is not there, or not as it must be, is a state to report and never a reason to end: it is tried
again. A second agent on the same root is a reason to end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import structlog
from dlo_cache.errors import Busy, CacheError
from dlo_cache.locks import key_lock
from dlo_cache.recovery import Recovered, recover
from dlo_cache.root import MARKER, Root, open_root

from dlo_agent.errors import AgentError
from dlo_agent.reasons import ROOT_NOT_MOUNTED, reason_of
from dlo_agent.world import StorageProblem

AGENT_LOCK: Final = "agent"
PROVE_AGAIN_SECONDS: Final = 300.0

_log = structlog.get_logger(__name__)


class SecondAgent(AgentError):
    """Another agent works on this root."""

    code = "SecondAgent"


class Storage:
    """The root at one path; ``root`` is None while it cannot be used."""

    def __init__(self, path: Path, *, lock_timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._lock_timeout_seconds = lock_timeout_seconds
        self._held = ExitStack()
        self._mark: tuple[int, int] | None = None
        self._proved = 0.0
        self.root: Root | None = None
        self.recovered: Recovered | None = None

    def check(self) -> StorageProblem | None:
        """Why the root cannot be used now, or None. Opens it where it can be; raises SecondAgent."""
        try:
            if self.root is not None:
                self._check_open(self.root)
            else:
                self._open()
        except CacheError as error:
            self.close()
            return StorageProblem(
                _reason(error), f"{error.message}{f' — {error.hint}' if error.hint else ''}"
            )
        return None

    def close(self) -> None:
        """Lets go of the root and its lock."""
        self._held.close()
        self.root = None

    def _open(self) -> None:
        root = open_root(self._path)
        with ExitStack() as held:
            locks_fd = held.enter_context(root.opened("locks"))
            try:
                held.enter_context(
                    key_lock(
                        locks_fd,
                        AGENT_LOCK,
                        timeout_seconds=self._lock_timeout_seconds,
                        subject=f"the agent's lock of {root.path}",
                    )
                )
            except Busy as error:
                raise SecondAgent(
                    error.message, hint="one agent owns a root: stop the other, or name another root"
                ) from error
            self.recovered = recover(root)
            self._held = held.pop_all()
        self.root, self._mark, self._proved = root, _marker(root.path), self._clock()

    def _check_open(self, root: Root) -> None:
        """Cheap at every turn; all of ``open_root`` when the marker is another one, or now and then."""
        mark = _marker(root.path)
        again = self._clock() - self._proved >= PROVE_AGAIN_SECONDS
        if mark is not None and mark == self._mark and not again:
            return
        found = open_root(self._path)
        if found.id != root.id or mark != self._mark:
            _log.warning("Found another cache root in the place of the one in use")
            self.close()
            self._open()
        self._proved = self._clock()


def _marker(path: Path) -> tuple[int, int] | None:
    try:
        state = os.stat(path / MARKER, follow_symlinks=False)
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _reason(error: CacheError) -> str:
    """A reason of ``StorageHealthy``; what has none of its own keeps the error's word."""
    known = reason_of(error.code)
    if error.code in ("Invalid", "UnsafePath", "NotFound"):
        return ROOT_NOT_MOUNTED if error.code == "NotFound" else "RootBroken"
    return error.code if known == "BuildFailed" else known
