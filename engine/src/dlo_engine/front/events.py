"""Progress events for a parent process: JSON lines on stdout, only with `--events`.

`{"event": "listening", "url", "port"}`, `{"event": "phase", "rank", "phase", "details"}`, `{"event": "ready",
"url", "port", "status"}`, `{"event": "draining"}`, `{"event": "failed", "code", "message", "hint"}`. A parent
that stops reading must never stop the engine: lines go through a thread, and are dropped once stdout is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Mapping
from typing import Any

_FLUSH_SECONDS = 2.0
_STDOUT = 1


class Events:
    """Writes events in order, or nothing when they were not asked for."""

    def __init__(self, *, enabled: bool) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if enabled:
            self._thread = threading.Thread(target=self._write, daemon=True, name="events")
            self._thread.start()

    def emit(self, event: Mapping[str, Any]) -> None:
        """Write one event; returns at once."""
        if self._thread is not None:
            self._lines.put(json.dumps(dict(event), default=str).encode() + b"\n")

    def close(self) -> None:
        """Wait (bounded) until every event is written."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(_FLUSH_SECONDS)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (line := self._lines.get()) is not None:
                while line:
                    line = line[os.write(_STDOUT, line) :]
