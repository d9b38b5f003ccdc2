"""Small parts: status aggregation, metrics, termination message, output of ranks, core count, log lines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from dlo_engine.config import EngineConfig
from dlo_engine.errors import EngineError
from dlo_engine.front.cores import usable_cores
from dlo_engine.front.metrics import Metrics
from dlo_engine.front.process import describe_exit, prefixed
from dlo_engine.front.responses import RequestIds
from dlo_engine.front.status import engine_status, worst_backing
from dlo_engine.termination import write_termination_message
from dlo_obs.logs import describe, where
from starlette.types import Message, Receive, Scope, Send


def share(kind: str = "RegisteredCache", *, key: str = "k", verify: int = 1, **last: float) -> dict[str, Any]:
    """One rank's share."""
    return {
        "backing": {"kind": kind, "fallbackCode": None, "verified": True},
        "entries": [{"inputKey": key, "bytes": 100, "registeredBytes": 10, "pssBytes": 50}],
        "start": {"verifyMs": verify},
        "lastRequest": last or None,
    }


def test_entries_are_listed_once_with_the_bytes_of_all_workers_summed() -> None:
    config = EngineConfig(Path("h"), "m", tensor=2, data=2)
    shares = {3: share(key="b"), 0: share(key="a"), 1: share(key="b", verify=7), 2: share(key="a")}
    status = engine_status(config, shares, ())
    assert [(entry["inputKey"], entry["bytes"]) for entry in status["entries"]] == [("a", 100), ("b", 100)]
    assert [(entry["registeredBytes"], entry["pssBytes"]) for entry in status["entries"]] == [(20, 100)] * 2
    assert status["topology"] == {"tensor": 2, "data": 2, "world": 4}
    assert status["start"] == {"verifyMs": 7}
    assert status["lastRequest"] is None


def test_unknown_bytes_stay_absent() -> None:
    bare = {**share(), "entries": [{"inputKey": "k", "bytes": 1}]}
    status = engine_status(EngineConfig(Path("h"), "m", data=2), {0: bare, 1: bare}, ())
    assert status["entries"] == [{"inputKey": "k", "bytes": 1}]


def test_the_last_request_takes_the_slowest_rank_and_all_copied_bytes() -> None:
    shares = {0: share(steps=4, waitMs=1, copiedBytes=5), 1: share(steps=4, waitMs=3, copiedBytes=6)}
    status = engine_status(EngineConfig(Path("h"), "m", tensor=2), shares, (0, 1))
    assert status["lastRequest"] == {"steps": 4, "waitMs": 3, "copiedBytes": 11}


def test_the_backing_is_the_worst_of_any_rank() -> None:
    staged = share("StagedCache")
    staged["backing"].update(fallbackCode="registration_failed", verified=False)
    worst = worst_backing({0: share(), 1: staged, 2: share()})
    assert worst == {"kind": "StagedCache", "fallbackCode": "registration_failed", "verified": False}


def test_metrics_name_the_backing_and_count_outcomes() -> None:
    metrics = Metrics()
    status = engine_status(EngineConfig(Path("h"), "m"), {0: share("PrivateLoad")}, ())
    status["backing"]["fallbackCode"] = "entry_rejected"
    metrics.show(status)
    timings = {"steps": 4, "computeMs": 100.0, "copyMs": 80.0, "waitMs": 20.0, "copiedBytes": 64}
    metrics.finished(1.5, timings)
    metrics.count("refused")
    text = metrics.render(queued=3, running=1, ready=True).decode()
    for line in (
        'dlo_engine_backing_info{fallback_code="entry_rejected",kind="PrivateLoad",verified="true"} 1.0',
        'dlo_engine_requests_total{outcome="ok"} 1.0',
        'dlo_engine_requests_total{outcome="refused"} 1.0',
        'dlo_engine_requests_total{outcome="failed"} 0.0',
        "dlo_engine_step_seconds_sum 0.03",
        "dlo_engine_request_copy_seconds_sum 0.08",
        "dlo_engine_copied_bytes_total 64.0",
        "dlo_engine_queue_length 3.0",
        "dlo_engine_registered_bytes 10.0",
    ):
        assert line in text.splitlines()


def test_the_termination_message_is_one_bounded_line(tmp_path: Path) -> None:
    path = tmp_path / "message"
    write_termination_message(path, "Code: " + "ü" * 5000)
    data = path.read_bytes()
    assert len(data) <= 4096
    assert data.decode().startswith("Code: ü")
    write_termination_message(None, "x")
    write_termination_message(tmp_path / "missing" / "message", "x")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"hello\n", b"rank 3: hello\n"),
        (b'{"event": "x"}\n', b'{"event": "x"}\n'),
        (b'{"event": broken\n', b'rank 3: {"event": broken\n'),
        (b"bar 0%\rbar 100%\n", b"rank 3: bar 100%\n"),
        (b"\xff no newline", b"rank 3: \xff no newline\n"),
    ],
)
def test_output_of_a_rank_names_the_rank(line: bytes, shown: bytes) -> None:
    assert prefixed(3, line) == shown


def test_exits_are_described_by_signal_or_status() -> None:
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-63) == "was ended by signal 63"


def test_a_quota_bounds_the_cores(tmp_path: Path) -> None:
    cpu_max = tmp_path / "cpu.max"
    everything = usable_cores(cpu_max)
    cpu_max.write_text("max 100000\n")
    assert usable_cores(cpu_max) == everything
    cpu_max.write_text("50000 100000\n")
    assert usable_cores(cpu_max) == 1


def test_an_error_is_one_line_with_code_and_hint() -> None:
    error = EngineError("a\nb", hint="do c", code="Code", rank=3)
    assert error.line == "Code: a b — do c"
    assert error.subject == {"rank": 3}
    assert str(EngineError("only")) == "only"


async def _defect(scope: Scope, receive: Receive, send: Send) -> None:
    raise KeyError("defect")


def test_a_defect_in_a_route_is_a_json_500_with_the_request_id() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing to read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", b"mine")]}
    asyncio.run(RequestIds(_defect)(scope, receive, send))
    assert sent[0]["status"] == 500
    assert (b"x-request-id", b"mine") in sent[0]["headers"]
    answer = json.loads(sent[1]["body"])
    assert (answer["error"]["code"], answer["request_id"]) == ("Internal", "mine")
    assert "KeyError" not in answer["error"]["message"]


def test_an_unexpected_error_is_told_by_place_without_a_traceback() -> None:
    with pytest.raises(ValueError, match="first") as caught:
        raise ValueError("first\nsecond")
    assert describe(caught.value) == "ValueError: first second"
    assert where(caught.value).startswith("test_parts.py:")
