"""One rank, streamed: bit-identical to the reference, whatever stays resident, with any number of slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from dlo_engine.errors import BadEntry, InvalidConfiguration, RankDied, Unsupported
from dlo_engine.groups import Groups
from dlo_engine.mapping import open_entries
from dlo_engine.pipeline import StreamedPipeline
from dlo_engine.protocol import GenerateRequest
from fakes.engine_model import Model

CPU = torch.device("cpu")
MakeRequest = Callable[..., GenerateRequest]


def never() -> bool:
    """Nobody cancels."""
    return False


@contextmanager
def pipeline_of(model: Model, **options: Any) -> Iterator[StreamedPipeline]:
    """The streamed pipeline of one rank, with poisoned slots, closed afterwards."""
    config = model.config(**options)
    entries = open_entries(config.handover, config.components, 0, 1)
    groups = Groups(0, 1, 1, rendezvous="", device=CPU, gather=False)
    try:
        pipeline = StreamedPipeline(config, groups, entries, CPU, poison=True)
        try:
            yield pipeline
        finally:
            pipeline.close()
    finally:
        entries.close()


def latents_of(pipeline: StreamedPipeline, request: GenerateRequest) -> torch.Tensor:
    """Final latents of an uncancelled request."""
    latents, _ = pipeline.latents(request, never)
    assert latents is not None
    return latents


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_and_pictures_are_those_of_the_reference(
    dtype: str, request: pytest.FixtureRequest, request_of: MakeRequest
) -> None:
    """Bit for bit, over three requests of different sizes; bfloat16 with shards and guidance."""
    model: Model = request.getfixturevalue(dtype)
    with pipeline_of(model) as pipeline:
        for options in ({}, {"n": 2, "seed": 11, "prompt": "Blue dog!"}, {"width": 64, "guidance": 2.0}):
            asked = request_of(**options)
            assert torch.equal(latents_of(pipeline, asked), model.latents(asked))
            assert pipeline.generate(asked, never).images == model.png(asked)


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("resident", [0, 1, 2, 5])
def test_residents_and_slots_change_no_bit(
    resident: int, slots: int, float32: Model, request_of: MakeRequest
) -> None:
    """None, one, half, all blocks resident, each with 2, 3 and 4 slots."""
    asked = request_of()
    with pipeline_of(float32, resident_layers=resident, slots=slots) as pipeline:
        assert torch.equal(latents_of(pipeline, asked), float32.latents(asked))
        assert (pipeline.memory.allocated["slots"] == 0) == (resident == 5)


def test_mode_none_is_all_resident(bfloat16: Model, request_of: MakeRequest) -> None:
    """No slot, no copy in a request, backing Resident, the same bits."""
    asked = request_of()
    with pipeline_of(bfloat16, mode="None") as pipeline:
        latents, timings = pipeline.latents(asked, never)
        assert latents is not None
        assert torch.equal(latents, bfloat16.latents(asked))
        assert pipeline.backing == "Resident"
        assert timings["copiedBytes"] == 0
        assert pipeline.memory.allocated["slots"] == 0


def test_a_budget_is_filled_and_kept(float32: Model, request_of: MakeRequest) -> None:
    """Auto: residents and slots together fill the budget to within a block, and stay within it."""
    with pipeline_of(float32, mode="None") as pipeline:
        everything = pipeline.memory.allocated["resident"]
    entries = open_entries(float32.handover(), ("transformer",), 0, 1)
    resident = entries.all()[0].entry.resident
    assert resident is not None
    outside = resident.nbytes
    entries.close()
    budget = everything - outside - 100_000
    with pipeline_of(float32, resident_layers="Auto", device_memory_budget=budget) as pipeline:
        taken = sum(pipeline.memory.allocated.values()) - outside
        assert budget - 600_000 < taken <= budget
        assert 0 < len(pipeline.placed.streamer.order if pipeline.placed.streamer else ()) < 5
        asked = request_of()
        assert torch.equal(latents_of(pipeline, asked), float32.latents(asked))


def test_a_budget_below_the_slots_is_a_wrong_setting(float32: Model) -> None:
    """Said with the bytes that are needed, as a configuration error and not as a bad entry."""
    with (
        pytest.raises(InvalidConfiguration, match="slots alone need"),
        pipeline_of(float32, resident_layers="Auto", device_memory_budget=10_000),
    ):
        pass


def test_device_memory_is_slots_and_the_rest(float32: Model) -> None:
    """Streaming everything: exactly the slots of the largest block, and the image outside the blocks."""
    with pipeline_of(float32, slots=3) as pipeline:
        entries = open_entries(float32.handover(), ("transformer",), 0, 1)
        entry = entries.all()[0].entry
        largest = max(file.nbytes for file in entry.blocks)
        assert entry.resident is not None
        assert dict(pipeline.memory.allocated) == {
            "slots": 3 * (-(-largest // 4096) * 4096),
            "resident": entry.resident.nbytes,
        }
        entries.close()


def test_no_parameter_lies_in_a_mapping(float32: Model, request_of: MakeRequest) -> None:
    """In every block's forward, and outside of it, no tensor's storage is inside an entry's mapping."""
    with pipeline_of(float32, resident_layers=1) as pipeline:
        model = pipeline.placed.model
        found: list[str] = []
        checked = 0

        def look(_module: torch.nn.Module, _args: object) -> None:
            nonlocal checked
            mapped = _mapped_ranges(float32.work)
            assert mapped
            for name, tensor in model.named_parameters():
                if not tensor.is_meta:
                    checked += 1
                    begin = tensor.untyped_storage().data_ptr()
                    end = begin + tensor.untyped_storage().nbytes()
                    if any(begin < high and low < end for low, high in mapped):
                        found.append(name)

        for name in ("transformer_blocks.0", "transformer_blocks.1", "single_transformer_blocks.2"):
            model.get_submodule(f"{name}.attn").register_forward_pre_hook(look)
        latents_of(pipeline, request_of(steps=1))
        assert checked > 50
        assert not found


def _mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    """Addresses of this process's mappings of files below a folder."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            low, high = line.split()[0].split("-")
            ranges.append((int(low, 16), int(high, 16)))
    return ranges


def test_image_i_of_n_starts_from_seed_plus_i(float32: Model, request_of: MakeRequest) -> None:
    """Three pictures are the reference's with three generators; a single one is near its place."""
    asked = request_of(n=3, seed=20)
    with pipeline_of(float32) as pipeline:
        batch = latents_of(pipeline, asked)
        single = latents_of(pipeline, request_of(n=1, seed=22))
    assert torch.equal(batch, float32.latents(asked))
    assert (batch[2] - single[0]).abs().max() <= 1e-4 * single.abs().max()


def test_a_cancelled_request_stops_between_steps(float32: Model, request_of: MakeRequest) -> None:
    """After the step in which it was noticed; the next request is whole again."""
    polls = 0

    def after_two() -> bool:
        nonlocal polls
        polls += 1
        return polls >= 2

    with pipeline_of(float32) as pipeline:
        forwards = 0

        def count(_module: torch.nn.Module, _args: object) -> None:
            nonlocal forwards
            forwards += 1

        hook = pipeline.placed.model.register_forward_pre_hook(count)
        result = pipeline.generate(request_of(steps=9), after_two)
        hook.remove()
        assert (result.cancelled, result.images, forwards) == (True, (), 2)
        asked = request_of()
        assert pipeline.generate(asked, never).images == float32.png(asked)


def test_a_discarded_request_runs_and_returns_nothing(float32: Model, request_of: MakeRequest) -> None:
    """The copy that keeps a wave whole."""
    with pipeline_of(float32) as pipeline:
        result = pipeline.generate(request_of(discard=True), never)
    assert (result.images, result.cancelled) == ((), False)
    assert result.timings["steps"] == 3
    assert result.timings["copiedBytes"] > 0


def test_after_a_failed_step_the_next_request_is_right(float32: Model, request_of: MakeRequest) -> None:
    """The slot table is rebuilt; the error comes through as it is."""
    with pipeline_of(float32) as pipeline:

        def fail(_module: torch.nn.Module, _args: object) -> None:
            raise ZeroDivisionError

        hook = pipeline.placed.model.get_submodule(
            "single_transformer_blocks.1.attn"
        ).register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            pipeline.generate(request_of(), never)
        hook.remove()
        asked = request_of()
        assert pipeline.generate(asked, never).images == float32.png(asked)


def test_a_device_that_cannot_go_on_ends_the_rank(
    float32: Model, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When even the reset fails, the rank says that it died instead of taking the next request."""
    with pipeline_of(float32) as pipeline:

        def fail(*_args: object) -> None:
            raise RuntimeError("illegal memory access")

        monkeypatch.setattr(pipeline.placed, "reset", fail)
        pipeline.placed.model.get_submodule("proj_out").register_forward_pre_hook(fail)
        with pytest.raises(RankDied, match="could not go on"):
            pipeline.generate(request_of(), never)


def test_timings_add_up(float32: Model, request_of: MakeRequest) -> None:
    """Each streamed block is copied once a step; figures are there and not negative."""
    with pipeline_of(float32) as pipeline:
        pipeline.warm_up()
        _, timings = pipeline.latents(request_of(steps=4), never)
        entries = open_entries(float32.handover(), ("transformer",), 0, 1)
        blocks = sum(file.nbytes for file in entries.all()[0].entry.blocks)
        entries.close()
    assert timings["copiedBytes"] == 4 * blocks
    assert timings["steps"] == 4
    assert timings["computeMs"] > 0
    assert timings["copyMs"] > 0
    assert timings["waitMs"] >= 0


def test_a_wrong_component_or_class_is_refused(float32: Model) -> None:
    """By name, before anything is built."""
    config = float32.config()
    with pytest.raises(BadEntry, match="no entry of text_encoder for tensor rank 0"):
        open_entries(config.handover, ("transformer", "text_encoder"), 0, 1)
    with pytest.raises(BadEntry, match="has transformer for 0/1, not 0/2"):
        open_entries(config.handover, ("transformer",), 0, 2)
    entries = open_entries(config.handover, ("transformer",), 0, 1)
    groups = Groups(0, 1, 1, rendezvous="", device=CPU, gather=False)
    twice = dataclasses.replace(config, components=("transformer", "transformer_2"))
    entries.components["transformer_2"] = entries.all()[0]
    with pytest.raises(Unsupported, match="transformer, transformer_2"):
        StreamedPipeline(twice, groups, entries, CPU)
    entries.close()
