"""What the agent sees at one moment, as one value: the input of planner and report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource

from dlo_agent import reasons
from dlo_agent.actions import Action
from dlo_agent.references import Ledger, Resolution
from dlo_agent.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry in the root. ``problem`` is "" for one whose manifest, sizes and headers check, else why it
    cannot be used, and ``problem_code`` its word."""

    key: str
    kind: str | None = None
    component: str | None = None
    coordinate: str | None = None
    bytes: int = 0
    manifest_sha256: str | None = None
    content_digest: str | None = None
    published: float = 0.0
    leased: bool = False
    problem: str = ""
    problem_code: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of the root; ``free`` is beside what is kept back. ``inodes_free`` is None where the
    file system does not count them."""

    total: int
    free: int
    filesystem: str | None = None
    inodes_free: int | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Fetched files of stores that no work holds: their bytes, and how long ago the first of them was written."""

    bytes: int
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of a source, an entry or a key, and when to try again.

    ``fingerprint`` is of what was asked for: a failure of something else does not count. ``needed`` are the
    bytes that lacked room.
    """

    reason: str
    message: str
    attempts: int
    next_attempt: float
    fingerprint: str = ""
    needed: int = 0


@dataclass(frozen=True, slots=True)
class Headway:
    """How far the work for one entry is: ``done`` of ``total`` bytes of the entry, ``key`` once it is known."""

    phase: str
    done: int
    total: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class StorageProblem:
    """Why the root cannot be used."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What does not change while the agent runs; a number that is not known is None."""

    agent_version: str
    boot_id: str | None = None
    root_path: str | None = None
    gid: int | None = None
    memory_bytes: int | None = None
    lock_limit_bytes: int | None = None
    max_map_count: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """How often and how much. ``warm_budget_bytes`` 0: nothing is warmed."""

    warm_budget_bytes: int = 0
    scrub_seconds: float = 7 * 86_400.0
    warm_again_seconds: float = 900.0


@dataclass(frozen=True)
class World:
    """One moment. ``storage`` is None where the root is in order; ``failures`` go by ``source/ID``,
    ``entry/ID`` and ``key/KEY``; ``warmed`` says when a key was last brought in."""

    now: float
    wanted: Wanted | None
    ledger: Ledger = field(default_factory=Ledger)
    stored: Mapping[str, Stored] = field(default_factory=dict)
    failures: Mapping[str, Failure] = field(default_factory=dict)
    running: tuple[Action, ...] = ()
    headway: Mapping[str, Headway] = field(default_factory=dict)
    warmed: Mapping[str, float] = field(default_factory=dict)
    disk: Disk | None = None
    fetched: Fetched | None = None
    storage: StorageProblem | None = None
    policy: Policy = field(default_factory=Policy)

    def source_of(self, entry: NodeEntry) -> NodeSource | None:
        """The source that an entry is built from, if the spec lists it."""
        return None if self.wanted is None else self.wanted.sources.get(entry.source_id)

    def resolution(self, source: NodeSource) -> Resolution | None:
        """What the source was resolved to, if that answers its pin."""
        found = self.ledger.resolutions.get(source.id)
        return found if found is not None and source.pin.digest in ("", found.digest) else None

    def failure_of_source(self, source: NodeSource) -> Failure | None:
        """The last failure to resolve exactly this."""
        return self._failure(f"source/{source.id}", fingerprint(source))

    def failure_of_entry(self, entry: NodeEntry) -> Failure | None:
        """The last failure to build or verify exactly this."""
        source = self.source_of(entry)
        return self._failure(f"entry/{entry.id}", "" if source is None else fingerprint(source))

    def due(self, failure: Failure | None) -> bool:
        """Whether there is nothing to wait for: no failure, its pause is over, or the room it lacked is
        there."""
        if failure is None or self.now >= failure.next_attempt:
            return True
        return bool(
            failure.reason == reasons.INSUFFICIENT_DISK
            and failure.needed
            and self.disk is not None
            and self.disk.free >= failure.needed
        )

    def _failure(self, subject: str, wanted: str) -> Failure | None:
        found = self.failures.get(subject)
        return found if found is not None and found.fingerprint in ("", wanted) else None


class State(Enum):
    """Where an entry of the spec is."""

    NO_SOURCE = "NoSource"
    UNRESOLVED = "Unresolved"
    MISSING = "Missing"
    BROKEN = "Broken"
    NEWER = "Newer"
    UNVERIFIED = "Unverified"
    READY = "Ready"


def state_of(world: World, entry: NodeEntry) -> tuple[State, Stored | None]:
    """The state of an entry, and the stored entry that it is bound to."""
    source = world.source_of(entry)
    if source is None:
        return State.NO_SOURCE, None
    resolution = world.resolution(source)
    binding = world.ledger.bindings.get(entry.id)
    if binding is not None and resolution is not None:
        current = binding.basis == resolution.basis
    else:  # the source may be gone: what was built from the pinned bytes stays good
        current = (
            binding is not None
            and source.pin.digest not in ("",)
            and binding.source_digest == source.pin.digest
        )
    if binding is None or not current:
        return (State.UNRESOLVED if resolution is None else State.MISSING), None
    stored = world.stored.get(binding.key)
    if stored is None:
        return State.MISSING, None
    if stored.problem_code == reasons.NEWER_FORMAT:
        return State.NEWER, stored
    if stored.problem:
        return State.BROKEN, stored
    verified = world.ledger.verified.get(stored.key)
    return (State.READY if verified is not None and verified >= _doubted(entry) else State.UNVERIFIED), stored


def _doubted(entry: NodeEntry) -> float:
    """When an engine last found the entry's bytes wrong, as a time stamp; 0 if none did."""
    if entry.verified_after is None:
        return 0.0
    try:
        # Whole seconds: a check within the same one may have come before.
        return datetime.fromisoformat(entry.verified_after).timestamp() + 1
    except ValueError:
        return 0.0


def fingerprint(source: NodeSource) -> str:
    """What of a source decides whether an earlier failure still counts."""
    return f"{source.id}@{source.pin.digest}"


def coordinate(entry: NodeEntry) -> str | None:
    """Rank and size of a Layout entry as text."""
    return f"{entry.tensor_rank}/{entry.tensor_size}" if entry.kind == "Layout" else None


Status = dict[str, Any]
