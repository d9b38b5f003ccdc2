"""The command line's own errors and the one place where any error becomes a line and an exit status."""

from typing import Protocol, runtime_checkable

DONE = 0
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130


class CliError(Exception):
    """Something that a person can mend. ``str`` is what happened and what to do."""

    code = "Failed"
    exit_status = FAILED

    def __init__(self, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(f"{message} — {hint}" if hint else message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code


class UsageError(CliError):
    """The command line or the manifest is wrong."""

    code = "Usage"
    exit_status = WRONG_INPUT


@runtime_checkable
class Explained(Protocol):
    """What the error bases of all our packages have in common."""

    code: str
    message: str
    hint: str


def error_line(error: BaseException) -> str:
    """One line: ``error: <code>: <what> — <what to do>``."""
    if isinstance(error, Explained):
        text = f"{error.message} — {error.hint}" if error.hint else error.message
        return f"error: {error.code}: " + " ".join(text.split())
    return f"error: Internal: {type(error).__name__}: {' '.join(str(error).split())} — please report it, with the command"
