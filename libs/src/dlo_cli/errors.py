"""The command line's own errors and the one place where any error becomes a line and an exit status."""

import re
from typing import Protocol, runtime_checkable

from dlo_api.errors import ApiError
from dlo_obs.explained import ExplainedError

DONE = 0
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130


class CliError(ExplainedError):
    """Something that a person can mend. ``str`` is what happened and what to do."""

    code = "Failed"
    exit_status = FAILED


class UsageError(CliError):
    """The command line or the manifest is wrong."""

    code = "Usage"
    exit_status = WRONG_INPUT


class OutputLost(CliError):
    """Standard output takes no more: the disk behind it is full, or it broke."""

    code = "OutputLost"

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"standard output cannot be written: {error.strerror}", hint="send it elsewhere, or free space"
        )


@runtime_checkable
class Explained(Protocol):
    """What the error bases of all our packages have in common."""

    code: str
    message: str
    hint: str


# Control characters, line ends, what turns the direction of text round or has no width, and half characters, which no
# terminal can be sent.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """The text on one line, its control characters spelled out: names of files may hold any of them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def error_line(error: BaseException) -> str:
    """``error: <code>: <what> — <what to do>``: one line, or one line a cause where there are several."""
    if isinstance(error, Explained):
        text = f"{error.message} — {error.hint}" if error.hint else error.message
        several = len(getattr(error, "problems", ())) > 1
        first, *more = map(printable, text.splitlines() if several else [text])
        return "\n".join([f"error: {error.code}: {first}", *more])
    what = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    return f"error: Internal: {what} — this is a defect: please report it, with the command"


def exit_status(error: BaseException) -> int:
    """What the process exits with for this error."""
    if isinstance(error, CliError):
        return error.exit_status
    return WRONG_INPUT if isinstance(error, ApiError) else FAILED
