"""The one error family of the engine: a stable code, what happened, what to do, and the exit status it means.

Raised next to the cause, turned into an exit status, an HTTP answer or a termination message at the edges.
Must not print, log or import anything heavy: the front process (no torch) and the ranks share it.
"""

from __future__ import annotations

from typing import Any, ClassVar


class EngineError(Exception):
    """Base of every failure the engine reports. `code` is a stable CamelCase word, `hint` says what to do.

    Further keyword arguments become attributes (the subject: rank, entry, path, ...).
    """

    code: str = "EngineFailed"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", code: str | None = None, **subject: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code
        self.subject = subject
        for name, value in subject.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        """Message and hint in one line, without the code."""
        return f"{self.message} — {self.hint}" if self.hint else self.message

    @property
    def line(self) -> str:
        """`<code>: <what> — <what to do>` on one line, as printed and written to the termination message."""
        return " ".join(f"{self.code}: {self}".split())


class InvalidConfiguration(EngineError):
    """The command line asks for something that can never work."""

    code = "InvalidConfiguration"
    exit_status = 2


class FallbackRefused(EngineError):
    """The weights got a backing that is a fallback under the policy Fail. The code is the fallback's."""

    code = "FallbackRefused"
    exit_status = 3


class BadEntry(EngineError):
    """A cache entry is missing, damaged or not what the hand-over file names."""

    code = "BadEntry"
    exit_status = 4


class PortInUse(EngineError):
    """The address to serve on cannot be bound."""

    code = "PortInUse"


class RankDied(EngineError):
    """A rank process ended by itself or by a signal. Subject: rank, signal, status."""

    code = "RankDied"


class Unsupported(EngineError):
    """The model, family or option is known but not served by this engine."""

    code = "Unsupported"


class Cancelled(EngineError):
    """The work was given up on request (client gone, shutdown)."""

    code = "Cancelled"
