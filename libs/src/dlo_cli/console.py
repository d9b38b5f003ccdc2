"""What a person sees: bars on a terminal, plain lines elsewhere, results on standard output.

Everything that is not a result goes to standard error, so that output can be piped. Decides nothing.
"""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from dlo_cache.progress import ProgressEvent
from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from dlo_cli.errors import OutputLost, printable

QUIET_SECONDS = 5.0
SHORT = 12
"""Digits of a key that people are shown."""
WIDE = 200
PAPER = 80
NARROW = 40
VERBS = {
    "hash": "Hashing",
    "read": "Reading",
    "build": "Building",
    "verify": "Verifying",
    "publish": "Publishing",
}


def human_bytes(count: int) -> str:
    """Bytes for people, in powers of 1024: ``8.1 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class _Lines(RichConsole):
    """Lines and bars for whoever reads along; the work goes on when nobody does any more."""

    def on_broken_pipe(self) -> None:
        """Say nothing from now on, instead of ending the process."""
        self.quiet = True


class Console:
    """One command's output. A context manager, so that bars are gone before an error is printed."""

    def __init__(self) -> None:
        self._rich = _Lines(stderr=True, highlight=False, soft_wrap=True)
        self._bars: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._said: dict[tuple[str, str], float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def settle(self) -> None:
        """Take all bars off the screen."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        self._tasks.clear()
        self._said.clear()

    def result(self, text: str) -> None:
        """One line of result, on standard output."""
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error) from error

    def table(self, table: Table) -> None:
        """A table of results, on standard output; never cut off at the width of a pipe."""
        text = io.StringIO()
        terminal = sys.stdout.isatty()
        rich = RichConsole(file=text, highlight=False, markup=False, force_terminal=terminal)
        rich.width = max(rich.width, WIDE)
        rich.print(table)
        self.result("\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").splitlines()))

    def width(self, most: int = 100) -> int:
        """Columns for text on standard output: the terminal's, within limits; 80 where it is none."""
        return max(NARROW, min(most, RichConsole().width)) if sys.stdout.isatty() else PAPER

    def styled(self, lines: Iterable[Text]) -> None:
        """Lines of result, on standard output, with their colours where that is a terminal; never wrapped here."""
        text = io.StringIO()
        rich = RichConsole(file=text, highlight=False, markup=False, force_terminal=sys.stdout.isatty())
        for line in lines:
            rich.print(line, soft_wrap=True)
        self.result("\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").splitlines()))

    def step(self, topic: str, text: str) -> None:
        """One line about what happened: a topic of one word, then the words."""
        # A terminal that is gone or a full disk is no reason to end the work.
        with contextlib.suppress(OSError):
            self._rich.print(printable(f"{topic:<10} {text}"), markup=False)

    def progress(self, event: ProgressEvent) -> None:
        """The callback that long jobs report to; ``done`` and ``total`` in bytes."""
        verb = VERBS.get(event.phase, event.phase)
        if self._rich.is_terminal:
            rates = DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
            self._draw(verb, event.subject, event.done, event.total, *rates)
        else:
            self._say(verb, event.subject, event.done, event.total, human_bytes)

    def counted(self, verb: str, subject: str, done: int, total: int) -> None:
        """The same for jobs that count things rather than bytes."""
        if self._rich.is_terminal:
            self._draw(verb, subject, done, total, MofNCompleteColumn(), TimeElapsedColumn())
        else:
            self._say(verb, subject, done, total, str)

    def _draw(self, verb: str, subject: str, done: int, total: int, *columns: ProgressColumn) -> None:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description:<34}"),
                BarColumn(),
                *columns,
                console=self._rich,
                transient=True,
            )
            self._bars.start()
        key = (verb, subject)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(f"{verb} {subject}", total=total)
        self._bars.update(self._tasks[key], completed=done, total=total)
        if done >= total:
            self._bars.remove_task(self._tasks.pop(key))

    def _say(self, verb: str, subject: str, done: int, total: int, unit: Callable[[int], str]) -> None:
        """A line every few seconds, so that a log shows life and a short job says nothing."""
        now = time.monotonic()
        if done < total and now - self._said.setdefault((verb, subject), now) >= QUIET_SECONDS:
            self._said[verb, subject] = now
            self.step(verb, f"{subject}: {unit(done)} of {unit(total)}")
