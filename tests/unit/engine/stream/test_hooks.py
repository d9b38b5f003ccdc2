"""Streaming on a model: equal to the resident form for any block sizes, and gone without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from dlo_engine.errors import BadEntry, Unsupported
from dlo_engine.hooks import fit
from dlo_engine.host_source import MappedSource
from dlo_engine.placement import place, plan_residency
from dlo_engine.slots import DeviceMemory
from dlo_engine.streams import HostStreams
from dlo_engine.transfer import CopyEngine
from fakes.block_images import block_image, images_of
from fakes.toy_model import WIDTH, ToyModel, stream_toy, toy_pair
from torch import nn

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "lists",
    [
        {"transformer_blocks": [64, 16, 48], "token_refiner.blocks": [96, 8]},
        {"blocks": [4, 8, 16, 32]},
        {"blocks": [32, 16, 8, 4]},
        {"blocks": [24]},
        {"a": [8], "b": [40]},
    ],
    ids=["case-35", "growing", "shrinking", "one-block", "two-lists-of-one"],
)
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_case_35_blocks_of_any_size_equal_the_resident_output(
    lists: dict[str, list[int]], slots: int
) -> None:
    """Sizes grow, shrink, differ between lists: bit-identical over several steps, with poisoned slots."""
    reference, empty = toy_pair(lists)
    placed = stream_toy(reference, empty, slots=slots)
    x = torch.randn(5, WIDTH)
    for _ in range(4):
        assert torch.equal(empty(x), reference(x))
    placed.close()


@pytest.mark.parametrize("resident", [0, 1, 3, 6, 99])
def test_residents_change_nothing_but_memory(resident: int) -> None:
    """Any number of residents gives the same bits; slots shrink with what streams, then vanish."""
    reference, empty = toy_pair({"blocks": [8, 8, 64, 8, 8, 8]}, torch.bfloat16)
    placed = stream_toy(reference, empty, resident=resident)
    x = torch.randn(5, WIDTH, dtype=torch.bfloat16)
    for _ in range(3):
        assert torch.equal(empty(x), reference(x))
    assert (placed.memory.allocated["slots"] == 0) == (resident >= 6)
    streamed = () if placed.streamer is None else placed.streamer.order
    assert len(streamed) == max(0, 6 - resident)
    placed.close()


@pytest.mark.parametrize("order", [[0, 0, 1, 2], [2, 0], [1, 2, 1, 0], []], ids=str)
def test_order_may_differ_per_step(order: list[int]) -> None:
    """Skipped, repeated and reordered blocks compute on their own weights, before and after a normal step."""
    reference, empty = toy_pair({"blocks": [16, 8, 32]})
    placed = stream_toy(reference, empty)
    names = empty.block_names
    x = torch.randn(2, WIDTH)
    for run in (list(names), [names[i] for i in order], list(names), [names[i] for i in order]):
        reference.order = empty.order = run
        assert torch.equal(empty(x), reference(x))
    placed.close()


def test_only_the_slots_are_taken_for_streamed_blocks() -> None:
    """Slots of the largest streamed block over all lists, in whole pages, plus the rest's own bytes."""
    reference, empty = toy_pair({"transformer_blocks": [640, 16], "refiner.blocks": [16, 96]})
    placed = stream_toy(reference, empty, slots=3)
    blocks, rest = images_of(reference, reference.block_names)
    largest = max(block.nbytes for block in blocks)
    assert dict(placed.memory.allocated) == {
        "slots": 3 * (-(-largest // 4096) * 4096),
        "resident": rest.nbytes,
    }
    placed.close()


def test_parameters_are_objects_of_their_slot_and_never_of_the_mapping() -> None:
    """In a forward every tensor lies in a slot, aligned, one object per block and slot; off duty on meta."""
    reference, empty = toy_pair({"blocks": [16, 8, 32]}, torch.bfloat16)
    placed = stream_toy(reference, empty, slots=2)
    assert placed.streamer is not None
    ranges = [
        (slot.buffer.data_ptr(), slot.buffer.data_ptr() + slot.buffer.nbytes)
        for slot in placed.streamer._pool.slots
    ]
    seen: dict[tuple[str, int], set[int]] = {}

    def look(module: nn.Module, name: str) -> None:
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            inside = [i for i, (low, high) in enumerate(ranges) if low <= tensor.data_ptr() < high]
            assert len(inside) == 1, key
            assert tensor.data_ptr() % 256 == 0
            assert tensor.untyped_storage().data_ptr() == ranges[0][0]
            seen.setdefault((f"{name}.{key}", inside[0]), set()).add(id(tensor))

    for name in empty.block_names:
        block = empty.get_submodule(name)
        block.get_submodule("down").register_forward_pre_hook(
            lambda _module, _args, b=block, n=name: look(b, n)
        )
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    for _ in range(4):
        empty(x)
        for name in empty.block_names:
            block = empty.get_submodule(name)
            assert all(t.is_meta for t in (*block.parameters(), *block.buffers()))
    assert all(len(objects) == 1 for objects in seen.values())
    assert {slot for _, slot in seen} == {0, 1}
    placed.close()


def _everything(model: nn.Module) -> dict[str, object]:
    """Identity of every object a module holds, and its hook tables' sizes."""
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        found[path] = (
            sorted(module.__dict__),
            {key: id(value) for key, value in module._parameters.items()},
            {key: id(value) for key, value in module._buffers.items()},
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
            id(module.__dict__.get("forward")),
        )
    return found


def test_detach_restores_the_module_exactly() -> None:
    """Objects, attributes and hooks of the blocks are those of before, an own `forward` included."""
    reference, empty = toy_pair({"blocks": [16, 8, 32]})
    block = empty.get_submodule("blocks.1")
    own = functools.partial(type(block).forward, block)
    block.forward = own
    before = _everything(empty)
    placed = stream_toy(reference, empty)
    x = torch.randn(2, WIDTH)
    assert torch.equal(empty(x), reference(x))
    placed.close()
    placed.close()
    after = _everything(empty)
    assert block.__dict__["forward"] is own
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        for path in before:
            if path.startswith(name):
                old, new = before[path], after[path]
                assert isinstance(old, tuple)
                assert isinstance(new, tuple)
                assert (old[0], old[3:]) == (new[0], new[3:])
                assert all(t.is_meta for t in empty.get_submodule(path).parameters()), "placeholders are back"
    assert after[""][3] == 0  # type: ignore[index]


def test_after_an_error_in_a_block_the_next_step_is_right() -> None:
    """The slot table is rebuilt; no half-used slot is trusted."""
    reference, empty = toy_pair({"blocks": [16, 8, 32]})
    placed = stream_toy(reference, empty)
    x = torch.randn(2, WIDTH)
    failing = empty.get_submodule("blocks.1.up").register_forward_pre_hook(_fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            empty(x)
        placed.reset()
    failing.remove()
    for _ in range(2):
        assert torch.equal(empty(x), reference(x))
    placed.close()


def _fail(_module: nn.Module, _args: object) -> None:
    raise ZeroDivisionError


class _CallsItself(nn.Module):
    """Runs its linear once in a call of itself and once after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """x: [..., 8] -> [..., 8]."""
        y: torch.Tensor = self.linear(self(x, depth - 1) if depth else x)
        return y


def test_a_block_that_calls_itself_keeps_its_weights_to_the_end() -> None:
    """The inner call's end must not take the weights from under the outer one."""
    reference, empty = toy_pair({"blocks": [16, 8, 32]})
    torch.manual_seed(1)
    for model, device in ((reference, "cpu"), (empty, "meta")):
        block = _CallsItself().to(device).requires_grad_(False)
        model.get_submodule("blocks")._modules["1"] = block
    placed = stream_toy(reference, empty)
    x = torch.randn(2, WIDTH)
    for _ in range(3):
        assert torch.equal(empty(x), reference(x))
        assert all(t.is_meta for t in empty.get_submodule("blocks.1").parameters())
    placed.close()


@pytest.mark.parametrize("hollow", [[1], [0, 1, 2]], ids=["one", "all"])
def test_blocks_of_empty_tensors_alone_need_no_slot(hollow: list[int]) -> None:
    """There is nothing to copy; where all are so there is not even a slot."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, WIDTH), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + self.nothing.sum()
            return y

    reference, empty = toy_pair({"blocks": [16, 8, 8]})
    for model, device in ((reference, "cpu"), (empty, "meta")):
        for index in hollow:
            model.get_submodule("blocks")._modules[str(index)] = Empty().to(device)
    placed = stream_toy(reference, empty)
    x = torch.randn(2, WIDTH)
    for _ in range(3):
        assert torch.equal(empty(x), reference(x))
    placed.close()


def _tie(model: ToyModel) -> None:
    """Two blocks share one tensor: `b.up.weight = a.up.weight`."""
    second = model.get_submodule("blocks.1.up")
    second.weight = model.get_submodule("blocks.0.up").weight


@pytest.mark.parametrize("stored", ["both", "first", "second"])
def test_case_37_a_tied_tensor_has_one_owner_and_stays(stored: str) -> None:
    """Under one name or both: one host copy is loaded once, both blocks use the one object for good."""
    reference, empty = toy_pair({"blocks": [16, 16, 16]})
    _tie(reference)
    _tie(empty)
    blocks, rest = images_of(reference, reference.block_names)
    dropped = {"first": 1, "second": 0}.get(stored)
    if dropped is not None:
        state = reference.get_submodule(f"blocks.{dropped}").state_dict()
        del state["up.weight"]
        blocks[dropped] = block_image(f"blocks.{dropped}", state)
    engine = CopyEngine(HostStreams(), MappedSource(), poison=True)
    plan = plan_residency([b.nbytes for b in blocks], resident=0, budget=None, slots=2, group_size=1)
    placed = place(empty, blocks, rest, plan, engine, DeviceMemory(CPU))
    shared = empty.get_submodule("blocks.0.up").weight
    assert isinstance(shared, torch.Tensor)
    assert empty.get_submodule("blocks.1.up").weight is shared
    assert not shared.is_meta
    assert placed.memory.allocated["resident"] == rest.nbytes + shared.nbytes
    x = torch.randn(2, WIDTH)
    for _ in range(3):
        assert torch.equal(empty(x), reference(x))
    placed.close()


def test_case_37_tied_but_different_values_are_refused() -> None:
    """Two copies that differ cannot both be the one tensor."""
    reference, empty = toy_pair({"blocks": [16, 16]})
    _tie(empty)
    with pytest.raises(BadEntry, match=r"ties blocks\.0\.up\.weight and blocks\.1\.up\.weight"):
        stream_toy(reference, empty)


def test_case_37_a_left_out_name_is_no_alias_unless_the_model_says_so() -> None:
    """Without the tie in the model a missing tensor is missing."""
    reference, empty = toy_pair({"blocks": [16, 16]})
    blocks, rest = images_of(reference, reference.block_names)
    state = reference.get_submodule("blocks.1").state_dict()
    del state["up.weight"]
    with pytest.raises(BadEntry, match=r"lacks blocks\.1\.up\.weight"):
        fit(empty, [blocks[0], block_image("blocks.1", state), rest])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down.weight": torch.zeros(16, WIDTH + 1)}, r"other shapes: blocks\.0\.down\.weight \[16, 9\]"),
        ({"extra": torch.zeros(2)}, r"does not have: blocks\.0\.extra"),
    ],
    ids=["shape", "unexpected"],
)
def test_an_entry_that_does_not_fit_the_model_is_refused(
    change: dict[str, torch.Tensor], message: str
) -> None:
    """Names and shapes are checked before anything is loaded; the message says which tensor."""
    reference, empty = toy_pair({"blocks": [16, 16]})
    blocks, rest = images_of(reference, reference.block_names)
    state = {**reference.get_submodule("blocks.0").state_dict(), **change}
    with pytest.raises(BadEntry, match=message):
        fit(empty, [block_image("blocks.0", state), blocks[1], rest])


def test_a_buffer_that_the_model_computes_itself_is_refused() -> None:
    """It is in no file, so it would stay on `meta` and the block would compute with nothing."""
    reference, empty = toy_pair({"blocks": [16, 16]})
    empty.get_submodule("blocks.1").register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(Unsupported, match=r"computes blocks\.1\.table itself"):
        stream_toy(reference, empty)


def test_types_come_from_the_entry() -> None:
    """A bf16 block with a float32 island keeps both types (case 17), also in its placeholders."""
    reference, empty = toy_pair({"blocks": [16, 16, 16]}, torch.bfloat16)
    placed = stream_toy(reference, empty)
    block = empty.get_submodule("blocks.0")
    assert {name: t.dtype for name, t in (*block.named_parameters(), *block.named_buffers())} == {
        "down.weight": torch.bfloat16,
        "down.bias": torch.bfloat16,
        "up.weight": torch.bfloat16,
        "scale": torch.float32,
    }
    placed.close()


def test_compiled_blocks_stream() -> None:
    """`torch.compile` of a block's forward works on swapped objects and is not compiled again per slot."""
    reference, empty = toy_pair({"blocks": [16, 8, 32, 16]})
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    for name in empty.block_names:
        block = empty.get_submodule(name)
        block.forward = torch.compile(block.forward, backend=backend)
    placed = stream_toy(reference, empty, slots=3)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        for run in range(5):
            assert torch.equal(empty(x), reference(x))
            if run == 0:
                first = compiled
    assert compiled == first <= len(empty.block_names)
    placed.close()
    torch.compiler.reset()
