"""The gate: warm within milliseconds, waits on a cold node, and ends with its own code."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from dlo_agent.__main__ import run_command
from dlo_agent.errors import DeadlinePassed, UsageError
from dlo_agent.gate import parse_wants, pass_gate
from dlo_cache.handover import read_handover
from dlo_cache.root import init_root
from unit.agent.one_node import OneNode, two_ranks


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> OneNode:
    """A node that has its entries, and whose agent has ended."""
    node = OneNode(init_root(tmp_path_factory.mktemp("warm") / "cache").path)
    node.ask(two_ranks())
    node.settle()
    node.close()
    return node


def wants(node: OneNode) -> list[dict[str, Any]]:
    """What the operator renders, from the status."""
    found = []
    for each in node.status()["entries"]:
        place = each.get("coordinate")
        found.append(
            {
                "rank": None if place is None else int(place.partition("/")[0]),
                "component": each.get("component"),
                "coordinate": place,
                "kind": each["kind"],
                "inputKey": each["inputKey"],
                "manifestSha256": each["manifestSha256"],
            }
        )
    return found


class Waiting:
    """One call of the gate with a clock that only moves by sleeping."""

    def __init__(self, root: Path, stated: list[dict[str, Any]], out: Path, **more: Any) -> None:
        self.now = 0.0
        self.more: dict[str, Any] = {"deadline_seconds": 100.0, "optional_layout": False} | more
        self.root, self.stated, self.out = root, stated, out
        self.lines: list[str] = []

    def run(self) -> Any:
        """Passes, or raises."""
        return pass_gate(
            self.root,
            parse_wants(json.dumps(self.stated)),
            self.out,
            poll_seconds=2.0,
            say=self.lines.append,
            clock=lambda: self.now,
            sleep=self.sleep,
            **self.more,
        )

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds


def test_a_warm_node_is_passed_at_once(warm: OneNode, tmp_path: Path) -> None:
    """No agent and no server; the hand-over file is what an engine reads."""
    out = tmp_path / "handover.json"
    waiting = Waiting(warm.settings.root, wants(warm), out)
    began = time.perf_counter()
    waiting.run()
    assert time.perf_counter() - began < 1.0
    assert waiting.now == 0.0
    handover = read_handover(out)
    assert [each.coordinate for each in handover.entries] == ["0/2", "1/2", None]
    for each in handover.entries:
        assert each.dir == f"v1/entries/{each.input_key}"
        assert (handover.directory(each) / "manifest.json").is_file()


def test_a_cold_node_is_waited_for(warm: OneNode, tmp_path: Path) -> None:
    """It says what it waits for, follows the agent's progress, and passes when the agent is done."""
    node = OneNode(init_root(tmp_path / "cache").path)
    node.ask(two_ranks())
    stated, lines = wants(warm), list[str]()
    passed = threading.Thread(
        target=pass_gate,
        args=(node.settings.root, parse_wants(json.dumps(stated)), tmp_path / "out.json"),
        kwargs={"deadline_seconds": 60, "poll_seconds": 0.05, "optional_layout": False, "say": lines.append},
    )
    passed.start()
    try:
        while not lines:
            time.sleep(0.01)
        node.settle()
    finally:
        passed.join(30)
        node.close()
    assert lines[0].endswith("waiting for the node's agent to build it")
    assert len(read_handover(tmp_path / "out.json").entries) == 3
    assert len(lines) == len(set(lines)), "one line a step"


def test_progress_is_told_by_steps(warm: OneNode, tmp_path: Path) -> None:
    """Ten looks at three states are three lines; a failure carries its reason."""
    root = init_root(tmp_path / "cache").path
    stated = wants(warm)[:1]
    steps = iter([(10, ""), (12, ""), (19, ""), (50, ""), (50, "DiskFull"), (50, "DiskFull")])
    note = {"entry": "ab", "key": stated[0]["inputKey"], "total": 100, "message": "no room"}

    waiting = Waiting(root, stated, tmp_path / "out.json", deadline_seconds=5.0)

    def sleep(seconds: float) -> None:
        waiting.now += 1.0
        done, reason = next(steps, (50, "DiskFull"))
        state = {"done": done, "phase": "Failed" if reason else "Building", "reason": reason}
        (root / "v1/progress/ab.json").write_text(json.dumps(note | state))

    waiting.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(DeadlinePassed, match="DiskFull: no room"):
        waiting.run()
    assert waiting.lines == [
        "transformer 0/2: waiting for the node's agent to build it",
        "transformer 0/2: Building 10 % of 100 bytes",
        "transformer 0/2: Building 50 % of 100 bytes",
        "transformer 0/2: DiskFull: no room",
    ]
    assert not (tmp_path / "out.json").exists()


def test_another_manifest_than_told_is_not_passed(warm: OneNode, tmp_path: Path) -> None:
    """Nor an entry under the wrong coordinate."""
    stated = wants(warm)
    stated[0]["manifestSha256"] = "0" * 64
    with pytest.raises(DeadlinePassed, match="Corrupt"):
        Waiting(warm.settings.root, stated, tmp_path / "out.json").run()
    swapped = wants(warm)
    swapped[0]["rank"], swapped[0]["coordinate"] = 1, "1/2"
    with pytest.raises(DeadlinePassed, match="Corrupt"):
        Waiting(warm.settings.root, swapped, tmp_path / "out.json").run()


def test_without_layouts_where_that_is_allowed(warm: OneNode, tmp_path: Path) -> None:
    """Opportunistic: Files are waited for; a component of which a Layout entry lacks is left out, and that named."""
    stated = wants(warm)
    stated[1]["inputKey"] = "1" * 64
    waiting = Waiting(warm.settings.root, stated, tmp_path / "out.json", optional_layout=True)
    waiting.run()
    assert [each.coordinate for each in read_handover(tmp_path / "out.json").entries] == [None]
    assert any("going on without transformer 1/2" in line for line in waiting.lines)
    stated[2]["inputKey"] = "2" * 64
    with pytest.raises(DeadlinePassed, match="files 222222222222"):
        Waiting(warm.settings.root, stated, tmp_path / "out.json", optional_layout=True).run()


def test_the_deadline_has_its_own_exit_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """75, one line on standard error, and the same line as the termination message."""
    (tmp_path / "empty").mkdir()
    entry = {"rank": 0, "component": "transformer", "coordinate": "0/2", "kind": "Layout"}
    entry |= {"inputKey": "a" * 64, "manifestSha256": "b" * 64}
    words = ["gate", "--root", str(tmp_path / "empty"), "--out", str(tmp_path / "out.json")]
    words += ["--want-json", json.dumps([entry]), "--deadline", "0", "--poll", "0.05"]
    status = run_command([*words, "--termination-message", str(tmp_path / "message")], {})
    assert status == 75
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: DeadlineExceeded: not ready after 0 s: transformer 0/2: RootNotMounted")
    assert (tmp_path / "message").read_text() == last


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputKey": "../../etc"}, "64 hexadecimal digits"),
        ({"dir": "/etc"}, "needs exactly the keys"),
        ({"kind": "Other"}, "is not Layout or Files"),
        ({"rank": 1}, "rank 1 is not that of coordinate 0/2"),
        ({"kind": "Files"}, "kind Files has no rank"),
        ({"kind": ["Layout"]}, "is not Layout or Files"),
        ({"coordinate": f"0/{'9' * 5000}"}, "a coordinate like 0/2"),
        ({"coordinate": "0/\u0662"}, "a coordinate like 0/2"),
        ({"rank": True}, "needs a rank"),
    ],
)
def test_wants_are_checked(change: dict[str, Any], said: str) -> None:
    """What is asked never becomes a path by itself."""
    entry: dict[str, Any] = {"rank": 0, "component": "transformer", "coordinate": "0/2", "kind": "Layout"}
    entry |= {"inputKey": "a" * 64, "manifestSha256": "b" * 64}
    parse_wants(json.dumps([entry]))
    with pytest.raises(UsageError, match=said):
        parse_wants(json.dumps([entry | change]))


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", "nonsense", "[" * 100_000, "9" * 5000])
def test_wants_that_are_none(text: str) -> None:
    """A gate with nothing to check would pass everything."""
    with pytest.raises(UsageError):
        parse_wants(text)


@pytest.mark.parametrize(
    "note",
    [
        [],
        [["key", 1]],
        None,
        "text",
        {"entry": "aa", "phase": "Building", "key": ["a"]},
        {"entry": "aa", "phase": 7},
        {"entry": "aa", "phase": "Building", "key": "a" * 64, "total": -1},
        {"entry": "aa", "phase": "Building", "key": "a" * 64, "total": True},
        {"entry": "aa", "phase": "Failed", "key": "a" * 64, "message": {"a": 1}},
    ],
)
def test_progress_that_is_none(tmp_path: Path, note: object) -> None:
    """Whatever lies where an agent writes its progress: the gate says what it sees itself."""
    root = init_root(tmp_path / "cache").path
    (root / "v1/progress/aa.json").write_text(json.dumps(note))
    entry = {"rank": 0, "component": "transformer", "coordinate": "0/2", "kind": "Layout"}
    wanted = parse_wants(json.dumps([entry | {"inputKey": "a" * 64, "manifestSha256": "b" * 64}]))
    with pytest.raises(DeadlinePassed, match="waiting for the node's agent"):
        pass_gate(
            root,
            wanted,
            tmp_path / "out.json",
            deadline_seconds=0,
            poll_seconds=0.05,
            optional_layout=False,
            say=lambda _: None,
        )
