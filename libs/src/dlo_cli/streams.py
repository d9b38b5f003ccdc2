"""The standard streams of a command, made fit for what is written to them: any text, any place, or none.

Must run before anything is opened: a file that got the number of a missing stream would be written to by mistake.
"""

import contextlib
import os
import sys
from typing import TextIO


def prepare() -> None:
    """Streams that were closed lead nowhere; a character that a stream cannot show never ends a command."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _usable(sys.stdout, 1)
    sys.stderr = _usable(sys.stderr, 2)


def _usable(stream: TextIO | None, number: int) -> TextIO:
    """The stream, or one that leads nowhere. Names of files go out as they are where the encoding is UTF-8."""
    if stream is None:
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - a number, for good
    unicode = (stream.encoding or "").lower().replace("-", "") == "utf8"
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="surrogateescape" if unicode else "backslashreplace")
    return stream


def drop_output() -> None:
    """Send what is still buffered for standard output nowhere: its reader is gone, or its disk is full."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
