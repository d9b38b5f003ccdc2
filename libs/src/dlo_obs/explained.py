"""The form that errors have everywhere: a stable code, what and where, what to do. Imports nothing."""

from __future__ import annotations


class ExplainedError(Exception):
    """Base of a package's error base, which gives the default ``code``, a CamelCase word.

    ``message`` says what is wrong and where, ``hint`` what to do about it; ``str`` is both in one line.
    """

    code: str

    def __init__(self, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message} — {self.hint}" if self.hint else self.message
