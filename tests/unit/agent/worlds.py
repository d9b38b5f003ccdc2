"""Worlds for the tests of planner and report: values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dlo_agent.references import Binding, Ledger, Release, Resolution
from dlo_agent.wanted import Wanted, read_wanted
from dlo_agent.world import Disk, Failure, Policy, Stored, World, fingerprint

NOW = 1000.0
DIGEST = "d1" * 32
SOURCE = {"id": "5e", "source": {"directory": {"root": "samples", "path": "digits"}}}
GIB = 1 << 30


def layout(rank: int, size: int = 2, **more: Any) -> dict[str, Any]:
    """A Layout entry; its id says rank and size."""
    found = {"id": f"a{rank}{size}", "sourceId": "5e", "kind": "Layout", "component": "transformer"}
    return found | {"tensorSize": size, "tensorRank": rank, "retentionSeconds": 100} | more


def files() -> dict[str, Any]:
    """The Files entry of the rest."""
    found = {"id": "f0", "sourceId": "5e", "kind": "Files", "select": "PipelineRest"}
    return found | {"streamed": ["transformer"], "retentionSeconds": 100}


def wanted(*entries: dict[str, Any], uid: str = "u1", generation: int = 1, pin: str = "") -> Wanted:
    """A spec with the one source."""
    source = SOURCE | {"pin": {"revision": "", "digest": pin}}
    return read_wanted(
        {
            "metadata": {"name": "node-1", "uid": uid, "generation": generation},
            "spec": {"sources": [source], "entries": list(entries)},
        }
    )


def resolution(digest: str = DIGEST, pin: str = "") -> Resolution:
    """The source, resolved."""
    return Resolution(digest=digest, basis=f"basis-{digest}", pin=pin, facts={"digest": digest})


def key(letter: str) -> str:
    """An entry key."""
    return letter * 64


def binding(letter: str, *, digest: str = DIGEST, uid: str = "u1", retention: int = 100) -> Binding:
    """An id stands for the stored entry of that letter."""
    return Binding(key(letter), f"basis-{digest}", digest, retention, uid)


def stored(letter: str, **more: Any) -> Stored:
    """A stored entry of 1 GiB."""
    return Stored(**{"key": key(letter), "kind": "Layout", "bytes": GIB, "manifest_sha256": "e" * 64, **more})


def ledger(
    bindings: Mapping[str, Binding] | None = None,
    *,
    resolved: bool = True,
    released: Mapping[str, Release] | None = None,
    verified: Iterable[str] = (),
    used: Mapping[str, float] | None = None,
    uid: str = "u1",
    generation: int = 1,
) -> Ledger:
    """A ledger; released and verified go by letter."""
    return Ledger(
        uid=uid,
        generation=generation,
        resolutions={"5e": resolution()} if resolved else {},
        bindings=dict(bindings or {}),
        released={key(letter): each for letter, each in (released or {}).items()},
        verified={key(letter): NOW for letter in verified},
        used={key(letter): at for letter, at in (used or {}).items()},
    )


def failure(reason: str = "BuildFailed", *, after: float = 60.0, needed: int = 0, pin: str = "") -> Failure:
    """A failure that is tried again ``after`` seconds from now."""
    mark = f"5e@{pin}"
    return Failure(reason, "it went wrong", 1, NOW + after, mark, needed)


def world(spec: Wanted | None, book: Ledger, *found: Stored, **more: Any) -> World:
    """A world with 10 GiB of room."""
    values: dict[str, Any] = {"disk": Disk(100 * GIB, 10 * GIB, "ext4", 1000), "policy": Policy()}
    return World(
        now=NOW, wanted=spec, ledger=book, stored={each.key: each for each in found}, **(values | more)
    )


assert fingerprint(wanted().sources["5e"]) == "5e@"
