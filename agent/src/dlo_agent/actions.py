"""The things the agent can do, as values: what the planner asks for and the executor carries out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource

Lane = Literal["room", "build", "care"]


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do and why, in words for the log."""

    why: str

    @property
    def lane(self) -> Lane:
        """Where it runs; every lane does one thing at a time."""
        return "care"

    @property
    def entry_ids(self) -> tuple[str, ...]:
        """The entries of the spec that it is for."""
        return ()


@dataclass(frozen=True, slots=True)
class Resolve(Action):
    """Find out what a source is."""

    source: NodeSource

    @property
    def lane(self) -> Lane:
        return "build"


@dataclass(frozen=True, slots=True)
class Build(Action):
    """Build entries that one pass over the source makes: Layout entries of one component and tensor size.

    ``digest`` and ``revision`` are what the source was resolved to.
    """

    source: NodeSource
    entries: tuple[NodeEntry, ...]
    digest: str
    revision: str = ""

    @property
    def lane(self) -> Lane:
        return "build"

    @property
    def entry_ids(self) -> tuple[str, ...]:
        return tuple(entry.id for entry in self.entries)


@dataclass(frozen=True, slots=True)
class BuildFiles(Action):
    """Copy the files of one Files entry."""

    source: NodeSource
    entry: NodeEntry
    digest: str
    revision: str = ""

    @property
    def lane(self) -> Lane:
        return "build"

    @property
    def entry_ids(self) -> tuple[str, ...]:
        return (self.entry.id,)


@dataclass(frozen=True, slots=True)
class Verify(Action):
    """Check every byte of a stored entry; one that fails is set aside."""

    key: str
    ids: tuple[str, ...]

    @property
    def entry_ids(self) -> tuple[str, ...]:
        return self.ids


@dataclass(frozen=True, slots=True)
class Warm(Action):
    """Bring a stored entry into the page cache."""

    key: str
    ids: tuple[str, ...]

    @property
    def entry_ids(self) -> tuple[str, ...]:
        return self.ids


@dataclass(frozen=True, slots=True)
class Quarantine(Action):
    """Set aside a stored entry that cannot be used."""

    key: str
    ids: tuple[str, ...]
    message: str

    @property
    def lane(self) -> Lane:
        return "room"

    @property
    def entry_ids(self) -> tuple[str, ...]:
        return self.ids


@dataclass(frozen=True, slots=True)
class Evict(Action):
    """Remove a stored entry that nobody wants or uses; ``cause`` is ``Retention`` or ``Pressure``."""

    key: str
    cause: Literal["Retention", "Pressure"]

    @property
    def lane(self) -> Lane:
        return "room"


@dataclass(frozen=True, slots=True)
class Sweep(Action):
    """Remove fetched files that nobody holds and nobody has written to for ``idle_seconds``."""

    idle_seconds: float

    @property
    def lane(self) -> Lane:
        return "room"


@dataclass(frozen=True, slots=True)
class Forget(Action):
    """Remove what is left of an entry that is no longer listed: its progress."""

    entry_id: str

    @property
    def lane(self) -> Lane:
        return "room"
