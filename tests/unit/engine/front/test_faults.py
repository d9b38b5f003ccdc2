"""Ranks that die or cannot start: who is told, how fast, and that nothing is left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from unit.engine.front.harness import FAKES, Front, alive, kill, wait_until

TWO_BY_TWO = ("--tensor", "2", "--data", "2")


def assert_nothing_left(front: Front, pids: dict[int, int]) -> None:
    """No rank lives, no private directory is left, no traceback was shown."""
    assert not [rank for rank, pid in pids.items() if alive(pid)]
    assert list(front.scratch.iterdir()) == []
    assert "Traceback" not in front.stderr
    assert "front imported: []" in front.stderr


@pytest.mark.parametrize(
    ("transfer", "rank"), [*(("RankLocal", rank) for rank in range(4)), ("AllGather", 2)]
)
def test_the_death_of_any_rank_fails_everything_within_seconds(
    tmp_path: Path, rank: int, transfer: str
) -> None:
    with Front(tmp_path, *TWO_BY_TWO, "--transfer", transfer, fault_serve_seconds=60) as front:
        front.ready()
        pids = front.ranks()
        requests = [front.generate_later(prompt="slow", num_inference_steps=500) for _ in range(5)]
        front.wait_running(rank=0)
        front.wait_running(rank=3)
        started = time.monotonic()
        kill(pids[rank])
        answers = [request() for request in requests]
        assert time.monotonic() - started < 3
        for status, headers, body in answers:
            assert (status, body["error"]["code"]) == (503, "RankDied")
            assert f"rank {rank} was ended by SIGKILL" in body["error"]["message"]
            assert headers["x-request-id"] == body["request_id"]
        status, _, health = front.get("/health")
        assert (status, health["status"], health["code"]) == (503, "failed", "RankDied")
        assert f"rank {rank} was ended by SIGKILL" in health["reason"]
        assert front.get("/livez")[0] == 200
        assert front.get("/v1/engine/status")[0] == 503
        assert front.generate(prompt="late")[0] == 503
        wait_until(lambda: not any(alive(pid) for pid in pids.values()), 5)
        front.wait_event("failed")
        kill(front.process.pid, signal.SIGTERM)
        assert front.exit_status(10) == 1, (
            "a signal in the grace period ends it at once, as the failure it is"
        )
        lines = front.error_lines
        assert len(lines) == 1
        assert lines[0].startswith(f"error: RankDied: rank {rank} was ended by SIGKILL — ")
        assert front.termination.read_text() == lines[0].removeprefix("error: ") + "\n"
        assert front.events[-1]["code"] == "RankDied"
        assert_nothing_left(front, pids)


def test_a_rank_that_exits_by_itself_is_a_fault_too(tmp_path: Path) -> None:
    with Front(tmp_path, "--tensor", "2") as front:
        front.ready()
        status, _, body = front.generate(prompt="exit-on-1")
        started = time.monotonic()
        assert status == 503
        assert "rank 1 exited with status 7" in body["error"]["message"]
        assert front.exit_status() == 1
        assert time.monotonic() - started > 1.2, "it answers 503 for the whole grace period of 1.5 s"


def test_a_rank_that_fails_alone_in_a_collective_ends_the_engine(tmp_path: Path) -> None:
    with Front(tmp_path, "--tensor", "2") as front:
        front.ready()
        pids = front.ranks()
        status, _, body = front.generate(prompt="fail-on-1")
        assert (status, body["error"]["code"]) == (503, "RankStuck")
        assert "ValueError: only this rank" in body["error"]["message"]
        assert front.exit_status() == 1
        assert_nothing_left(front, pids)


@pytest.mark.parametrize(
    ("runtime", "flags", "status", "code", "says"),
    [
        (
            "CorruptRuntime",
            ("--tensor", "2"),
            4,
            "Corrupt",
            "entry ab12: tensor x does not match — rebuild it",
        ),
        ("UnexpectedRuntime", (), 1, "Internal", "KeyError: 'defect'"),
        ("FallbackRuntime", ("--data", "2"), 3, "entry_rejected", "PrivateLoad, which is a fallback here"),
        ("NoSuchRuntime", (), 1, "Internal", "NoSuchRuntime"),
        (
            "FakeRuntime",
            ("--default-size", "33x32"),
            2,
            "InvalidConfiguration",
            "multiples of 16 from 16 to 256",
        ),
        (
            "FakeRuntime",
            ("--default-size", "32x512"),
            2,
            "InvalidConfiguration",
            "multiples of 16 from 16 to 256",
        ),
    ],
)
def test_a_failed_start_ends_at_once_with_one_line(
    tmp_path: Path, runtime: str, flags: tuple[str, ...], status: int, code: str, says: str
) -> None:
    with Front(tmp_path, *flags, runtime=f"{FAKES}:{runtime}", fault_serve_seconds=60) as front:
        failed = front.wait_event("failed")
        assert failed["code"] == code
        assert front.exit_status(10) == status
        assert len(front.error_lines) == 1
        assert front.error_lines[0].startswith(f"error: {code}: ")
        assert says in front.error_lines[0]
        assert front.termination.read_text().startswith(f"{code}: ")
        assert "ready" not in [event["event"] for event in front.events]
        assert_nothing_left(front, front.ranks())


def test_a_fallback_is_served_and_reported_under_continue(tmp_path: Path) -> None:
    with Front(tmp_path, "--on-fallback", "Continue", runtime=f"{FAKES}:FallbackRuntime") as front:
        status = front.ready().get("/v1/engine/status")[2]
        assert status["backing"]["fallbackCode"] == "entry_rejected"
        assert front.generate(prompt="served")[0] == 200
        assert 'fallback_code="entry_rejected",kind="PrivateLoad"' in front.get("/metrics")[2]


def test_a_rank_killed_in_its_start_ends_the_engine_at_once(tmp_path: Path) -> None:
    flags = ("--tensor", "2")
    with Front(tmp_path, *flags, runtime=f"{FAKES}:NeverReadyRuntime", fault_serve_seconds=60) as front:
        for _ in range(2):
            front.wait_event("phase")
        status, headers, health = front.get("/health")
        assert (status, health["status"]) == (503, "starting")
        assert "rank 1: verify" in health["reason"]
        assert headers["retry-after"]
        status, _, body = front.generate(prompt="early")
        assert (status, body["error"]["code"]) == (503, "Starting")
        assert front.get("/v1/models")[2]["data"] == []
        assert front.get("/v1/engine/status")[0] == 503
        assert front.get("/livez")[0] == 200
        kill(front.ranks()[1])
        assert front.exit_status(10) == 1
        assert front.error_lines[0].startswith("error: RankDied: rank 1 was ended by SIGKILL")
        assert_nothing_left(front, front.ranks())
