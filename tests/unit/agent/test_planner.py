"""What is planned in which world: tables, no disk and no clock."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_agent import reasons
from dlo_agent.actions import Action, Build, Resolve, Verify, Warm
from dlo_agent.planner import plan, still_wanted, within_warm_budget
from dlo_agent.references import Release
from dlo_agent.world import Disk, Policy, StorageProblem, World
from unit.agent.worlds import (
    DIGEST,
    GIB,
    NOW,
    binding,
    failure,
    files,
    key,
    layout,
    ledger,
    stored,
    wanted,
    world,
)

PAIR = (layout(0), layout(1))
BOUND = {"a02": binding("a"), "a12": binding("b")}


def said(action: Action) -> str:
    """An action in a word: its kind and what it is about."""
    found: Any = action
    about = getattr(found, "key", "")[:1] or "+".join(action.entry_ids) or getattr(found, "entry_id", "")
    return f"{type(action).__name__} {about}".strip()


def planned(found: World) -> list[str]:
    """The plan in words."""
    return [said(action) for action in plan(found)]


CASES: dict[str, tuple[World, list[str]]] = {
    "no object: nothing, above all no eviction": (
        world(None, ledger(released={"a": Release(0, 0)}), stored("a")),
        [],
    ),
    "the root cannot be used: nothing": (
        world(wanted(*PAIR), ledger(), storage=StorageProblem("RootNotMounted", "")),
        [],
    ),
    "a source comes before its entries": (world(wanted(*PAIR), ledger(resolved=False)), ["Resolve"]),
    "all coordinates of a component in one pass, files apart": (
        world(wanted(*PAIR, files()), ledger()),
        ["Build a02+a12", "BuildFiles f0"],
    ),
    "another tensor size is another pass": (
        world(wanted(layout(0), layout(0, 4), layout(1)), ledger()),
        ["Build a02+a12", "Build a04"],
    ),
    "only what lacks": (
        world(wanted(*PAIR), ledger(BOUND, verified="a"), stored("a")),
        ["Build a12"],
    ),
    "checked before it counts": (
        world(wanted(*PAIR), ledger(BOUND, verified="a"), stored("a"), stored("b")),
        ["Verify b"],
    ),
    "all is well": (world(wanted(*PAIR), ledger(BOUND, verified="ab"), stored("a"), stored("b")), []),
    "a bad entry is set aside": (
        world(
            wanted(layout(0)),
            ledger({"a02": binding("a")}, verified="a"),
            stored("a", problem="cut", problem_code="Corrupt"),
        ),
        ["Quarantine a"],
    ),
    "a later format is left alone": (
        world(
            wanted(layout(0)),
            ledger({"a02": binding("a")}),
            stored("a", problem="later", problem_code="NewerFormat"),
        ),
        [],
    ),
    "a failure waits": (
        world(wanted(layout(0)), ledger(), failures={"entry/a02": failure()}),
        [],
    ),
    "its pause is over": (
        world(wanted(layout(0)), ledger(), failures={"entry/a02": failure(after=0)}),
        ["Build a02"],
    ),
    "one waits, its neighbour does not": (
        world(wanted(*PAIR), ledger(), failures={"entry/a02": failure()}),
        ["Build a12"],
    ),
    "a failure under another pin does not count": (
        world(wanted(layout(0)), ledger(), failures={"entry/a02": failure(pin="ff")}),
        ["Build a02"],
    ),
    "a source waits": (
        world(wanted(), ledger(resolved=False), failures={"source/5e": failure("SourceNotFound")}),
        [],
    ),
    "room that is there again ends the wait": (
        world(
            wanted(layout(0)),
            ledger(),
            failures={"entry/a02": failure(reasons.INSUFFICIENT_DISK, needed=10 * GIB)},
        ),
        ["Build a02"],
    ),
    "built from the pinned bytes, the source is looked at for its facts alone": (
        world(
            wanted(layout(0), pin=DIGEST),
            ledger({"a02": binding("a")}, resolved=False, verified="a"),
            stored("a"),
        ),
        ["Resolve"],
    ),
    "another pin is another entry": (
        world(
            wanted(layout(0), pin="ff"),
            ledger({"a02": binding("a")}, verified="a"),
            stored("a"),
        ),
        ["Resolve"],
    ),
    "what is being checked is not built meanwhile": (
        world(
            wanted(layout(0)),
            ledger({"a02": binding("a")}, verified="a"),
            running=(Verify("", key("a"), ("a02",)),),
        ),
        [],
    ),
    "an aged check is made again": (
        world(
            wanted(layout(0)),
            ledger({"a02": binding("a")}, verified="a"),
            stored("a"),
            policy=Policy(scrub_seconds=0),
        ),
        ["Verify a"],
    ),
    "warmed in the spec's order, within the budget": (
        world(
            wanted(*PAIR),
            ledger(BOUND, verified="ab"),
            stored("a"),
            stored("b"),
            policy=Policy(warm_budget_bytes=GIB + 1),
        ),
        ["Warm a"],
    ),
    "warm enough": (
        world(
            wanted(layout(0)),
            ledger({"a02": binding("a")}, verified="a"),
            stored("a"),
            policy=Policy(warm_budget_bytes=GIB),
            warmed={key("a"): NOW},
        ),
        [],
    ),
}

NEEDS = {"entry/a02": failure(reasons.INSUFFICIENT_DISK, needed=11 * GIB)}
EVICTIONS: dict[str, tuple[World, list[str]]] = {
    "the retention is over": (
        world(wanted(), ledger(released={"a": Release(NOW - 100, 100)}), stored("a")),
        ["Evict a"],
    ),
    "a second too early": (
        world(wanted(), ledger(released={"a": Release(NOW - 99, 100)}), stored("a")),
        [],
    ),
    "somebody reads it": (
        world(wanted(), ledger(released={"a": Release(0, 0)}), stored("a", leased=True)),
        [],
    ),
    "a reader was the last reference": (
        world(wanted(), ledger(released={"a": Release(0, 100)}, used={"a": NOW - 99}), stored("a")),
        [],
    ),
    "another id still stands for it": (
        world(
            wanted(layout(0)),
            ledger({"a02": binding("a")}, released={"a": Release(0, 0)}, verified="a"),
            stored("a"),
        ),
        [],
    ),
    "longest unused first": (
        world(
            wanted(),
            ledger(
                released={"a": Release(0, 10), "b": Release(0, 10), "c": Release(0, 10)},
                used={"a": 500.0, "b": 300.0},
            ),
            *(stored(letter, published=400.0) for letter in "abc"),
        ),
        ["Evict b", "Evict c", "Evict a"],
    ),
    "nobody's entry stays while there is room": (world(wanted(), ledger(), stored("a")), []),
    "nobody's entry makes room": (
        world(wanted(layout(0)), ledger(), stored("a"), failures=NEEDS),
        ["Evict a"],
    ),
    "no more than is needed": (
        world(
            wanted(layout(0)),
            ledger(used={"b": 1.0}),
            stored("a"),
            stored("b"),
            stored("c"),
            failures=NEEDS,
        ),
        ["Evict a"],
    ),
    "not if it would not help": (
        world(wanted(layout(0)), ledger(), stored("a", bytes=GIB - 1), failures=NEEDS),
        [],
    ),
    "an earlier object's entry makes room only under pressure": (
        world(wanted(layout(0)), ledger({"b9": binding("a", uid="u0")}), stored("a"), failures=NEEDS),
        ["Evict a"],
    ),
    "a listed one never makes room": (
        world(
            wanted(layout(0), layout(1)),
            ledger({"a12": binding("a")}, verified="a"),
            stored("a"),
            failures=NEEDS,
        ),
        [],
    ),
    "a released one keeps its retention under pressure": (
        world(wanted(layout(0)), ledger(released={"a": Release(NOW, 100)}), stored("a"), failures=NEEDS),
        [],
    ),
    "not while a wanted one may be among them": (
        world(wanted(layout(0), layout(0, 4)), ledger(), stored("a"), failures=NEEDS),
        ["Build a04"],
    ),
    "a later format is nobody's to remove": (
        world(wanted(layout(0)), ledger(), stored("a", problem_code="NewerFormat"), failures=NEEDS),
        [],
    ),
    "busy a moment ago": (
        world(
            wanted(),
            ledger(released={"a": Release(0, 0)}),
            stored("a"),
            failures={f"key/{key('a')}": failure("Busy")},
        ),
        [],
    ),
}


@pytest.mark.parametrize("case", [*CASES, *EVICTIONS])
def test_a_world_gives_this_plan(case: str) -> None:
    """The table."""
    found, expected = (CASES | EVICTIONS)[case]
    assert planned(found) == expected
    assert planned(found) == expected, "a second look gives the same plan"


def test_room_is_made_before_anything_is_built() -> None:
    """Evictions come first."""
    found = world(wanted(*PAIR), ledger(released={"c": Release(0, 0)}), stored("c"))
    assert planned(found) == ["Evict c", "Build a02+a12"]


def test_what_does_not_fit_the_warm_budget_is_named() -> None:
    """A large entry does not keep a smaller one behind it out."""
    found = world(
        wanted(*PAIR),
        ledger(BOUND, verified="ab"),
        stored("a", bytes=3 * GIB),
        stored("b"),
        policy=Policy(warm_budget_bytes=2 * GIB),
    )
    chosen, beyond = within_warm_budget(found)
    assert [each.key for each in chosen] == [key("b")]
    assert beyond == {key("a")}


def test_running_work_goes_on_only_while_somebody_asks_for_it() -> None:
    """A build whose entries are all unlisted, or whose source has another pin, is called off."""
    source = wanted().sources["5e"]
    entry = wanted(layout(0)).entries[0]
    build = Build("", source, (entry,), DIGEST)
    assert still_wanted(build, world(wanted(layout(0)), ledger()))
    assert still_wanted(build, world(wanted(layout(0), pin=DIGEST), ledger()))
    assert still_wanted(build, world(None, ledger())), "not knowing is no reason to stop"
    assert not still_wanted(build, world(wanted(layout(1)), ledger()))
    assert not still_wanted(build, world(wanted(layout(0), pin="ff"), ledger()))
    assert not still_wanted(Resolve("", source), world(wanted(pin="ff"), ledger()))
    warm = Warm("", key("a"), ("a02",))
    assert still_wanted(warm, world(wanted(layout(0)), ledger({"a02": binding("a")})))
    assert not still_wanted(warm, world(wanted(), ledger()))


@pytest.mark.parametrize(
    ("reason", "attempts", "jitter", "seconds"),
    [
        ("BuildFailed", 1, 0.0, 5.0),
        ("BuildFailed", 2, 0.0, 10.0),
        ("BuildFailed", 3, 1.0, 25.0),
        ("BuildFailed", 10_000, 0.0, 300.0),
        ("SourceUnauthorized", 1, 0.0, 60.0),
        ("SourceUnauthorized", 9, 0.0, 900.0),
        ("Busy", 9, 0.0, 30.0),
        ("IntegrityFailed", 1, 1.0, 0.0),
        ("IntegrityFailed", 2, 0.0, 10.0),
    ],
)
def test_pauses_grow_with_a_bound(reason: str, attempts: int, jitter: float, seconds: float) -> None:
    """By kind of failure; jitter adds up to a quarter."""
    assert reasons.pause_seconds(reason, attempts, jitter) == seconds


def test_no_disk_facts_end_no_wait() -> None:
    """A disk that cannot be looked at is no room."""
    found = world(wanted(layout(0)), ledger(), failures=NEEDS, disk=None)
    assert planned(found) == []
    assert planned(world(wanted(layout(0)), ledger(), failures=NEEDS, disk=Disk(0, 0))) == []
