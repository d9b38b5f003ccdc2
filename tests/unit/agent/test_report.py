"""The status as a function of the world."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from dlo_agent.actions import Build, Resolve
from dlo_agent.report import status_of
from dlo_agent.world import Disk, Headway, NodeFacts, Policy, StorageProblem, World
from dlo_api.v1alpha1.node_weight_cache import NodeWeightCacheStatus
from unit.agent.worlds import (
    DIGEST,
    GIB,
    NOW,
    binding,
    failure,
    files,
    key,
    layout,
    ledger,
    stored,
    wanted,
    world,
)

FACTS = NodeFacts(agent_version="0.1.0", boot_id="b-1", root_path="/var/cache/dlo", memory_bytes=64 * GIB)
READY = world(
    wanted(layout(0), layout(1)),
    ledger({"a02": binding("a"), "a12": binding("b")}, verified="ab"),
    stored("a"),
    stored("b"),
)


def status(found: World, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    """The status, checked against the API's own model."""
    made = status_of(found, FACTS, previous)
    NodeWeightCacheStatus.model_validate_json(json.dumps(made))
    return made


def condition(made: dict[str, Any], kind: str) -> dict[str, Any]:
    """One condition."""
    return next(each for each in made["conditions"] if each["type"] == kind)


def test_an_unchanged_world_gives_an_equal_status() -> None:
    """Time alone changes nothing, nor does a little of the disk."""
    first = status(READY)
    disk = READY.disk
    assert disk is not None
    later = replace(READY, now=NOW + 86_400, disk=replace(disk, free=disk.free - GIB // 2 + GIB // 2 + 1))
    assert status(later, first) == first


def test_transition_times_move_with_the_status_only() -> None:
    """Another reason or generation keeps the time; another status takes the new one."""
    first = status(replace(READY, storage=StorageProblem("RootNotMounted", "")))
    second = status(replace(READY, now=NOW + 5, storage=StorageProblem("Denied", "")), first)
    third = status(replace(READY, now=NOW + 9), second)
    times = [condition(each, "StorageHealthy")["lastTransitionTime"] for each in (first, second, third)]
    assert times == ["1970-01-01T00:16:40Z", "1970-01-01T00:16:40Z", "1970-01-01T00:16:49Z"]
    assert condition(second, "StorageHealthy")["reason"] == "Denied"


def test_unknown_numbers_are_absent() -> None:
    """Never 0, never null."""
    made = status(replace(READY, disk=None))
    assert made["root"] == {"path": "/var/cache/dlo"}
    assert "lockLimitBytes" not in made["memory"]
    assert "null" not in json.dumps(made)


def test_empty_lists_are_absent() -> None:
    """A server drops them from an applied status, so sending them would never end."""
    assert "[]" not in json.dumps(status(world(wanted(), ledger())))


def test_free_bytes_come_in_steps_of_one_per_cent() -> None:
    """99 GiB and a bit of 100 GiB are 99 GiB."""
    made = status(replace(READY, disk=Disk(100 * GIB, 99 * GIB + 123, "xfs", None)))
    assert made["root"]["freeBytes"] == 99 * GIB


def test_free_bytes_at_the_edge_of_a_step() -> None:
    """To and fro over an edge is told once, downwards; two steps up are told, and never more than there is."""
    seen: list[int] = []
    before: dict[str, Any] | None = None
    for free in (99 * GIB, 99 * GIB - 1, 99 * GIB + 1, 98 * GIB, 100 * GIB, 97 * GIB):
        before = status(replace(READY, disk=Disk(100 * GIB, free, "xfs", None)), before)
        seen.append(before["root"]["freeBytes"] // GIB)
        assert before["root"]["freeBytes"] <= free
    assert seen == [99, 98, 98, 98, 100, 97]


SOURCE = wanted().sources["5e"]
ENTRY = wanted(layout(0)).entries[0]
BUILD = Build("", SOURCE, (ENTRY,), DIGEST)
ONE = world(wanted(layout(0)), ledger())
BOUND = ledger({"a02": binding("a")})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ONE, {"phase": "Pending"}),
        (replace(ONE, running=(BUILD,)), {"phase": "Fetching"}),
        (
            replace(ONE, running=(BUILD,), headway={"a02": Headway("Building", 5, 9, key("a"))}),
            {"phase": "Building", "doneBytes": 5, "bytes": 9},
        ),
        (
            replace(ONE, failures={"entry/a02": failure("NotDivisible")}),
            {
                "phase": "Failed",
                "reason": "NotDivisible",
                "attempts": 1,
                "nextAttempt": "1970-01-01T00:17:40Z",
            },
        ),
        (
            replace(ONE, failures={"entry/a02": failure("IntegrityFailed")}),
            {"phase": "Quarantined", "reason": "IntegrityFailed"},
        ),
        (
            world(
                wanted(layout(0)), ledger(resolved=False), failures={"source/5e": failure("SourceNotFound")}
            ),
            {"phase": "Pending", "reason": "SourceNotFound"},
        ),
        (
            world(wanted(layout(0)), BOUND, stored("a")),
            {"phase": "Verifying", "inputKey": key("a"), "bytes": GIB},
        ),
        (
            world(wanted(layout(0)), BOUND, stored("a", problem="cut", problem_code="Corrupt")),
            {"phase": "Quarantined", "reason": "IntegrityFailed"},
        ),
        (
            world(wanted(layout(0)), BOUND, stored("a", problem="later", problem_code="NewerFormat")),
            {"phase": "Failed", "reason": "NewerFormat"},
        ),
        (
            replace(ONE, storage=StorageProblem("RootNotMounted", "no marker")),
            {"phase": "Pending", "reason": "RootNotMounted", "message": "no marker"},
        ),
        (
            replace(READY, policy=Policy(warm_budget_bytes=GIB // 2)),
            {"phase": "Ready", "reason": "InsufficientHostMemory"},
        ),
        (READY, {"phase": "Ready", "coordinate": "0/2", "lastVerified": "1970-01-01T00:16:40Z"}),
    ],
)
def test_the_phase_of_an_entry(found: World, expected: dict[str, Any]) -> None:
    """Where it is, why, and what goes with that."""
    entry = status(found)["entries"][0]
    assert {name: entry.get(name) for name in expected} == expected
    assert "manifestSha256" not in entry or entry["phase"] in ("Ready", "Verifying")


def test_a_ready_entry_carries_no_old_failure() -> None:
    """Attempts and pauses are over."""
    entry = status(replace(READY, failures={"entry/a02": failure()}))["entries"][0]
    assert "attempts" not in entry
    assert "reason" not in entry


def test_hashing_is_said() -> None:
    """A source that is being read for the first time."""
    found = world(wanted(), ledger(resolved=False), running=(Resolve("", SOURCE),))
    assert status(found)["sources"][0]["reason"] == "Hashing"


def test_the_first_reason_is_copied_up() -> None:
    """Ready names the failing entry; waiting alone is Pending; files count like layouts."""
    failed = replace(ONE, failures={"entry/a02": failure("DiskFull")})
    assert condition(status(failed), "Ready")["reason"] == "DiskFull"
    assert condition(status(failed), "SpaceAvailable")["reason"] == "DiskFull"
    assert condition(status(ONE), "Ready")["reason"] == "Pending"
    assert condition(status(world(wanted(files()), ledger())), "Ready")["status"] == "False"
    assert condition(status(READY), "Ready")["status"] == "True"


def test_promised_bytes_are_those_of_running_builds() -> None:
    """The whole size, so that it does not change with every byte."""
    building = replace(ONE, running=(BUILD,), headway={"a02": Headway("Building", 5, 900, key("a"))})
    assert status(building)["root"]["reservedBytes"] == 900
    assert status(ONE)["root"]["reservedBytes"] == 0
