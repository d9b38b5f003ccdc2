"""The state machine: which block is loaded into which slot, and when, for any order of forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from dlo_engine.slots import DeviceMemory, Slot, SlotPool
from dlo_engine.specs import BlockImage
from dlo_engine.streamer import Streamer
from dlo_engine.transfer import CopyEngine, Load


class FakeEngine:
    """Books what it is asked for and checks that no slot is refilled while something runs on it."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, int]] = []
        self.content: dict[int, str] = {}
        self.running: dict[int, str] = {}
        self.drained = 0

    def submit(self, image: BlockImage, slot: Slot) -> Load:
        """A slot in use must never be refilled."""
        assert slot.index not in self.running
        self.loads.append((image.name, slot.index))
        self.content[slot.index] = image.name
        return Load(image, slot, ())

    def wait(self, load: Load) -> None:
        """What is waited for must be what the slot holds."""
        assert self.content[load.slot.index] == load.image.name
        self.running[load.slot.index] = load.image.name

    def release(self, load: Load) -> None:
        """The end of use."""
        assert self.running.pop(load.slot.index) == load.image.name

    def drain(self) -> None:
        """Counted."""
        self.drained += 1


def make(names: Sequence[str], slots: int) -> tuple[Streamer, FakeEngine]:
    """A streamer of these blocks over a fake engine, started."""
    engine = FakeEngine()
    images = {name: BlockImage(name, (), (), 0) for name in names}
    pool = SlotPool(DeviceMemory(torch.device("cpu")), slots, 512)
    streamer = Streamer(images, names, pool, cast(CopyEngine, cast(Any, engine)))
    streamer.start()
    return streamer, engine


def step(streamer: Streamer, engine: FakeEngine, order: Sequence[str]) -> list[str]:
    """One forward of the model in this order; returns the blocks loaded meanwhile."""
    before = len(engine.loads)
    streamer.begin_step()
    for name in order:
        slot = streamer.acquire(name)
        assert engine.running[slot] == name
        streamer.release(name)
    return [name for name, _ in engine.loads[before:]]


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_steady_state_loads_every_block_once_a_step_in_order(slots: int) -> None:
    """Prefetch runs over the end of the step, so loads follow the order round and round."""
    names = [f"b{index}" for index in range(6)]
    streamer, engine = make(names, slots)
    assert [name for name, _ in engine.loads] == names[:slots]
    for _ in range(3):
        step(streamer, engine, names)
    expected = [names[index % 6] for index in range(slots + 18)]
    assert [name for name, _ in engine.loads] == expected


def test_the_next_block_is_asked_for_before_this_one_is_done() -> None:
    """While block k runs, block k+1 is in the other slot already."""
    names = ["a", "b", "c"]
    streamer, engine = make(names, 2)
    streamer.begin_step()
    for index, name in enumerate(names):
        streamer.acquire(name)
        assert names[(index + 1) % 3] in engine.content.values()
        streamer.release(name)


def test_the_first_forward_corrects_the_order() -> None:
    """A layout that predicts wrongly costs loads in the first step only."""
    streamer, engine = make(["a", "b", "c", "d"], 2)
    real = ["d", "b", "a", "c"]
    assert len(step(streamer, engine, real)) > 4
    step(streamer, engine, real)
    assert streamer.order == tuple(real)
    assert step(streamer, engine, real) == ["a", "c", "d", "b"]


def test_a_skipped_block_costs_one_load_and_is_forgotten() -> None:
    """Skipping changes per step; the prediction follows the last step."""
    names = ["a", "b", "c", "d", "e"]
    streamer, engine = make(names, 2)
    step(streamer, engine, names)
    step(streamer, engine, ["a", "c", "e"])
    step(streamer, engine, ["a", "c", "e"])
    assert step(streamer, engine, ["a", "c", "e"]) == ["e", "a", "c"]


def test_repeats_and_reordering_load_on_demand() -> None:
    """Whatever the order, each forward runs on its own block (the fake asserts it)."""
    names = ["a", "b", "c", "d"]
    streamer, engine = make(names, 2)
    for order in (["a", "a", "b", "c", "d"], ["d", "c", "b", "a"], ["a", "c", "a", "c"], ["b"], names):
        step(streamer, engine, order)
    assert streamer.order == ("b",)


def test_one_block_stays_in_its_slot() -> None:
    """A list with one block (case 35): loaded once, never again."""
    streamer, engine = make(["only"], 2)
    for _ in range(3):
        assert step(streamer, engine, ["only"]) == []
    assert engine.loads == [("only", 0)]


def test_as_many_slots_as_blocks_loads_each_once() -> None:
    """Nothing is evicted without need."""
    streamer, engine = make(["a", "b", "c"], 4)
    for _ in range(3):
        step(streamer, engine, ["a", "b", "c"])
    assert len(engine.loads) == 3


def test_a_block_may_call_another_and_itself() -> None:
    """Nested forwards hold two slots; a third has no place and says so."""
    streamer, engine = make(["a", "b", "c"], 2)
    streamer.begin_step()
    outer = streamer.acquire("a")
    inner = streamer.acquire("b")
    assert streamer.acquire("a") == outer != inner
    with pytest.raises(RuntimeError, match="block c needs a slot while all 2 are in use"):
        streamer.acquire("c")
    streamer.release("a")
    assert engine.content[outer] == "a"


def test_release_without_acquire_is_an_error() -> None:
    """The pairing is checked."""
    streamer, _ = make(["a", "b"], 2)
    with pytest.raises(RuntimeError, match="b is released"):
        streamer.release("b")


def test_reset_rebuilds_the_slot_table() -> None:
    """After an error nothing in a slot is trusted: copies are finished, everything is loaded again."""
    streamer, engine = make(["a", "b", "c"], 2)
    streamer.begin_step()
    streamer.acquire("a")
    streamer.reset()
    engine.running.clear()
    assert engine.drained == 1
    assert step(streamer, engine, ["a", "b", "c"]) == ["a", "b", "c", "a", "b"]


def test_choices_depend_only_on_the_order_of_calls() -> None:
    """Two ranks that run the same forwards ask for the same loads in the same slots (AllGather needs it)."""
    orders = (["a", "b", "c", "d"], ["d", "a"], ["a", "a", "c"], ["b", "d", "c"])
    traces = []
    for _ in range(2):
        streamer, engine = make(["a", "b", "c", "d"], 3)
        for order in orders:
            step(streamer, engine, order)
        traces.append(engine.loads)
    assert traces[0] == traces[1]
