"""One rank process: spawned in its own session, watched, spoken to, killed.

Must be used from the main thread's event loop: the kernel ties a rank's life to the thread that spawned it.
Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO

from dlo_engine.protocol import FrontMessage, Launch, RankMessage

_LINE_BYTES = 1 << 16
_LAST_WORDS_SECONDS = 1.0


class RankProcess:
    """A running rank. `on_message` and `on_exit` are called on the event loop, messages always first."""

    def __init__(
        self,
        launch: Launch,
        *,
        on_message: Callable[[RankMessage], None],
        on_exit: Callable[[int, int], None],
    ) -> None:
        """Spawn the rank. `on_exit(rank, returncode)` gets a negative signal number as `subprocess` does."""
        self.rank = launch.rank
        self.exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    sys.executable,
                    "-P",
                    "-u",
                    "-m",
                    "dlo_engine.rank",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"rank-{self.rank}-messages")
        self._reader.start()
        self._output = threading.Thread(
            target=forward_output,
            args=(self.rank, self._popen.stdout),
            daemon=True,
            name=f"rank-{self.rank}-output",
        )
        self._output.start()
        self.send(launch)

    @property
    def pid(self) -> int:
        """Process id, which is also its process group and session."""
        return self._popen.pid

    def send(self, message: FrontMessage) -> None:
        """Send one message; a rank that is already gone is noticed by its exit, not here."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def kill(self) -> None:
        """SIGKILL the rank and whatever it started."""
        if not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError, RuntimeError):  # RuntimeError: the loop has closed
            while True:
                message = self._connection.recv()
                self._loop.call_soon_threadsafe(self._on_message, message)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Children it may have left in its session end with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        returncode = self._popen.wait()
        # What it still said before it ended comes first: the dead end of the socket makes the reader finish.
        self._reader.join(_LAST_WORDS_SECONDS)
        self._output.join(_LAST_WORDS_SECONDS)
        self._loop.call_soon(self._finish, returncode)

    def _finish(self, returncode: int) -> None:
        self._connection.close()
        self.exited.set()
        self._on_exit(self.rank, returncode)


def forward_output(rank: int, output: IO[bytes]) -> None:
    """Copy a rank's lines to our stderr: JSON log lines as they are, anything else behind the rank."""
    with output:
        while line := output.readline(_LINE_BYTES):
            with contextlib.suppress(OSError):
                os.write(2, prefixed(rank, line))


def prefixed(rank: int, line: bytes) -> bytes:
    """The line as it goes out: a JSON object names its rank itself, a progress bar is its last state."""
    text = line.rstrip(b"\r\n").rsplit(b"\r", 1)[-1]
    if text.startswith(b'{"'):
        with contextlib.suppress(ValueError):
            json.loads(text)
            return text + b"\n"
    return b"rank %d: %s\n" % (rank, text)


def describe_exit(returncode: int) -> str:
    """`was ended by SIGKILL`, `exited with status 3`."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
