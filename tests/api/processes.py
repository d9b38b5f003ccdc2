"""The product's processes as tests start and stop them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

SYSTEM = "dlo-system"
_STOP_SECONDS = 20


def start_operator(
    kubeconfig: Path, log: IO[bytes], *, identity: str, resync_seconds: str = "10", more: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """An operator's process, with short pauses and no ports, that writes to `log`."""
    flags = {
        "--namespace": SYSTEM,
        "--agent-namespace": SYSTEM,
        "--engine-image": "engine:1",
        "--agent-image": "agent:1",
        "--identity": identity,
        "--resync-seconds": resync_seconds,
        "--heartbeat-seconds": "1",
        "--metrics-port": "0",
        "--health-port": "0",
        "--kubeconfig": str(kubeconfig),
    }
    words = [word for pair in flags.items() for word in pair]
    return subprocess.Popen([sys.executable, "-m", "dlo_operator", *words, *more], stdout=log, stderr=log)


def stop(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGTERM) -> None:
    """Ends a process by a signal, as a kubelet does it; one that outlasts its time is killed, and the test fails."""
    process.send_signal(how)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
