"""What the agent's metrics make of outcomes and worlds, and of a disk that does not take what is written."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dlo_agent.actions import Build, Evict, Resolve, Verify
from dlo_agent.executor import Outcome
from dlo_agent.metrics import Metrics, source_kind
from dlo_agent.warm import Warmed
from dlo_agent.work import Removed, Verified
from dlo_agent.world import Disk, Policy
from dlo_api.v1alpha1.node_weight_cache import NodeSource
from dlo_cache.errors import Busy, CacheError, Cancelled, Corrupt, NoSpace, Unavailable
from dlo_cache.root import init_root
from unit.agent import worlds
from unit.agent.one_node import OneNode, two_ranks

NOW = 1000.0


def source_of(**member: Any) -> NodeSource:
    """A source with this one member."""
    return NodeSource.model_validate(
        {"id": "5e", "source": member, "variant": "", "secretName": "", "pin": {"revision": "", "digest": ""}}
    )


HUB = source_of(huggingFace={"repo": "org/name"})
S3 = source_of(s3={"bucket": "models"})
FOLDER = source_of(directory={"root": "samples", "path": "digits"})
ENTRIES = worlds.wanted(worlds.layout(0), worlds.layout(1)).entries


@pytest.fixture
def metrics() -> Metrics:
    """Fresh ones."""
    return Metrics("1.0")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample."""
    return metrics.registry.get_sample_value(name, labels)


def failed(action: Any, error: Exception) -> Outcome:
    """An action that ended in an error."""
    return Outcome(action, None, error, 0.5)


@pytest.mark.parametrize(("source", "kind"), [(HUB, "huggingFace"), (S3, "s3"), (FOLDER, "directory")])
def test_sources_are_counted_by_kind(metrics: Metrics, source: NodeSource, kind: str) -> None:
    """Bytes and failures, from the action's own source."""
    assert source_kind(source) == kind
    metrics.source_read(source, 100)
    metrics.seen(failed(Resolve("why", source), Unavailable("x", code="SourceUnreachable")), NOW)
    assert value(metrics, "dlo_fetch_bytes_total", source_kind=kind) == 100
    found = value(metrics, "dlo_fetch_errors_total", source_kind=kind, reason="SourceUnreachable")
    assert found == 1


@pytest.mark.parametrize(
    ("error", "result", "reason"),
    [
        (Busy("locked"), "wait", None),
        (NoSpace("full", code="DiskFull"), "error", "DiskFull"),
        (Unavailable("x", code="SourceUnreachable"), "error", "SourceUnreachable"),
        (RuntimeError("a defect"), "error", "BuildFailed"),
    ],
)
def test_builds_that_do_not_end_well(
    metrics: Metrics, error: Exception, result: str, reason: str | None
) -> None:
    """Waiting for another process is no failure; a failure has its reason, once a pass."""
    metrics.seen(failed(Build("why", S3, ENTRIES, "d"), error), NOW)
    assert value(metrics, "dlo_cache_requests_total", result=result) == 2
    counted = {
        sample.labels["reason"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "dlo_cache_build_errors_total" and sample.value
    }
    assert counted == ({} if reason is None else {reason: 1})
    fetch = value(metrics, "dlo_fetch_errors_total", source_kind="s3", reason="SourceUnreachable")
    assert fetch == (1 if reason == "SourceUnreachable" else 0)


def test_what_was_called_off_does_not_count(metrics: Metrics) -> None:
    """Neither as a failure nor as anything else."""
    before = samples(metrics)
    metrics.seen(failed(Build("why", S3, ENTRIES, "d"), Cancelled("no more")), NOW)
    assert samples(metrics) == before


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples of our own."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith("dlo_") and not math.isnan(sample.value)
    }


@pytest.mark.parametrize(
    ("error", "result"), [(Corrupt("other bytes"), "corrupt"), (CacheError("away", code="Denied"), "error")]
)
def test_verifications_that_fail(metrics: Metrics, error: Exception, result: str) -> None:
    """Other bytes are something else than a disk that cannot be read."""
    metrics.seen(failed(Verify("why", worlds.key("a"), ("a02",)), error), NOW)
    assert value(metrics, "dlo_verify_total", result=result) == 1
    assert value(metrics, "dlo_verify_total", result="ok") == 0
    assert value(metrics, "dlo_scrub_last_success_timestamp_seconds") == 0


def test_verifications_that_pass(metrics: Metrics) -> None:
    """Bytes, time and when."""
    metrics.seen(Outcome(Verify("why", worlds.key("a"), ()), Verified(worlds.key("a"), 70), None, 2.0), NOW)
    assert value(metrics, "dlo_verify_total", result="ok") == 1
    assert value(metrics, "dlo_verify_bytes_total") == 70
    assert value(metrics, "dlo_verify_duration_seconds_sum") == 2
    assert value(metrics, "dlo_scrub_last_success_timestamp_seconds") == NOW


def test_evicted_bytes_are_those_that_were_stored(metrics: Metrics) -> None:
    """The size is what the last look saw."""
    metrics.show(worlds.world(worlds.wanted(), worlds.ledger(), worlds.stored("a")))
    evict = Evict("why", worlds.key("a"), "Pressure")
    metrics.seen(Outcome(evict, Removed((worlds.key("a"),)), None, 0.1), NOW)
    assert value(metrics, "dlo_cache_evictions_total", reason="Pressure") == 1
    assert value(metrics, "dlo_cache_evictions_total", reason="Retention") == 0
    assert value(metrics, "dlo_cache_evicted_bytes_total") == worlds.GIB


def test_a_world_as_gauges(metrics: Metrics) -> None:
    """Stored bytes by state, the oldest check, what fails, the disk."""
    book = worlds.ledger({"a02": worlds.binding("a")}, verified=["a", "b"])
    seen = worlds.world(
        worlds.wanted(worlds.layout(0), worlds.layout(1)),
        book,
        worlds.stored("a"),
        worlds.stored("b"),
        worlds.stored("c", problem="torn", problem_code="Corrupt"),
        failures={"entry/a12": worlds.failure("DiskFull")},
        disk=Disk(100, 40, "btrfs", None),
        policy=Policy(warm_budget_bytes=7, scrub_seconds=60.0),
    )
    metrics.show(seen)
    for state in ("referenced", "unreferenced", "broken"):
        assert value(metrics, "dlo_cache_bytes", state=state) == worlds.GIB, state
    assert value(metrics, "dlo_cache_failing", reason="DiskFull") == 1
    assert value(metrics, "dlo_cache_failing", reason="IntegrityFailed") == 0
    assert value(metrics, "dlo_scrub_oldest_check_timestamp_seconds") == worlds.NOW
    assert value(metrics, "dlo_scrub_interval_seconds") == 60
    assert value(metrics, "dlo_cache_warm_budget_bytes") == 7
    assert (value(metrics, "dlo_cache_capacity_bytes"), value(metrics, "dlo_cache_free_bytes")) == (100, 40)
    inodes = value(metrics, "dlo_cache_inodes_free")
    assert inodes is not None
    assert math.isnan(inodes)
    assert value(metrics, "dlo_cache_root_usable") == 1


def test_resident_bytes_go_with_the_entry(metrics: Metrics) -> None:
    """What was warmed counts as long as it is remembered as warm."""
    warm = Outcome(Verify("why", worlds.key("a"), ()), Warmed(worlds.key("a"), 100, 90), None, 0.5)
    metrics.seen(warm, NOW)
    there = worlds.world(worlds.wanted(), worlds.ledger(), worlds.stored("a"), warmed={worlds.key("a"): NOW})
    metrics.show(there)
    assert value(metrics, "dlo_cache_resident_bytes") == 90
    assert value(metrics, "dlo_warm_bytes_total") == 100
    metrics.show(worlds.world(worlds.wanted(), worlds.ledger()))
    assert value(metrics, "dlo_cache_resident_bytes") == 0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[OneNode]:
    """A real agent on an empty root."""
    made = OneNode(init_root(tmp_path / "cache").path)
    yield made
    made.close()


def test_a_disk_that_does_not_take_what_is_written(node: OneNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sync of a build fails: counted once, nothing published; then the disk is well again."""
    real, failures = os.fsync, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def fsync(fd: int) -> None:
        where = os.readlink(f"/proc/self/fd/{fd}")
        if failures and "/ingest/" in where and "probe" not in where:
            raise failures.pop()
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    node.ask(two_ranks())
    node.wait_for(lambda: not failures)
    node.wait_for_work()
    assert value(node.loop.metrics, "dlo_fsync_errors_total") == 1
    node.advance(600)
    node.settle()
    assert value(node.loop.metrics, "dlo_fsync_errors_total") == 1
    assert value(node.loop.metrics, "dlo_cache_wanted_entries", state="Ready") == 3
    waits = value(node.loop.metrics, "dlo_cache_lock_wait_seconds_count")
    assert waits is not None
    assert waits >= 2
    read = value(node.loop.metrics, "dlo_fetch_bytes_total", source_kind="directory")
    assert read is not None
    assert read > 1_000_000
