"""Interrupts: Ctrl-C, SIGTERM and the end of the terminal ask the running command to stop.

The first asks, the second ends at once, further ones change nothing. Imports nothing heavy: it works from the
first moment on.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

stopping = threading.Event()
"""Set by the first interrupt of a long job; jobs poll it and stop with nothing half-written."""


def watch() -> None:
    """Take over the signals that end a command. One that we were started to ignore (nohup) stays ignored."""
    _replace(_first)


def _first(_number: int, _frame: FrameType | None) -> None:
    """Ask the running job to stop; waiting calls are left at once."""
    stopping.set()
    _replace(_second)
    raise KeyboardInterrupt


def _second(_number: int, _frame: FrameType | None) -> None:
    """Leave at once; whatever is tidied up after this is not interrupted again."""
    _replace(signal.SIG_IGN)
    raise KeyboardInterrupt


def _replace(handler: Handler) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
