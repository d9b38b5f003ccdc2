"""What to do next, from everything that is seen. Pure: values in, values out, same input, same plan.

Order: room is made first, then sources are resolved, entries built (all coordinates of one component and
tensor size in one pass), stored bytes verified, and the page cache warmed. The executor starts the first
action of every lane that is idle and asks again when it is done, so a plan is never a queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dlo_api.v1alpha1.node_weight_cache import NodeEntry

from dlo_agent import reasons
from dlo_agent.actions import (
    Action,
    Build,
    BuildFiles,
    Evict,
    Forget,
    Quarantine,
    Resolve,
    Sweep,
    Verify,
    Warm,
)
from dlo_agent.references import expiry
from dlo_agent.wanted import Wanted
from dlo_agent.world import State, Stored, World, fingerprint, state_of

#: How long fetched files wait for the build that they are for: of what is listed, and of what may be listed soon.
FETCHED_SECONDS: Final = 86_400.0
FETCHED_IDLE_SECONDS: Final = 900.0
_LEFT_ALONE = ("NewerFormat", "NotAnEntry")


def plan(world: World) -> tuple[Action, ...]:
    """All actions that are due, most urgent first; none while the root cannot be used, and while nothing is known
    none but to sweep what was fetched long ago."""
    if world.storage is not None:
        return ()
    if world.wanted is None:
        return tuple(_fetched(world, None))
    return (
        *_quarantines(world),
        *_expired(world),
        *_under_pressure(world),
        *_leftovers(world),
        *_fetched(world, world.wanted),
        *_resolves(world, world.wanted),
        *_builds(world, world.wanted),
        *_verifies(world),
        *_warms(world),
    )


def still_wanted(action: Action, world: World) -> bool:
    """Whether an action that runs should go on: someone still asks for what it makes."""
    if world.wanted is None:
        return True
    if world.storage is not None:
        return False
    if isinstance(action, Resolve):
        source = world.wanted.sources.get(action.source.id)
        return source is not None and fingerprint(source) == fingerprint(action.source)
    if isinstance(action, Build | BuildFiles):
        source = world.wanted.sources.get(action.source.id)
        listed = not world.wanted.entry_ids.isdisjoint(action.entry_ids)
        return listed and source is not None and source.pin.digest in ("", action.digest)
    if isinstance(action, Verify | Warm):
        return action.key in world.ledger.held
    return True


def within_warm_budget(world: World) -> tuple[tuple[Stored, ...], frozenset[str]]:
    """The stored entries to keep in the page cache, in the spec's order, and the keys that do not fit."""
    chosen: dict[str, Stored] = {}
    beyond: set[str] = set()
    left = world.policy.warm_budget_bytes
    if left == 0:
        return (), frozenset()
    for _, stored in _bound(world, State.READY):
        if stored.key in chosen or stored.key in beyond:
            continue
        if stored.bytes <= left:
            chosen[stored.key] = stored
            left -= stored.bytes
        else:
            beyond.add(stored.key)
    return tuple(chosen.values()), frozenset(beyond)


def _bound(world: World, *states: State) -> Iterator[tuple[NodeEntry, Stored]]:
    """The entries in one of ``states`` that have a stored entry, with it."""
    for entry in world.wanted.entries if world.wanted is not None else ():
        state, stored = state_of(world, entry)
        if state in states and stored is not None:
            yield entry, stored


def _ids(world: World, key: str) -> tuple[str, ...]:
    return tuple(sorted(each for each, binding in world.ledger.bindings.items() if binding.key == key))


def _quarantines(world: World) -> Iterator[Quarantine]:
    seen: set[str] = set()
    for _, stored in _bound(world, State.BROKEN):
        if stored.key not in seen and world.due(world.failures.get(f"key/{stored.key}")):
            seen.add(stored.key)
            yield Quarantine(
                f"it cannot be used: {stored.problem}", stored.key, _ids(world, stored.key), stored.problem
            )


def _expired(world: World) -> Iterator[Evict]:
    """Released entries whose retention is over and that nobody reads, longest unused first."""
    over = [
        stored
        for stored in world.stored.values()
        if (at := expiry(world.ledger, stored.key)) is not None and at <= world.now
    ]
    for stored in _evictable(world, over):
        yield Evict("nothing has referred to it for its retention", stored.key, "Retention")


def _under_pressure(world: World) -> Iterator[Evict]:
    """Entries that no object of ours ever listed go only where a wanted one lacks their room.

    Only once every other wanted entry is bound: until then one of them may be a wanted one that is not
    recognised yet. Released ones keep their retention.
    """
    assert world.wanted is not None  # noqa: S101 - plan() has checked it
    short = 0
    for entry in world.wanted.entries:
        state, _ = state_of(world, entry)
        if state not in (State.MISSING, State.UNRESOLVED, State.NO_SOURCE):
            continue
        failure = world.failure_of_entry(entry)
        if failure is None or failure.reason not in reasons.SPACE or not failure.needed:
            return
        short = max(short, failure.needed - (world.disk.free if world.disk is not None else 0))
    if short <= 0:
        return
    ours = {b.key for b in world.ledger.bindings.values() if b.uid == world.wanted.uid}
    strangers = [
        stored
        for stored in world.stored.values()
        if stored.key not in ours and stored.key not in world.ledger.released
    ]
    candidates = list(_evictable(world, strangers))
    if sum(stored.bytes for stored in candidates) < short:
        return  # it would not help, so nothing goes
    for stored in candidates:
        if short <= 0:
            return
        short -= stored.bytes
        yield Evict("a wanted entry needs its room and nobody refers to it", stored.key, "Pressure")


def _evictable(world: World, found: Iterable[Stored]) -> Iterator[Stored]:
    for stored in sorted(found, key=lambda each: (_last_use(world, each), each.key)):
        busy = not world.due(world.failures.get(f"key/{stored.key}"))
        if not stored.leased and not busy and stored.problem_code not in _LEFT_ALONE:
            yield stored


def _last_use(world: World, stored: Stored) -> float:
    return max(world.ledger.used.get(stored.key, 0.0), stored.published)


def _leftovers(world: World) -> Iterator[Forget]:
    assert world.wanted is not None  # noqa: S101 - plan() has checked it
    working = {entry_id for action in world.running for entry_id in action.entry_ids}
    for entry_id in sorted(world.headway.keys() - world.wanted.entry_ids - working):
        yield Forget("it is no longer listed", entry_id)


def _fetched(world: World, wanted: Wanted | None) -> Iterator[Sweep]:
    """What was fetched and is not built from: at once a day old, and soon where nothing waits for it."""
    if world.fetched is None or any(action.lane == "build" for action in world.running):
        return
    waits = (
        wanted is None
        or any(world.resolution(source) is None for source in wanted.sources.values())
        or any(state_of(world, entry)[0] in (State.MISSING, State.UNRESOLVED) for entry in wanted.entries)
    )
    after = FETCHED_SECONDS if waits else FETCHED_IDLE_SECONDS
    if world.fetched.idle_seconds >= after:
        yield Sweep("nothing was built of what was fetched", after)


def _resolves(world: World, wanted: Wanted) -> Iterator[Resolve]:
    for source in wanted.sources.values():
        if world.resolution(source) is None and world.due(world.failure_of_source(source)):
            why = (
                "it is pinned and not looked at yet" if source.pin.digest else "this node resolves it for all"
            )
            yield Resolve(why, source)


def _builds(world: World, wanted: Wanted) -> Iterator[Build | BuildFiles]:
    groups: dict[tuple[object, ...], list[NodeEntry]] = {}
    # What is just being checked or set aside may be gone already; why it went is known only at the end.
    judged = {each for act in world.running if isinstance(act, Verify | Quarantine) for each in act.entry_ids}
    for entry in wanted.entries:
        state, _ = state_of(world, entry)
        if state is State.MISSING and entry.id not in judged and world.due(world.failure_of_entry(entry)):
            groups.setdefault(_pass_of(entry), []).append(entry)
    for entries in groups.values():
        source = wanted.sources[entries[0].source_id]
        resolution = world.resolution(source)
        if resolution is None:
            continue
        found = resolution.digest, str(resolution.facts.get("revision", ""))
        if entries[0].kind == "Files":
            yield BuildFiles("it is listed and not there", source, entries[0], *found)
        else:
            yield Build("listed and not there", source, tuple(entries), *found)


def _pass_of(entry: NodeEntry) -> tuple[object, ...]:
    """What one pass over a source can build together."""
    if entry.kind == "Files":
        return (entry.id,)
    return (
        entry.source_id,
        entry.component,
        entry.layout,
        entry.dtype,
        entry.quantization,
        entry.tensor_size,
    )


def _verifies(world: World) -> Iterator[Verify]:
    seen: set[str] = set()
    for entry, stored in _bound(world, State.UNVERIFIED):
        if stored.key not in seen and world.due(world.failure_of_entry(entry)):
            seen.add(stored.key)
            why = (
                "nobody has checked its bytes yet"
                if entry.verified_after is None
                else "an engine doubts its bytes"
            )
            yield Verify(why, stored.key, _ids(world, stored.key))
    aged = [
        (world.ledger.verified[stored.key], stored.key)
        for entry, stored in _bound(world, State.READY)
        if world.ledger.verified[stored.key] + world.policy.scrub_seconds <= world.now
        and world.due(world.failure_of_entry(entry))
    ]
    for _, key in sorted(set(aged)):
        yield Verify("its last check is too long ago", key, _ids(world, key))


def _warms(world: World) -> Iterator[Warm]:
    chosen, _ = within_warm_budget(world)
    for stored in chosen:
        last = world.warmed.get(stored.key)
        cold = last is None or last + world.policy.warm_again_seconds <= world.now
        if cold and world.due(world.failures.get(f"key/{stored.key}")):
            yield Warm("engines start from it", stored.key, _ids(world, stored.key))
