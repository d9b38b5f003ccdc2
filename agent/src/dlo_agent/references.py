"""Which entries of the root are kept, for whom and until when: the agent's persisted memory as values. Pure.

What decides an eviction is only here. An entry loses its reference when a later generation of the *same*
NodeWeightCache (by UID) no longer lists it, or when its id is bound to another key; then it stays for its
retention. An object that is absent, stale, or new under an old name takes no reference away.
Must not touch a disk: ``ledger`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dlo_agent.wanted import Wanted

VERSION: Final = 1
HOUR_SECONDS: Final = 3600


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a source turned out to be. ``basis`` stands for its files and the layouts that cut them.

    ``pin`` is the digest that was asked for, "" where this node resolved for all. ``facts`` are the fields
    of the source's status. ``layouts`` are the digests of the layouts that this release had, by class, "" for
    none.
    """

    digest: str
    basis: str
    pin: str
    facts: Mapping[str, Any]
    layouts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Binding:
    """The stored entry that an entry id stands for; ``uid`` is of the object that listed it last."""

    key: str
    basis: str
    source_digest: str
    retention_seconds: int
    uid: str


@dataclass(frozen=True, slots=True)
class Release:
    """A stored entry whose last reference went at ``at`` (seconds since 1970)."""

    at: float
    retention_seconds: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that outlives the agent's process. Times are seconds since 1970, by key."""

    uid: str = ""
    generation: int = 0
    resolutions: Mapping[str, Resolution] = field(default_factory=dict)
    bindings: Mapping[str, Binding] = field(default_factory=dict)
    released: Mapping[str, Release] = field(default_factory=dict)
    verified: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)

    @property
    def held(self) -> frozenset[str]:
        """Keys that some id is bound to."""
        return frozenset(binding.key for binding in self.bindings.values())


def observe(ledger: Ledger, wanted: Wanted | None, now: float) -> Ledger:
    """The ledger after seeing an object (None: there is none): references kept, renewed or released."""
    if wanted is None or (wanted.uid == ledger.uid and wanted.generation < ledger.generation):
        return ledger
    same = wanted.uid == ledger.uid
    listed = wanted.entry_ids
    bindings: dict[str, Binding] = {}
    lost: list[Binding] = []
    for entry_id, binding in ledger.bindings.items():
        entry = wanted.entry(entry_id)
        if entry is not None:
            retention = entry.retention_seconds
            bindings[entry_id] = replace(binding, uid=wanted.uid, retention_seconds=retention)
        elif entry_id not in listed and same and binding.uid == wanted.uid:
            lost.append(binding)
        else:
            bindings[entry_id] = binding
    found = replace(
        ledger,
        uid=wanted.uid,
        generation=wanted.generation,
        bindings=bindings,
        resolutions=_still_wanted(ledger.resolutions, wanted),
    )
    return _released(found, lost, now)


def bind(ledger: Ledger, entry_id: str, binding: Binding, now: float) -> Ledger:
    """The ledger with ``entry_id`` standing for another stored entry; the earlier one is released."""
    before = ledger.bindings.get(entry_id)
    found = replace(ledger, bindings={**ledger.bindings, entry_id: binding})
    return _released(found, [before] if before is not None and before.key != binding.key else [], now)


def resolve(ledger: Ledger, source_id: str, resolution: Resolution) -> Ledger:
    """The ledger with a source resolved."""
    return replace(ledger, resolutions={**ledger.resolutions, source_id: resolution})


def verify(ledger: Ledger, key: str, now: float) -> Ledger:
    """The ledger with all bytes of ``key`` found right."""
    return replace(ledger, verified={**ledger.verified, key: now})


def unverify(ledger: Ledger, key: str) -> Ledger:
    """The ledger with ``key`` no longer trusted."""
    return replace(ledger, verified={each: at for each, at in ledger.verified.items() if each != key})


def use(ledger: Ledger, keys: frozenset[str], now: float) -> Ledger:
    """The ledger with readers seen on ``keys``, by the hour, so that it changes no more often."""
    hour = now - now % HOUR_SECONDS
    if all(ledger.used.get(key) == hour for key in keys):
        return ledger
    return replace(ledger, used={**ledger.used, **dict.fromkeys(keys, hour)})


def forget(ledger: Ledger, present: frozenset[str]) -> Ledger:
    """The ledger without memory of stored entries that are neither ``present`` nor bound."""
    keep = present | ledger.held
    if all(key in keep for each in (ledger.released, ledger.verified, ledger.used) for key in each):
        return ledger
    return replace(
        ledger,
        released={key: value for key, value in ledger.released.items() if key in keep},
        verified={key: value for key, value in ledger.verified.items() if key in keep},
        used={key: value for key, value in ledger.used.items() if key in keep},
    )


def expiry(ledger: Ledger, key: str) -> float | None:
    """When a released entry may go: its retention counts from its last reference, a reader being one."""
    release = ledger.released.get(key)
    if release is None or key in ledger.held:
        return None
    return max(release.at, ledger.used.get(key, 0.0)) + release.retention_seconds


def _released(ledger: Ledger, lost: list[Binding], now: float) -> Ledger:
    released = {key: value for key, value in ledger.released.items() if key not in ledger.held}
    for binding in lost:
        if binding.key in ledger.held:
            continue
        before = released.get(binding.key)
        longest = max(binding.retention_seconds, before.retention_seconds if before else 0)
        released[binding.key] = Release(now, longest)
    return replace(ledger, released=released)


def _still_wanted(resolutions: Mapping[str, Resolution], wanted: Wanted) -> dict[str, Resolution]:
    """The resolutions that answer what is asked now.

    A pin that appears with the digest found here changes nothing; one that goes away asks to look again.
    """
    kept = {}
    for source_id, resolution in resolutions.items():
        source = wanted.sources.get(source_id)
        if source is None:
            continue
        if source.pin.digest and source.pin.digest == resolution.digest:
            kept[source_id] = replace(resolution, pin=source.pin.digest)
        elif not source.pin.digest and not resolution.pin:
            kept[source_id] = resolution
    return kept
