"""Ordered shutdown, impatient shutdown, and no orphans when the front itself is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unit.engine.front.harness import FAKES, TESTS, Front, alive, kill, wait_until

MAIN = f"""
import sys
from dlo_engine.__main__ import main
from dlo_engine.front.settings import FrontSettings
sys.exit(main(sys.argv[1:], FrontSettings(runtime="{FAKES}:FakeRuntime")))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_mid_request_finishes_it_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    with Front(tmp_path, "--tensor", "2") as front:
        front.ready()
        pids = front.ranks()
        running = front.generate_later(prompt="slow", num_inference_steps=10)
        front.wait_running()
        waiting = front.generate_later(prompt="admitted before")
        wait_until(lambda: "dlo_engine_queue_length 1.0" in front.get("/metrics")[2])
        kill(front.process.pid, number)
        front.wait_event("draining")
        status, headers, body = front.generate(prompt="too late")
        assert (status, body["error"]["code"]) == (503, "Draining")
        assert headers["retry-after"]
        status, _, health = front.get("/health")
        assert (status, health["status"]) == (503, "draining")
        assert (running()[0], waiting()[0]) == (200, 200)
        assert front.exit_status() == 0
        assert front.error_lines == []
        assert not front.termination.exists()
        assert all((tmp_path / f"closed-{rank}").exists() for rank in pids)
        assert list(front.scratch.iterdir()) == []
        assert not any(alive(pid) for pid in pids.values())


def test_what_runs_past_the_drain_limit_is_cancelled(tmp_path: Path) -> None:
    with Front(tmp_path, "--drain-timeout-seconds", "0.3") as front:
        front.ready()
        running = front.generate_later(prompt="slow", num_inference_steps=500)
        front.wait_running()
        kill(front.process.pid, signal.SIGTERM)
        status, _, body = running()
        assert (status, body["error"]["code"]) == (503, "Cancelled")
        assert front.exit_status() == 0
        assert (tmp_path / "closed-0").exists()


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with Front(tmp_path, "--tensor", "2") as front:
        front.ready()
        pids = front.ranks()
        front.generate_later(prompt="slow", num_inference_steps=900)
        front.wait_running()
        kill(front.process.pid, signal.SIGTERM)
        front.wait_event("draining")
        started = time.monotonic()
        kill(front.process.pid, signal.SIGINT)
        assert front.exit_status() == 128 + signal.SIGINT
        assert time.monotonic() - started < 5
        assert not any(alive(pid) for pid in pids.values())
        assert list(front.scratch.iterdir()) == []
        assert "Traceback" not in front.stderr


def test_sigterm_during_the_start_exits_0_and_leaves_nothing(tmp_path: Path) -> None:
    with Front(tmp_path, "--tensor", "2", runtime=f"{FAKES}:NeverReadyRuntime") as front:
        front.wait_event("phase")
        kill(front.process.pid, signal.SIGTERM)
        assert front.exit_status(10) == 0
        assert not any(alive(pid) for pid in front.ranks().values())
        assert list(front.scratch.iterdir()) == []


def test_a_rank_that_dies_in_the_drain_is_still_a_failure(tmp_path: Path) -> None:
    with Front(tmp_path, "--tensor", "2") as front:
        front.ready()
        running = front.generate_later(prompt="slow", num_inference_steps=900)
        front.wait_running()
        kill(front.process.pid, signal.SIGTERM)
        front.wait_event("draining")
        kill(front.ranks()[1])
        assert running()[2]["error"]["code"] == "RankDied"
        assert front.exit_status(10) == 1


def test_the_engine_ends_in_order_with_its_parent_when_asked(tmp_path: Path) -> None:
    (tmp_path / "handover.json").write_text("{}")
    arguments = ["serve", "--handover", str(tmp_path / "handover.json"), "--model-name", "m", "--port", "0"]
    command = [sys.executable, "-c", MAIN, *arguments, "--device", "cpu", "--events", "--exit-with-parent"]
    parent = f"import subprocess, sys; subprocess.run({command!r}, stdout=sys.stdout)"
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        events = (json.loads(line)["event"] for line in process.stdout)
        assert next(event for event in events if event == "ready")
        kill(process.pid)
        assert list(events) == ["draining"]
    wait_until((tmp_path / "closed-0").exists)


def test_no_rank_outlives_a_killed_front(tmp_path: Path) -> None:
    """Not even one that is deep in its start and reads no messages."""
    with Front(tmp_path, "--tensor", "2", runtime=f"{FAKES}:NeverReadyRuntime") as front:
        for _ in range(2):
            front.wait_event("phase")
        pids = front.ranks()
        assert all(alive(pid) for pid in pids.values())
        kill(front.process.pid)
        wait_until(lambda: not any(alive(pid) for pid in pids.values()), 5)
