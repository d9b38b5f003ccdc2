"""How long work reports itself and how it is stopped: two plain callables.

The library says what is done of how much; whoever calls decides to draw it, log it or write it to a file.
Must not print, log or keep state between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dlo_cache.errors import Cancelled

Phase = Literal["hash", "read", "build", "verify", "publish"]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """One step of a phase: ``done`` of ``total`` bytes (for "publish": entries) of ``subject``, a name for
    humans."""

    phase: Phase
    subject: str
    done: int
    total: int


Progress = Callable[[ProgressEvent], None]
Cancel = Callable[[], bool]


def report(progress: Progress | None, phase: Phase, subject: str, done: int, total: int) -> None:
    """Calls ``progress`` with one event, if there is anyone to tell."""
    if progress is not None:
        progress(ProgressEvent(phase, subject, done, total))


def check_cancel(cancel: Cancel | None, subject: str) -> None:
    """Raises Cancelled, naming ``subject``, once ``cancel()`` answers true."""
    if cancel is not None and cancel():
        raise Cancelled(f"{subject} was cancelled")
