"""The engine as a child process: started from a manifest and a hand-over file, watched, and ended in order.

The command line never imports the engine; it starts ``python -m dlo_engine`` and reads its events.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Self

from dlo_api.serving import extra_flags, serve_flags
from dlo_api.v1alpha1 import DiffusionDeployment
from dlo_cache.handover import Handover, write_handover

from dlo_cli.errors import CliError
from dlo_cli.scratch import Scratch

Event = dict[str, Any]
LAST_LINES = 20
FORCED_SECONDS = 40.0
"""How long an engine that is to end at once may take: longer than it gives its ranks."""


def engine_command(manifest: DiffusionDeployment, handover: Path, *, host: str, port: int) -> list[str]:
    """The command line of an engine for this manifest."""
    flags = serve_flags(manifest.metadata.name, manifest.spec, handover=str(handover), host=host, port=port)
    return [
        # -P: files of the folder that the user stands in are never imported.
        *(sys.executable, "-P", "-m", "dlo_engine", "serve", "--events", "--exit-with-parent"),
        *flags,
        *extra_flags(manifest.spec),
    ]


class Engine:
    """A running engine. A context manager: on the way out the engine is asked to drain, then ended."""

    def __init__(
        self, manifest: DiffusionDeployment, handover: Handover, *, host: str, port: int, verbose: bool
    ) -> None:
        """``verbose`` lets the engine's log lines through; else they are kept for `log_tail`."""
        self._manifest = manifest
        self._handover = handover
        self._host = host
        self._port = port
        self._verbose = verbose
        self._events: Queue[Event | None] = Queue()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            scratch = undo.enter_context(Scratch())
            self._log = scratch.path / "engine.log"
            self._process = self._start(scratch)
            self._undo = undo.pop_all()
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._reader.start()
        return self

    def _start(self, scratch: Scratch) -> subprocess.Popen[str]:
        file = scratch.path / "handover.json"
        write_handover(file, self._handover)
        command = engine_command(self._manifest, file, host=self._host, port=self._port)
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C reaches this process alone, which then ends the engine in order.
            return subprocess.Popen(  # noqa: S603 - the program is our own interpreter
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if self._verbose else log,
                text=True,
                start_new_session=True,
                pass_fds=(scratch.lock,),
                # What the engine keeps for itself goes with our folder, however it ends.
                env={**os.environ, "TMPDIR": str(scratch.path)},
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._undo:
            self.stop()

    def _read(self) -> None:
        stream = self._process.stdout
        if stream is not None:
            for line in stream:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    self._events.put(event)
        self._events.put(None)

    def events(self) -> Iterator[Event]:
        """What the engine says, until it is gone; polls, so that a signal handler can run in between."""
        while True:
            try:
                event = self._events.get(timeout=0.2)
            except Empty:
                continue
            if event is None:
                return
            yield event

    def failure(self, seconds: float) -> CliError | None:
        """Why the engine failed, if it says so within this time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except Empty:
                return None
            if event is None:
                self._events.put(None)
                return None
            if event.get("event") == "failed":
                return failure(event)
        return None

    def log_tail(self) -> str:
        """The last lines of the engine's log, for an end that it could not explain."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-LAST_LINES:])

    def wait(self) -> int:
        """Wait for the engine's own end; its exit status."""
        while True:
            try:
                return self._process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue

    def ended_by(self) -> str | None:
        """The signal that ended the engine's front process, if one did."""
        status = self._process.returncode
        return signal.Signals(-status).name if status is not None and status < 0 else None

    def stop(self) -> int:
        """Ask the engine to finish what runs, within its drain limit, and wait; its exit status.

        A second interrupt ends it at once and is raised again.
        """
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self.wait()
        except KeyboardInterrupt:
            self._end_at_once()
            raise
        finally:
            if self._reader is not None:
                self._reader.join(timeout=5)
            if self._process.stdout is not None:
                self._process.stdout.close()
        return self._process.returncode

    def _end_at_once(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=FORCED_SECONDS)
        except subprocess.TimeoutExpired:
            # Its ranks end with it: the kernel sees to that.
            self._process.kill()
            self._process.wait()


def failure(event: Event) -> CliError:
    """The engine's own failure as an error of ours."""
    return CliError(
        str(event.get("message", "the engine failed")),
        hint=str(event.get("hint", "")),
        code=str(event.get("code", "EngineFailed")),
    )
