"""Fetched files that no build took: they go by themselves, in a fleet where nothing else ever happens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dlo_agent.actions import Resolve, Sweep
from dlo_agent.planner import FETCHED_IDLE_SECONDS, FETCHED_SECONDS, plan
from dlo_agent.world import Fetched
from dlo_api.identity import source_id
from dlo_api.v1alpha1.source import S3Source, Source
from dlo_cache.errors import CacheError
from dlo_cache.root import init_root
from dlo_cli.samples import samples_root
from dlo_sources.stage import FOLDER, Stage
from fakes.s3 import S3, running_s3
from unit.agent.one_node import OneNode, SmallDisk, layout, source
from unit.agent.worlds import binding, ledger, stored, wanted, world
from unit.agent.worlds import layout as listed

IN_S3 = Source(s3=S3Source(bucket="models", prefix="digits"))


@pytest.fixture
def s3() -> Iterator[S3]:
    """A public bucket whose objects state no SHA-256, so that resolving them keeps what was hashed."""
    with running_s3() as made:
        made.put("models", "digits", samples_root() / "digits")
        made.buckets["models"].public = True
        yield made


@pytest.fixture
def node(tmp_path: Path, s3: S3) -> Iterator[OneNode]:
    """A node that knows it."""
    made = OneNode(init_root(tmp_path / "cache").path, s3_endpoints={"default": s3.url})
    yield made
    made.close()


def fetched(node: OneNode) -> list[Path]:
    """What lies in the stage."""
    folder = node.settings.root / "v1/ingest" / FOLDER
    return sorted(folder.iterdir()) if folder.is_dir() else []


def grow_old(node: OneNode, seconds: float) -> None:
    """Nobody has written to it for so long."""
    for path in fetched(node):
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_hashed_and_never_built_goes(node: OneNode, restarted: bool) -> None:
    """This node resolved for all and builds nothing: not at once, since a build may be asked for, but soon."""
    node.ask([], [source(IN_S3)])
    node.settle()
    assert len(fetched(node)) >= 2
    grow_old(node, FETCHED_IDLE_SECONDS / 2)
    node.settle()
    assert len(fetched(node)) >= 2
    if restarted:
        node.restart()
    grow_old(node, FETCHED_IDLE_SECONDS + 1)
    node.settle()
    assert fetched(node) == []


def test_what_a_dead_process_left_of_an_entry_that_is_there(node: OneNode) -> None:
    """Killed between the publishing and the cleaning: the entry is kept as it is, and what was fetched goes."""
    asked: list[dict[str, Any]] = [{**layout(0, 1), "sourceId": source_id(IN_S3)}]
    node.ask(asked, [source(IN_S3)])
    assert node.settle()["entries"][0]["phase"] == "Ready"
    folder = node.settings.root / "v1/ingest" / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / ("e" * 64)).write_bytes(b"a shard")
    node.restart()
    grow_old(node, FETCHED_IDLE_SECONDS + 1)
    assert node.settle()["entries"][0]["phase"] == "Ready"
    assert fetched(node) == []


def sweeps(idle: float, *, ready: bool, **more: Any) -> list[float]:
    """How old a file must be that goes, for every sweep that is planned."""
    spec = wanted(listed(0))
    book = ledger({"a02": binding("a")} if ready else {}, verified="a" if ready else "")
    found = world(spec, book, *([stored("a")] if ready else []), fetched=Fetched(7, idle), **more)
    return [each.idle_seconds for each in plan(found) if isinstance(each, Sweep)]


def test_how_long_it_waits() -> None:
    """Soon where every entry is there; a day where one is waited for, whose build may go on from it; never
    while something is built."""
    assert sweeps(FETCHED_IDLE_SECONDS - 1, ready=True) == []
    assert sweeps(FETCHED_IDLE_SECONDS, ready=True) == [FETCHED_IDLE_SECONDS]
    assert sweeps(FETCHED_SECONDS - 1, ready=False) == []
    assert sweeps(FETCHED_SECONDS, ready=False) == [FETCHED_SECONDS]
    running = (Resolve("", wanted(listed(0)).sources["5e"]),)
    assert sweeps(FETCHED_SECONDS, ready=True, running=running) == []


def test_while_nothing_is_known() -> None:
    """A node that nobody uses any more, or that cannot ask: what is a day old goes all the same."""
    for idle, planned in ((FETCHED_SECONDS - 1, []), (FETCHED_SECONDS, ["Sweep"])):
        found = world(None, ledger(), fetched=Fetched(7, idle))
        assert [type(each).__name__ for each in plan(found)] == planned


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    """A file from a far future is not kept until then; one that is held never goes."""
    stage = Stage(tmp_path)
    assert stage.leftover() is None
    fd, held = stage.fetch("tag-" + "0" * 64, 4, None, lambda start: iter([b"held"[start:]]), subject="w")
    assert stage.leftover() is None
    for name, age in {"a" * 64: -86_400.0, "b" * 64: 0.0, held: 1e6}.items():
        path = tmp_path / FOLDER / name
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    found = stage.leftover()
    assert found is not None
    assert found[1] == float("inf")
    stage.sweep(older_than_seconds=60)
    assert sorted(os.listdir(tmp_path / FOLDER)) == sorted([held, "b" * 64])
    os.close(fd)
    stage.release(held)
    stage.sweep()
    assert os.listdir(tmp_path / FOLDER) == []


def test_it_does_not_take_the_room_of_other_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of a folder that lacks room gets that of fetched files before it is refused."""
    node = OneNode(init_root(tmp_path / "cache").path)
    left = node.settings.root / "v1/ingest" / FOLDER / ("e" * 64)
    left.parent.mkdir()
    left.write_bytes(b"a shard")
    disk = SmallDisk()

    def free(path: Any) -> Any:
        disk.free = 1 << 20 if left.exists() else None
        return disk(path)

    monkeypatch.setattr(os, "statvfs", free)
    node.ask([layout(0, 1)])
    assert node.settle()["entries"][0]["phase"] == "Ready"
    assert fetched(node) == []
    node.close()


def test_a_root_that_went_away(tmp_path: Path) -> None:
    """Looking and sweeping tell it as the cache does, whatever lies there instead."""
    stage = Stage(tmp_path / "ingest")
    for call in (stage.leftover, stage.sweep):
        with pytest.raises(CacheError):
            call()
    (tmp_path / "ingest").write_text("a file")
    for call in (stage.leftover, stage.sweep):
        with pytest.raises(CacheError):
            call()
