"""Starts real front processes for tests and talks to them over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parents[3]
FAKES = "unit.engine.front.fake_runtime"
_MAIN = """
import json, sys
from dlo_engine.__main__ import main
from dlo_engine.front.settings import FrontSettings
status = main(sys.argv[2:], FrontSettings(**json.loads(sys.argv[1])))
heavy = {"torch", "numpy", "diffusers"} & set(sys.modules)
sys.stderr.write(f"front imported: {sorted(heavy)}\\n")
sys.exit(status)
"""
Answer = tuple[int, dict[str, str], Any]


class Front:
    """A front process with fake (or given) ranks. Use as a context manager: it is killed at the end."""

    def __init__(
        self, folder: Path, *flags: str, runtime: str = f"{FAKES}:FakeRuntime", **settings: float
    ) -> None:
        self.folder = folder
        handover = folder / "handover.json"
        if not handover.exists():
            handover.write_text("{}")
        self.termination = folder / "termination"
        given = {"runtime": runtime, "fault_serve_seconds": 1.5, "straggler_seconds": 1.0, **settings}
        arguments = ["serve", "--handover", str(handover), "--model-name", "fake", "--device", "cpu"]
        arguments += ["--port", "0", "--events", "--termination-message-path", str(self.termination), *flags]
        self.scratch = folder / "tmp"
        self.scratch.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "TMPDIR": str(self.scratch),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps(given), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.port = 0
        self.events: list[dict[str, Any]] = []
        self._incoming: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stderr = bytearray()
        self._threads = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def wait_event(self, name: str, seconds: float = 60) -> dict[str, Any]:
        """The next event of this name."""
        limit = time.monotonic() + seconds
        while True:
            event = self._incoming.get(timeout=max(0.01, limit - time.monotonic()))
            assert event is not None, f"the front ended before {name}: {self.stderr}"
            if event["event"] == "listening":
                self.port = event["port"]
            if event["event"] == name:
                return event

    def ready(self) -> Front:
        """Wait until requests are admitted."""
        self.wait_event("ready")
        return self

    def exit_status(self, seconds: float = 30) -> int:
        """Wait for the end; leaves stderr complete."""
        status = self.process.wait(seconds)
        for thread in self._threads:
            thread.join(10)
        return status

    @property
    def stderr(self) -> str:
        """What the front has printed."""
        return self._stderr.decode()

    @property
    def error_lines(self) -> list[str]:
        """The lines for people: neither logs nor the harness's own."""
        lines = self.stderr.splitlines()
        return [line for line in lines if not line.startswith(("{", "front imported"))]

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks, from the log."""
        for line in self.stderr.splitlines():
            if line.startswith("{") and (record := json.loads(line))["event"] == "Ranks were spawned":
                return {int(rank): pid for rank, pid in record["pids"].items()}
        raise AssertionError(self.stderr)

    def calls(self, rank: int) -> list[dict[str, Any]]:
        """What a fake runtime was asked."""
        path = self.folder / f"calls-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30,
    ) -> Answer:
        """Status, headers (lower case) and the body (JSON where it is)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            data = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            is_json = found.get("content-type") == "application/json"
            return response.status, found, json.loads(data) if is_json and data else data.decode()
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        """GET."""
        return self.request("GET", path)

    def generate(self, **fields: Any) -> Answer:
        """POST an images request."""
        return self.request("POST", "/v1/images/generations", json.dumps(fields).encode())

    def generate_later(self, **fields: Any) -> Callable[[], Answer]:
        """Start a request in a thread; call the result to get its answer."""
        answers: list[Answer | BaseException] = []

        def run() -> None:
            try:
                answers.append(self.generate(**fields))
            except BaseException as error:
                answers.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def wait() -> Answer:
            thread.join(60)
            assert answers, "no answer"
            if isinstance(answers[0], BaseException):
                raise answers[0]
            return answers[0]

        return wait

    def wait_running(self, rank: int = 0, count: int = 1) -> None:
        """Wait until a fake rank has been asked `count` times."""
        wait_until(lambda: len(self.calls(rank)) >= count)

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append(event)
            self._incoming.put(event)
        self._incoming.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._stderr.extend(line)


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Poll until the condition holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return str(psutil.Process(pid).status()) != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that this test started."""
    os.kill(pid, number)
