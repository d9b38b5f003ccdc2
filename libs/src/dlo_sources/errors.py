"""The kinds of failure met while finding and reading a checkpoint.

Same form as the cache's errors: a stable ``code`` word, what and where in ``message``, what to do in
``hint``.
"""

from __future__ import annotations

from typing import Any


class SourceError(Exception):
    """Base of all source failures; keyword arguments beyond ``hint`` and ``code`` become attributes."""

    code: str = "SourceError"

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


class SourceNotFound(SourceError):
    """There is nothing at the place named."""

    code = "SourceNotFound"


class SourceInvalid(SourceError):
    """What is there cannot be read: a wrong kind of file, a header that lies, a broken index."""

    code = "SourceInvalid"


class SourceIncomplete(SourceError):
    """Part of the checkpoint is missing or cut short, as after a broken pull; looking again may help."""

    code = "SourceIncomplete"


class SourceAmbiguous(SourceError):
    """More than one whole set of weights, and nothing that says which one counts."""

    code = "SourceAmbiguous"


class SourceUntrusted(SourceError):
    """A name or a link that leads out of the checkpoint's folder; it was not opened."""

    code = "SourceUntrusted"


class SourceUnavailable(SourceError):
    """The storage refused or failed: permissions, input/output errors."""

    code = "SourceUnavailable"


class SourceUnauthorized(SourceError):
    """The store does not let this credential, or nobody without one, read it."""

    code = "SourceUnauthorized"


class SourceUnreachable(SourceError):
    """The store gave no answer, or said that it cannot now; asking again may help."""

    code = "SourceUnreachable"


class SourceChanged(SourceError):
    """Other bytes than those that were stated or pinned."""

    code = "SourceChanged"
