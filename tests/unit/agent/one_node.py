"""One node for tests: a real cache root, the real agent, an API server in memory, and a clock that is set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlo_agent.loop import Loop
from dlo_agent.settings import Settings
from dlo_api.identity import identified, source_id
from dlo_api.v1alpha1.node_weight_cache import NodeEntry
from dlo_api.v1alpha1.source import DirectorySource, Source
from dlo_cli.samples import samples_root
from dlo_kube.kinds import NODE_WEIGHT_CACHE
from fakes.kube import FakeCluster

NODE = "node-1"
DIGITS = Source(directory=DirectorySource(root="samples", path="digits"))
DIGITS_ID = source_id(DIGITS)
START = 1_900_000_000.0
_PATIENCE_SECONDS = 30.0


def source(found: Source = DIGITS, digest: str = "") -> dict[str, Any]:
    """A source of the spec."""
    stated: dict[str, Any] = {
        "id": source_id(found),
        "source": found.to_json(),
        "variant": "",
        "secretName": "",
    }
    return stated | {"pin": {"revision": "", "digest": digest}}


def layout(
    rank: int, size: int = 2, *, of: str = DIGITS_ID, retention: int = 100, **more: Any
) -> dict[str, Any]:
    """A Layout entry of the spec, under its own id."""
    entry = NodeEntry(
        id="0",
        source_id=of,
        kind="Layout",
        component="transformer",
        tensor_size=size,
        tensor_rank=rank,
        retention_seconds=retention,
        **more,
    )
    return identified(entry).to_json()


def rest(*, of: str = DIGITS_ID, retention: int = 100) -> dict[str, Any]:
    """The Files entry of the rest of the pipeline."""
    entry = NodeEntry(
        id="0",
        source_id=of,
        kind="Files",
        select="PipelineRest",
        streamed=("transformer",),
        retention_seconds=retention,
    )
    return identified(entry).to_json()


def two_ranks(retention: int = 100) -> list[dict[str, Any]]:
    """What an engine of tensor size 2 needs."""
    return [layout(0, retention=retention), layout(1, retention=retention), rest(retention=retention)]


class SmallDisk:
    """A file system that says it has ``free`` bytes."""

    def __init__(self) -> None:
        self.free: int | None = None
        self._real = os.statvfs

    def __call__(self, path: Any) -> Any:
        found = self._real(path)
        if self.free is None:
            return found
        values = list(found)
        values[0:2] = [4096, 4096]
        values[2] = (1 << 40) // 4096
        values[3] = values[4] = (self.free + (1 << 40) // 100) // 4096
        return os.statvfs_result(values)


class OneNode:
    """The agent of `node-1`; ``restart`` makes a new process of it in the same world."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.now = START
        self.cluster = FakeCluster(now=lambda: self.now)
        self.settings = Settings(
            node=NODE,
            root=root,
            namespace="dlo-system",
            lock_timeout_seconds=0.0,
            **{"source_roots": {"samples": samples_root()}, **settings},
        )
        self.loop = self._started()

    def ask(self, entries: Sequence[dict[str, Any]], sources: Sequence[dict[str, Any]] | None = None) -> None:
        """The operator writes the spec."""
        spec = {"sources": list(sources if sources is not None else [source()]), "entries": list(entries)}
        if self.cluster.get(NODE_WEIGHT_CACHE, NODE) is None:
            kind = NODE_WEIGHT_CACHE
            self.cluster.put(
                {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": NODE}, "spec": spec}
            )
        else:
            self.cluster.edit(NODE_WEIGHT_CACHE, NODE, lambda obj: obj.update(spec=spec))

    def turn(self) -> None:
        """The watch tells of the object as it is, and the agent looks once."""
        self.loop.changed(self.cluster.get(NODE_WEIGHT_CACHE, NODE))
        self.loop.turn()

    def settle(self) -> dict[str, Any]:
        """Turns until nothing runs and nothing starts; returns the status."""
        for _ in self._until(lambda: not self.loop.busy):
            self.turn()
        self.turn()
        return self.status()

    def wait_for(self, arrived: Callable[[], bool]) -> None:
        """Turns until ``arrived``."""
        for _ in self._until(arrived):
            self.turn()

    def wait_for_work(self) -> None:
        """Turns without a word from the watch until nothing runs."""
        for _ in self._until(lambda: not self.loop.busy):
            self.loop.turn()

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def status(self) -> dict[str, Any]:
        """The status as the API server has it; {} where there is none."""
        obj = self.cluster.get(NODE_WEIGHT_CACHE, NODE) or {}
        found: dict[str, Any] = obj.get("status", {})
        return found

    def entries(self) -> dict[str, dict[str, Any]]:
        """The entries of the status by coordinate; Files ones by "rest"."""
        return {each.get("coordinate", "rest"): each for each in self.status().get("entries", [])}

    def condition(self, kind: str) -> dict[str, Any]:
        """One condition of the status."""
        return next(each for each in self.status()["conditions"] if each["type"] == kind)

    def stored(self) -> set[str]:
        """The keys in the root."""
        return {path.name for path in (self.settings.root / "v1/entries").iterdir()}

    def writes(self) -> int:
        """Status writes so far."""
        return self.cluster.writes["apply_status", "NodeWeightCache"]

    def restart(self) -> None:
        """A new process of the agent on the same root."""
        self.loop.close()
        self.loop = self._started()

    def close(self) -> None:
        """Ends the agent."""
        self.loop.close()

    def _started(self) -> Loop:
        return Loop(self.settings, self.cluster, clock=lambda: self.now, jitter=lambda: 0.0)

    def _until(self, arrived: Callable[[], bool]) -> Any:
        end = time.monotonic() + _PATIENCE_SECONDS
        yield 0
        while not arrived():
            assert time.monotonic() < end, f"not settled: {self.status()}"
            time.sleep(0.01)
            yield 0
