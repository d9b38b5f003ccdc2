"""``dlo run`` with the sample model: pictures, the second run, interrupts, and the death of every rank."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import urllib3
from PIL import Image
from unit.cli.prompt import files_below
from unit.cli.running import Running, gone, shared_memory_files, wait_until

MANIFEST = """\
apiVersion: dlo.dev/v1alpha1
kind: DiffusionDeployment
metadata: {name: digits}
spec:
  model: {source: {directory: {root: samples, path: digits}}}
  engine: {device: Cpu, extraArgs: [--default-size=32x32, --default-steps=4, --max-sequence-length=32]}
  parallelism: {tensor: 2}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A person's empty home."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands and engines of this test keep temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def left_behind(temporary: Path) -> list[str]:
    """Temporary files and folders, pictures aside."""
    return [path.name for path in temporary.iterdir() if path.name != "out"]


@pytest.fixture
def start(home: Path, temporary: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start ``dlo run`` on the sample model with further words; whatever is left is killed at the end."""
    file = tmp_path / "digits.yaml"
    file.write_text(MANIFEST)
    started: list[Running] = []

    def run(*words: str) -> Running:
        running = Running(["run", "-f", str(file), *words], home)
        started.append(running)
        return running

    yield run
    for running in started:
        if running.process.poll() is None:
            for child in [*running.family(), psutil.Process(running.process.pid)]:
                child.kill()
            running.end(30)


class Call(threading.Thread):
    """One request to the engine, running beside the test."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {"prompt": "a handwritten seven", **body}
        self.status = 0
        self.answer: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        """Send it and keep the answer."""
        response = urllib3.PoolManager(retries=False).request(
            "POST", f"{self._url}/v1/images/generations", json=self._body, timeout=120.0
        )
        self.status = response.status
        self.answer = json.loads(response.data)


def in_progress(url: str) -> bool:
    """A request is running on the engine."""
    text = urllib3.request("GET", f"{url}/metrics").data.decode()
    return any(
        line.startswith("dlo_engine_running_requests") and line.endswith(" 1.0") for line in text.splitlines()
    )


def test_two_prompts_two_pictures_and_nothing_built_twice(
    start: Callable[..., Running], home: Path, tmp_path: Path
) -> None:
    """The first run builds every coordinate's entry, the second says that they were found and writes none."""
    out = tmp_path / "out"
    words = ["--prompt", "a handwritten seven", "--prompt", "a handwritten three", "--out", str(out)]
    first = start(*words)
    assert first.end() == 0, first.err
    assert first.out == [str(out / "01-a-handwritten-seven.png"), str(out / "02-a-handwritten-three.png")]
    for path in first.out:
        with Image.open(path) as picture:
            assert picture.size == (32, 32)
            assert max(picture.convert("L").tobytes()) > 128
    entries = home / ".cache/dlo/v1/entries"
    built = {path: path.stat().st_mtime_ns for path in entries.rglob("*")}
    assert sum("built" in line for line in first.err) == 3
    assert not list((home / ".cache/dlo/v1/ingest").iterdir())

    pictures = [Path(path).read_bytes() for path in first.out]
    second = start(*words)
    assert second.end() == 0, second.err
    assert sum("found" in line for line in second.err) == 3
    assert not any("built" in line for line in second.err)
    assert {path: path.stat().st_mtime_ns for path in entries.rglob("*")} == built
    assert [Path(path).read_bytes() for path in second.out] == pictures


def test_sigterm_in_mid_request_finishes_it(start: Callable[..., Running]) -> None:
    """A request that runs when the end is asked for gets its picture; then everything is gone."""
    before = shared_memory_files()
    running = start("--port", "0")
    url = running.url()
    family = running.family()
    call = Call(url, num_inference_steps=60)
    wait_until(lambda: in_progress(url))
    running.process.send_signal(signal.SIGTERM)
    call.join(120)
    assert call.status == 200, call.answer
    assert call.answer["data"][0]["b64_json"]
    assert running.end() == 0, running.err
    assert running.errors() == []
    assert gone(family)
    assert shared_memory_files() <= before


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_nothing_is_left(
    start: Callable[..., Running], home: Path, victim: int
) -> None:
    """SIGKILL of any rank in mid-request: 503, a JSON error, exit 1 with its name, no leftovers, a good cache."""
    before = shared_memory_files()
    running = start("--port", "0")
    url = running.url()
    family = running.family()
    call = Call(url, num_inference_steps=1000)
    wait_until(lambda: in_progress(url))
    running.ranks()[victim].kill()
    call.join(15)
    assert not call.is_alive(), "the request still hangs"
    assert call.status >= 500
    assert call.answer["error"]["message"]
    health = urllib3.request("GET", f"{url}/health", retries=False)
    assert health.status == 503
    assert f"rank {victim}" in health.data.decode()
    assert running.end(60) == 1
    assert len(running.errors()) == 1
    assert f"rank {victim}" in running.errors()[0]
    assert gone(family)
    assert shared_memory_files() <= before
    verify = Running(["cache", "verify"], home)
    assert verify.end() == 0, verify.err


@pytest.mark.parametrize(("interrupts", "status"), [(1, 0), (2, 130), (4, 130)])
def test_the_end_of_the_terminal_ends_it_in_order(
    start: Callable[..., Running], temporary: Path, interrupts: int, status: int
) -> None:
    """SIGHUP is like Ctrl-C; the second one cuts short and is no failure, further ones change nothing."""
    running = start("--port", "0")
    running.url()
    family = running.family()
    for _ in range(interrupts):
        running.process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    assert running.end(60) == status, running.err
    assert running.errors() == []
    assert gone(family)
    assert left_behind(temporary) == []


@pytest.mark.parametrize("words", [(), ("--prompt", "seven", "--steps", "1000")])
def test_a_killed_front_is_named_and_nothing_is_left(
    start: Callable[..., Running], temporary: Path, words: tuple[str, ...]
) -> None:
    """SIGKILL of the engine's front: exit 1, one line with the signal, no rank, no temporary folder."""
    running = start("--port", "0", "--out", str(temporary / "out"), *words)
    wait_until(lambda: any("ready:" in line for line in running.err))
    family = running.family()
    family[0].kill()
    assert running.end(60) == 1
    (line,) = running.errors()
    assert line.startswith("error: EngineKilled: the engine's front process was ended by SIGKILL — ")
    wait_until(lambda: gone(family), 30)
    assert left_behind(temporary) == []


def test_killing_dlo_takes_the_engine_with_it(start: Callable[..., Running]) -> None:
    """SIGKILL of the command leaves no engine behind."""
    running = start("--port", "0")
    running.url()
    family = running.family()
    assert len(family) == 3
    running.process.kill()
    running.end(30)
    wait_until(lambda: gone(family), 30)


def test_ctrl_c_before_ready_is_an_interrupt(start: Callable[..., Running], home: Path) -> None:
    """Ctrl-C while the engine starts: exit 130, nothing half-written, no process left."""
    running = start("--prompt", "seven", "--out", str(home / "out"))
    wait_until(lambda: any("starting" in line for line in running.err))
    wait_until(lambda: len(running.ranks()) == 2)
    family = running.family()
    running.process.send_signal(signal.SIGINT)
    assert running.end(60) == 130, running.err
    assert running.errors() == []
    assert gone(family)
    assert not [name for name in files_below(home) if "/ingest/" in name or name.startswith("out/")]


def test_port_in_use_is_said(start: Callable[..., Running]) -> None:
    """A port that is taken: one line, exit 1."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        running = start("--port", str(taken.getsockname()[1]))
        assert running.end() == 1
    (line,) = running.errors()
    assert line.startswith("error: PortInUse: ")
