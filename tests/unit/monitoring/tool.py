"""Prometheus's own tool."""

from __future__ import annotations

import subprocess

from clusterbin import binary


def promtool(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs promtool with this on its input."""
    return subprocess.run(
        [str(binary("promtool")), *words], input=text, capture_output=True, text=True, timeout=120
    )
