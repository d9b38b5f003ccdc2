"""H14: who is charged for warmed pages that engines pin, and who is killed for want of memory: with real limits.

Needs root and the memory controller of cgroup v1, which lets a process be put under a limit without a container;
elsewhere the tests say why they are left out. What the limits are in the chart is a test of the chart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from dlo_agent.node import filesystem_of
from dlo_cache.files_entry import build_files_entry
from dlo_cache.root import init_root
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.files import look_at

CONTROLLER = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20
ENTRY = 160 * MIB
PRIVATE = 96 * MIB  # what an engine of the test needs of its own: an interpreter, and slack
KILLED = -9


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root, to put a process under a memory limit"
    if not (CONTROLLER / "memory.limit_in_bytes").exists():
        return "this machine has no memory controller of cgroup v1"
    if not os.access(CONTROLLER, os.W_OK):
        return "the memory controller is read-only here"
    return ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-")


class Group:
    """A memory cgroup; without ``limit`` it is only counted."""

    def __init__(self, name: str, limit: int | None, parent: Path = CONTROLLER) -> None:
        self.path = parent / name
        self.path.mkdir()
        if limit is not None:
            (self.path / "memory.limit_in_bytes").write_text(str(limit))

    def charged(self) -> int:
        """Bytes of file pages that count against it."""
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return int(stat["cache"])

    def remove(self) -> None:
        """Once its processes have ended."""
        (self.path / "memory.force_empty").write_text("0")
        self.path.rmdir()


class Actor:
    """A process in a cgroup, that does a step a line."""

    def __init__(self, group: Group, *words: object) -> None:
        script = Path(__file__).with_name("under_limits.py")
        enter = 'echo $$ > "$0" && exec "$@"'
        self.process = subprocess.Popen(
            ["sh", "-c", enter, group.path / "cgroup.procs", sys.executable, "-P", script, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.said() == "here"

    def does(self, step: str) -> str:
        """What it says after the step; "" if it was killed in it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        return self.said()

    def said(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        """Its exit status; negative for a signal."""
        with suppress(BrokenPipeError):
            self.process.communicate(timeout=60)
        return self.process.returncode


class Stage:
    """A root with one entry that is not in memory, a source of another, and cgroups that go in the end."""

    def __init__(self, folder: Path) -> None:
        self.root = init_root(folder / "cache")
        self.key = self._entry(folder / "first.bin")
        self.other = folder / "other.bin"
        self._fill(self.other)
        self.groups: list[Group] = []
        self.actors: list[Actor] = []

    def _fill(self, path: Path) -> None:
        with path.open("wb") as file:
            for _ in range(ENTRY // (8 * MIB)):
                file.write(os.urandom(8 * MIB))
            file.flush()
            os.fsync(file.fileno())
        chill(path)

    def _entry(self, source: Path) -> str:
        self._fill(source)
        files = hash_files([look_at("weights.bin", source)], DigestCache(None))
        return build_files_entry(self.root, files, select="All", producer={}).key

    def group(self, name: str, limit: int | None, parent: Group | None = None) -> Group:
        """A cgroup of this test."""
        place = parent.path if parent is not None else CONTROLLER
        made = Group(f"dlo-{os.getpid()}-{name}", limit, place)
        self.groups.append(made)
        return made

    def agent(self, group: Group) -> Actor:
        """An agent in it."""
        return self._actor(Actor(group, "agent", self.root.path, self.key, self.other))

    def engine(self, group: Group) -> Actor:
        """An engine in it."""
        return self._actor(Actor(group, "engine", self.root.path, self.key))

    def _actor(self, made: Actor) -> Actor:
        self.actors.append(made)
        return made

    def cold(self) -> None:
        """Nothing of the entry is in memory."""
        for path in (self.root.entries_dir / self.key).glob("*.bin"):
            chill(path)

    def close(self) -> None:
        """Ends everything."""
        for actor in self.actors:
            if actor.process.poll() is None:
                actor.process.kill()
            actor.end()
        end = time.monotonic() + 10
        for group in reversed(self.groups):
            while True:
                try:
                    group.remove()
                    break
                except OSError:  # a process leaves its cgroup a moment after it was waited for
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)


def chill(path: Path) -> None:
    """Drops the pages of a file."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """See Stage."""
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the pages of tmpfs are charged in another way, and this test's folder lies there")
    made = Stage(tmp_path)
    made.cold()
    try:
        yield made
    finally:
        made.close()


def test_the_agent_warms_and_builds_while_engines_pin(stage: Stage) -> None:
    """As in the chart: no limit on the agent; the pages stay its own however small the engine's limit is."""
    agents, engines = stage.group("agent", None), stage.group("engine", PRIVATE)
    agent, engine = stage.agent(agents), stage.engine(engines)
    assert agent.does("warm") == f"warmed {ENTRY}"
    assert engine.does("pin") == f"pinned {ENTRY}"
    assert engines.charged() < ENTRY // 10
    assert agents.charged() >= ENTRY
    assert agent.does("build") == f"built {ENTRY}"
    assert agent.does("warm") == f"warmed {ENTRY}"
    assert (agent.end(), engine.end()) == (0, 0)


def test_a_node_that_runs_out_of_page_cache(stage: Stage) -> None:
    """All of a node under one limit, pinned pages and all: what the agent builds makes room by reclaim, and nobody
    is killed."""
    node = stage.group("node", ENTRY + 3 * PRIVATE)
    agents, engines = stage.group("agent", None, node), stage.group("engine", PRIVATE, node)
    agent, engine = stage.agent(agents), stage.engine(engines)
    assert agent.does("warm") == f"warmed {ENTRY}"
    assert engine.does("pin") == f"pinned {ENTRY}"
    assert agent.does("build") == f"built {ENTRY}"
    assert agent.does("warm") == f"warmed {ENTRY}"
    assert (agent.end(), engine.end()) == (0, 0)


def test_why_the_agent_has_no_limit(stage: Stage) -> None:
    """With one that its own memory and the warm set just fit in, what engines pin cannot be reclaimed, and it is
    killed at its next work."""
    agents, engines = stage.group("agent", ENTRY + 16 * MIB), stage.group("engine", PRIVATE)
    agent, engine = stage.agent(agents), stage.engine(engines)
    assert agent.does("warm").startswith("warmed")
    assert engine.does("pin") == f"pinned {ENTRY}"
    assert agent.does("build") == ""
    assert agent.end() == KILLED
    assert engine.end() == 0


@pytest.mark.parametrize(("limit", "survives"), [(PRIVATE, False), (PRIVATE + ENTRY, True)])
def test_an_engine_that_pins_cold_pages(stage: Stage, limit: int, survives: bool) -> None:
    """They are charged to it: its limit is its private bytes and its distinct entries, and less kills it."""
    engines = stage.group("engine", limit)
    engine = stage.engine(engines)
    assert engine.does("pin") == (f"pinned {ENTRY}" if survives else "")
    assert engine.end() == (0 if survives else KILLED)
