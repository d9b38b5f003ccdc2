"""``dlo run`` as a person's own process: started, watched, killed, and looked for afterwards."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

STARTED = re.compile(r"Serving\s+(http://\S+)/v1/images/generations")
PATIENCE_SECONDS = 180.0


class Running:
    """A ``dlo`` process with its output gathered line by line."""

    def __init__(self, words: list[str], home: Path) -> None:
        environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"}
        environment.pop("XDG_CACHE_HOME", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dlo_cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads = [
            threading.Thread(target=self._gather, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _gather(stream: object, lines: list[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            lines.append(line.rstrip("\n"))

    def url(self) -> str:
        """Where it serves, once it says so."""
        found: list[str] = []

        def said() -> bool:
            assert self.process.poll() is None, self.err
            found[:] = STARTED.findall("\n".join(self.err))
            return bool(found)

        wait_until(said)
        return found[0]

    def family(self) -> list[psutil.Process]:
        """Every process below this one: the engine's front, then its ranks in their order."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return sorted(children, key=lambda child: child.create_time())

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, in rank order."""
        return [child for child in self.family() if "dlo_engine.rank" in child.cmdline()]

    def end(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end; its exit status."""
        status = self.process.wait(seconds)
        for thread in self._threads:
            thread.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return status

    def errors(self) -> list[str]:
        """The error lines."""
        return [line for line in self.err if line.startswith("error: ")]


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Poll until it is true; fail when it does not become so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def shared_memory_files() -> set[str]:
    """What lies in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def gone(processes: list[psutil.Process]) -> bool:
    """No process of these is left, zombies of ours aside."""
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
