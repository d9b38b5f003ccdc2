"""The kinds of failure the cache reports.

Every public function of this package fails with one of these and never with a bare ``OSError``. An error
carries its subject as attributes, says what and where in ``message`` and what to do in ``hint``. Whether to
retry or to stop is the caller's decision: nothing here retries, logs or exits.
"""

from __future__ import annotations

from typing import Any


class CacheError(Exception):
    """Base of all cache failures; further keyword arguments become attributes."""

    code: str = "CacheError"

    def __init__(self, message: str, *, hint: str = "", code: str | None = None, **subject: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code
        self.subject: dict[str, Any] = subject
        for name, value in subject.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return f"{self.message} — {self.hint}" if self.hint else self.message


class NotFound(CacheError):
    """The thing asked for is not there."""

    code = "NotFound"


class Exists(CacheError):
    """The name is taken already."""

    code = "Exists"


class Invalid(CacheError):
    """The caller's input cannot be right."""

    code = "Invalid"


class UnknownTensor(Invalid):
    """A tensor that the layout has no rule for."""

    code = "UnknownTensor"


class NotDivisible(Invalid):
    """A size or head count that cannot be divided among the ranks."""

    code = "NotDivisible"


class NewerFormat(Invalid):
    """Written by a later version of the format than this one reads."""

    code = "NewerFormat"


class BadHeader(Invalid):
    """A file whose safetensors header cannot be believed; ``reason`` is one of the words of ``header``."""

    code = "BadHeader"
    reason: str = ""


class Corrupt(CacheError):
    """Stored bytes are not what was published."""

    code = "Corrupt"


class Busy(CacheError):
    """Someone else holds a lock or a lease."""

    code = "Busy"


class NoSpace(CacheError):
    """Not enough room: ``InsufficientDisk`` before the first byte, ``DiskFull`` when a write failed."""

    code = "InsufficientDisk"


class Unavailable(CacheError):
    """The storage below does not answer as it should; trying again later may help."""

    code = "Unavailable"


class Denied(CacheError):
    """Modes, owner or mount options forbid it."""

    code = "Denied"


class Cancelled(CacheError):
    """The caller asked to stop; nothing was left behind."""

    code = "Cancelled"


class RootNotMounted(CacheError):
    """The folder is there but is not a cache root: its marker is missing."""

    code = "RootNotMounted"
