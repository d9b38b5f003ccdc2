"""Killed after any API write of a full life, a fresh operator brings everything to the same end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from dlo_kube.gateway import Object
from fakes.kube import Call
from unit.operator.world import ALL, World

WRITES = frozenset({"create", "apply", "apply_status", "delete"})
_VOLATILE = frozenset(
    {"uid", "resourceVersion", "generation", "creationTimestamp", "lastTransitionTime", "observedGeneration"}
)


class Killed(BaseException):
    """The process is gone; no handler of its own may see it."""


def delete(world: World) -> None:
    """The user deletes it."""
    world.delete()


LIFE: tuple[tuple[str, Callable[[World], None]], ...] = (
    ("create", lambda world: world.create()),
    ("change", lambda world: world.change("spec.model.source.directory.path", "digits-2")),
    ("scale", lambda world: world.change("spec.replicas", 0)),
    ("delete", delete),
)


def state(world: World) -> list[Any]:
    """All objects, without what differs between equal ends."""
    pods = {"Pod"}
    return [
        _plain(obj) if obj["kind"] not in pods else _pod(obj)
        for kind in ALL
        for obj in world.cluster.objects(kind)
    ]


def _pod(obj: Object) -> Any:
    return ["Pod", obj["metadata"]["labels"]["dlo.dev/revision"], obj["status"]["conditions"]]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in _VOLATILE}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def live(world: World, kill_at: int | None) -> tuple[list[Any], int]:
    """A full life; the state after each step, and the number of writes by the operator."""
    seen = [0]

    def count(call: Call) -> None:
        if world.operating and call.verb in WRITES:
            seen[0] += 1
            if seen[0] == kill_at:
                raise Killed

    world.cluster.after.append(count)
    ends = []
    for _, step in LIFE:
        step(world)
        try:
            world.settle()
        except Killed:
            world.start()
            world.settle()
        ends.append(state(world))
    return ends, seen[0]


def test_killed_after_every_write(capsys: pytest.CaptureFixture[str]) -> None:
    """Create, change of the model, scale to zero, delete: the same state after each step, for every kill point."""
    undisturbed, writes = live(World(), None)
    assert writes > 20
    for number in range(1, writes + 1):
        world = World()
        ends, _ = live(world, number)
        for (name, _), end, expected in zip(LIFE, ends, undisturbed, strict=True):
            assert end == expected, f"killed after write {number}: another end of {name}"
        assert world.kubelets.started_cold == []
    with capsys.disabled():
        sys.stdout.write(f"\noperator killed after each of {writes} writes: the same end every time\n")
