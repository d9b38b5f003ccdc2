"""The termination message: why this engine ended, where the node's kubelet reads it.

One line `<code>: <what> — <what to do>`; the code is everything before the first colon. Must not raise: the
engine is ending anyway.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_LIMIT = 4096
"""Bytes the kubelet keeps of a container's message."""


def write_termination_message(path: Path | None, line: str) -> None:
    """Write the line (cut to 4096 bytes, whole characters) when there is a path to write to."""
    if path is None:
        return
    text = line.encode("utf-8", "replace")[: _LIMIT - 1].decode("utf-8", "ignore")
    with contextlib.suppress(OSError):
        path.write_text(text + "\n", encoding="utf-8")
