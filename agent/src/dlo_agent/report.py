"""The status of the NodeWeightCache, from everything that is seen. Pure.

An unchanged world gives an equal status, so that nothing is written. A number that is not known is absent,
never 0. What moves all the time is stepped: free bytes by one per cent, last use by the hour; how often bytes
done move is decided by whoever fills in ``headway``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from dlo_api import conditions
from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource

from dlo_agent import reasons
from dlo_agent.actions import Build, BuildFiles, Resolve, Verify
from dlo_agent.planner import within_warm_budget
from dlo_agent.wanted import Unreadable, Wanted
from dlo_agent.world import (
    Failure,
    Headway,
    NodeFacts,
    State,
    Status,
    StorageProblem,
    Stored,
    World,
    coordinate,
    state_of,
)

_MESSAGE: Final = 256
_CONDITION_MESSAGE: Final = 1024
_STEPS: Final = 100


def status_of(world: World, facts: NodeFacts, previous: Mapping[str, Any] | None) -> Status:
    """The status for the generation in ``world``; ``previous`` is the one before, whose transition times
    stay."""
    assert world.wanted is not None  # noqa: S101 - without an object there is nothing to report on
    wanted = world.wanted
    beyond = within_warm_budget(world)[1]
    entries = [_entry(world, entry, beyond) for entry in wanted.entries]
    entries += [_not_understood(each) for each in wanted.unreadable_entries]
    sources = [_source(world, source) for source in wanted.sources.values()]
    sources += [
        {"id": each.id, "reason": reasons.NOT_UNDERSTOOD, "message": each.message}
        for each in wanted.unreadable_sources
    ]
    status: Status = _bare(
        {
            "observedGeneration": wanted.generation,
            "agentVersion": facts.agent_version,
            "bootID": facts.boot_id,
            "root": _root(world, facts, (previous or {}).get("root") or {}),
            "memory": {
                "totalBytes": facts.memory_bytes,
                "warmBudgetBytes": world.policy.warm_budget_bytes,
                "lockLimitBytes": facts.lock_limit_bytes,
                "maxMapCount": facts.max_map_count,
            },
            "sources": sources,
            "entries": entries,
            "conditions": _conditions(world, wanted, sources, entries, previous),
        }
    )
    return status


def stamp(seconds: float) -> str:
    """A time as RFC 3339 in UTC, whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _root(world: World, facts: NodeFacts, before: Mapping[str, Any]) -> Status:
    root: Status = {"path": facts.root_path, "gid": facts.gid}
    if world.storage is not None or world.disk is None:
        return root
    disk = world.disk
    step = max(1, disk.total // _STEPS)
    building = [
        headway.total
        for action in world.running
        if isinstance(action, Build | BuildFiles)
        for each in action.entry_ids
        if (headway := world.headway.get(each)) is not None and headway.phase == "Building"
    ]
    return root | {
        "filesystem": disk.filesystem,
        "totalBytes": disk.total,
        "freeBytes": _stepped(disk.free, step, before.get("freeBytes")),
        "reservedBytes": sum(building),
        "usedBytes": sum(stored.bytes for stored in world.stored.values()),
    }


def _stepped(free: int, step: int, before: int | None) -> int:
    """Free bytes in whole steps, never more than there are. Down at once, up only by two: a disk whose free bytes
    move to and fro over the edge of a step is not reported each time."""
    if before is not None and before % step == 0 and before <= free < before + 2 * step:
        return before
    return free // step * step


def _source(world: World, source: NodeSource) -> Status:
    resolution = world.resolution(source)
    if resolution is not None:
        return {"id": source.id, **resolution.facts}
    failure = world.failure_of_source(source)
    if failure is not None:
        return {"id": source.id, "reason": failure.reason, "message": failure.message[:_MESSAGE]}
    if any(isinstance(each, Resolve) and each.source.id == source.id for each in world.running):
        return {
            "id": source.id,
            "reason": reasons.HASHING,
            "message": "its files are read and their digests computed",
        }
    return {"id": source.id}


def _entry(world: World, entry: NodeEntry, beyond: Collection[str]) -> Status:
    state, stored = state_of(world, entry)
    failure = world.failure_of_entry(entry)
    found: Status = {
        "id": entry.id,
        "kind": entry.kind,
        "component": entry.component,
        "coordinate": coordinate(entry),
        **_progress(world, entry, state, stored, failure),
    }
    if stored is not None and state in (State.READY, State.UNVERIFIED):
        found |= _stored(world, stored)
    if state is State.READY and stored is not None and stored.key in beyond:
        found |= {
            "reason": reasons.INSUFFICIENT_HOST_MEMORY,
            "message": "it is not kept in the page cache: the agent's warm budget is used up",
        }
    if failure is not None and state is not State.READY:
        found |= {"attempts": failure.attempts, "nextAttempt": stamp(failure.next_attempt)}
    return found


def _stored(world: World, stored: Stored) -> Status:
    verified, used = world.ledger.verified.get(stored.key), world.ledger.used.get(stored.key)
    return {
        "inputKey": stored.key,
        "contentDigest": stored.content_digest,
        "manifestSha256": stored.manifest_sha256,
        "bytes": stored.bytes,
        "lastVerified": None if verified is None else stamp(verified),
        "lastUsed": None if used is None else stamp(used),
    }


def _progress(
    world: World, entry: NodeEntry, state: State, stored: Stored | None, failure: Failure | None
) -> Status:
    """Phase, reason, message, and how far."""
    if world.storage is not None:
        message = world.storage.message[:_MESSAGE]
        found: Status = {"phase": "Pending", "reason": world.storage.reason, "message": message}
    elif state is State.READY:
        found = {"phase": "Ready"}
    elif state is State.NO_SOURCE:
        message = f"the spec lists no source {entry.source_id}"
        found = {"phase": "Failed", "reason": reasons.SOURCE_NOT_FOUND, "message": message}
    elif state is State.NEWER:
        message = "a later release made the entry that is there; it is left alone"
        found = {"phase": "Failed", "reason": reasons.NEWER_FORMAT, "message": message}
    elif state is State.BROKEN:
        message = (stored.problem if stored is not None else "")[:_MESSAGE]
        found = {"phase": "Quarantined", "reason": reasons.INTEGRITY_FAILED, "message": message}
    elif state is State.UNRESOLVED:
        source = world.source_of(entry)
        found = {"phase": "Pending", **_why(None if source is None else world.failure_of_source(source))}
    elif state is State.UNVERIFIED:
        checked = any(isinstance(each, Verify) and entry.id in each.ids for each in world.running)
        found = {"phase": "Verifying", **({} if checked else _why(failure))}
    else:
        found = _missing(world, entry, failure)
    return found


def _missing(world: World, entry: NodeEntry, failure: Failure | None) -> Status:
    """An entry that is not there: built, waiting, or failed."""
    if any(entry.id in each.entry_ids for each in world.running if isinstance(each, Build | BuildFiles)):
        # Why it is built again stays said until it is checked; an earlier failure to build is not news now.
        why = _why(failure) if failure is not None and failure.reason == reasons.INTEGRITY_FAILED else {}
        headway = world.headway.get(entry.id)
        if headway is None or headway.phase != "Building":
            known = {} if headway is None or not headway.key else _how_far(headway)
            return {"phase": "Fetching", **known, **why}
        return {"phase": "Building", **_how_far(headway), **why}
    if failure is None:
        return {"phase": "Pending"}
    quarantined = failure.reason == reasons.INTEGRITY_FAILED
    return {"phase": "Quarantined" if quarantined else "Failed", **_why(failure)}


def _how_far(headway: Headway) -> Status:
    return {"bytes": headway.total, "doneBytes": headway.done}


def _why(failure: Failure | None) -> Status:
    return {} if failure is None else {"reason": failure.reason, "message": failure.message[:_MESSAGE]}


def _not_understood(each: Unreadable) -> Status:
    return {
        "id": each.id,
        "kind": each.kind,
        "phase": "Failed",
        "reason": reasons.NOT_UNDERSTOOD,
        "message": each.message,
    }


def _conditions(
    world: World,
    wanted: Wanted,
    sources: Sequence[Status],
    entries: Sequence[Status],
    previous: Mapping[str, Any] | None,
) -> list[Status]:
    before = {each["type"]: each for each in (previous or {}).get("conditions") or ()}
    judged = {
        conditions.READY: _ready(world.storage, sources, entries),
        conditions.STORAGE_HEALTHY: _storage(world.storage),
        conditions.SPACE_AVAILABLE: _space(world.storage, entries),
    }
    found = []
    for kind in conditions.NODE_CONDITIONS:
        status, reason, message = judged[kind]
        last = before.get(kind)
        same = last is not None and last.get("status") == status
        found.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message[:_CONDITION_MESSAGE],
                "lastTransitionTime": last["lastTransitionTime"] if last and same else stamp(world.now),
                "observedGeneration": wanted.generation,
            }
        )
    return found


_Judgement = tuple[str, str, str]


def _ready(
    storage: StorageProblem | None, sources: Sequence[Status], entries: Sequence[Status]
) -> _Judgement:
    if storage is not None:
        return "False", storage.reason, storage.message
    for each in sources:
        if "reason" in each:
            return "False", each["reason"], f"source {each['id']}: {each.get('message', '')}"
    waiting = [each for each in entries if each["phase"] != "Ready"]
    for each in waiting:
        if "reason" in each:
            return "False", each["reason"], f"entry {each['id']}: {each.get('message', '')}"
    if waiting or any("digest" not in each for each in sources):
        return "False", "Pending", "entries are being built or checked"
    return "True", "Ready", "every listed entry is there and checked"


def _storage(storage: StorageProblem | None) -> _Judgement:
    if storage is not None:
        return "False", storage.reason, storage.message
    return "True", "Healthy", ""


def _space(storage: StorageProblem | None, entries: Sequence[Status]) -> _Judgement:
    if storage is not None:
        return "Unknown", storage.reason, "the cache root cannot be looked at"
    for each in entries:
        if each.get("reason") in reasons.SPACE:
            return "False", each["reason"], each.get("message", "")
    return "True", "Available", ""


def _bare(value: Any) -> Any:
    """Without what is not known, and without empty lists: a server drops those, so they would be written
    again after every restart."""
    if isinstance(value, dict):
        kept = {name: _bare(item) for name, item in value.items() if item is not None}
        return {name: item for name, item in kept.items() if item != []}
    if isinstance(value, list):
        return [_bare(item) for item in value]
    return value
