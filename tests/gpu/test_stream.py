"""Streaming on CUDA: the same bits as the resident reference, under races made likely.

Tests of two ranks need two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dlo_engine.host_source import StagedSource
from dlo_engine.placement import place, plan_residency
from dlo_engine.protocol import GenerateRequest
from dlo_engine.runtime import Runtime
from dlo_engine.slots import DeviceMemory
from dlo_engine.streams import streams_for
from dlo_engine.transfer import CopyEngine
from fakes.block_images import images_of
from fakes.engine_model import LENGTH, Model
from fakes.rank_work import serve
from fakes.ranks import run_ranks
from fakes.reference import reference_pipeline
from fakes.tiny_flux import make_tiny_flux
from torch import nn


@pytest.fixture
def two_gpus() -> None:
    """A prerequisite of tests with two ranks."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, there are {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """The tiny pipeline in a type, its reference resident on the GPU."""
    made: dict[str, Model] = {}

    def make(dtype: str) -> Model:
        if dtype not in made:
            work = tmp_path_factory.mktemp("model")
            folder = make_tiny_flux(work / "pipeline", dtype=dtype, double_blocks=3, single_blocks=5)
            made[dtype] = Model(folder, work, reference_pipeline(folder, "cuda"), {})
        return made[dtype]

    return make


def asked(**options: Any) -> GenerateRequest:
    """A small request."""
    fixed: dict[str, Any] = {
        "id": "r1",
        "prompt": "a red cat",
        "n": 2,
        "width": 64,
        "height": 48,
        "steps": 4,
        "guidance": None,
        "seed": 5,
    }
    return GenerateRequest(**{**fixed, **options})


def on_cuda(model: Model, **options: Any) -> Any:
    """A CUDA engine's configuration; the model's text length."""
    return model.config(device="cuda", threads=None, max_sequence_length=LENGTH, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slots": 3},
        {"slots": 4, "resident_layers": 1},
        {"resident_layers": 4},
        {"resident_layers": 8},
        {"mode": "None"},
    ],
    ids=["two-slots", "three-slots", "one-resident", "half-resident", "all-resident", "mode-none"],
)
def test_pictures_and_latents_are_those_of_the_reference(
    dtype: str, options: dict[str, Any], make_model: Callable[[str], Model]
) -> None:
    """Bit for bit, whatever stays resident; the backing is said truthfully and copies are counted."""
    model = make_model(dtype)
    runtime = Runtime.start(on_cuda(model, **options), 0, "", lambda *_: None)
    assert runtime.pipeline is not None
    for request in (asked(), asked(seed=9, n=1, steps=3)):
        latents, _ = runtime.pipeline.latents(request, lambda: False)
        assert latents is not None
        assert latents.device.type == "cuda"
        assert torch.equal(latents.cpu(), model.latents(request))
        assert runtime.generate(request, lambda: False).images == model.png(request)
    status = runtime.status()
    expected = "Resident" if options.get("mode") == "None" else "StagedCache"
    assert status["backing"]["kind"] == expected
    streams = runtime.pipeline.memory.allocated["slots"] > 0
    assert (status["lastRequest"]["copiedBytes"] > 0) == streams
    assert (status["lastRequest"]["copyMs"] > 0) == streams
    assert status["lastRequest"]["computeMs"] > 0
    runtime.close()


class SlowBlock(nn.Module):
    """64 MiB of float32, and a kernel that dawdles before it reads them."""

    def __init__(self, features: int = 4096) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features, bias=False)
        self.cycles = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features] of the same shape."""
        if self.cycles:
            cuda: Any = torch.cuda
            cuda._sleep(self.cycles)
        y: torch.Tensor = x + self.linear(x)
        return y


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SlowBlock() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks in order."""
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("slots", [2, 3])
def test_case_33_copies_that_overtake_slow_compute_change_nothing(slots: int) -> None:
    """Eight blocks of 64 MiB, every kernel slower than a copy, twenty runs: equal to the resident run."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    reference = Stack(8).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(0.2)
    names = tuple(f"blocks.{index}" for index in range(8))
    blocks, _ = images_of(reference, names)
    with torch.device("meta"):
        model = Stack(8).requires_grad_(False)
    streams = streams_for(device)
    engine = CopyEngine(streams, StagedSource(streams, threads=4, piece_bytes=8 << 20))
    plan = plan_residency([b.nbytes for b in blocks], resident=0, budget=None, slots=slots, group_size=1)
    before = torch.cuda.memory_allocated(device)
    placed = place(model, blocks, None, plan, engine, DeviceMemory(device))
    assert torch.cuda.memory_allocated(device) - before == slots * (64 << 20)
    x = torch.randn(16, 4096, device=device)
    with torch.no_grad():
        resident = reference.to(device)
        expected = resident(x)
        for run in range(20):
            for index in range(8):
                slow = model.get_submodule(f"blocks.{index}")
                assert isinstance(slow, SlowBlock)
                slow.cycles = 20_000_000 if (run + index) % 3 == 0 else 0
            assert torch.equal(model(x), expected), f"run {run}"
    timings = engine.take_timings()
    assert timings.copied_bytes >= 20 * 8 * (64 << 20)
    placed.close()


def test_copy_and_compute_overlap() -> None:
    """With compute made as long as the copies, a pass takes clearly less than both one after the other."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    reference = Stack(8).requires_grad_(False)
    blocks, _ = images_of(reference, tuple(f"blocks.{index}" for index in range(8)))
    with torch.device("meta"):
        model = Stack(8).requires_grad_(False)
    streams = streams_for(device)
    engine = CopyEngine(streams, StagedSource(streams, threads=4))
    plan = plan_residency([b.nbytes for b in blocks], resident=0, budget=None, slots=2, group_size=1)
    placed = place(model, blocks, None, plan, engine, DeviceMemory(device))
    x = torch.randn(16, 4096, device=device)
    passes = 3

    def run(cycles: int) -> tuple[float, Any]:
        for block in model.blocks:
            assert isinstance(block, SlowBlock)
            block.cycles = cycles
        begin = streams.record(streams.compute())
        with torch.no_grad():
            for _ in range(passes):
                model(x)
        end = streams.record(streams.compute())
        timings = engine.take_timings()
        return streams.elapsed_ms(begin, end), timings

    run(0)
    _, idle = run(0)
    begin = streams.record(streams.compute())
    cuda: Any = torch.cuda
    cuda._sleep(10_000_000)
    end = streams.record(streams.compute())
    streams.drain()
    copy_ms = idle.copy_ms / (passes * len(blocks))
    total, timings = run(int(10_000_000 / streams.elapsed_ms(begin, end) * copy_ms))
    compute = total - timings.wait_ms
    assert timings.copy_ms > 0
    assert total < 0.8 * (compute + timings.copy_ms)
    placed.close()


@pytest.mark.usefixtures("two_gpus")
def test_all_gather_over_two_gpus_is_bit_identical(
    make_model: Callable[[str], Model], tmp_path: Path
) -> None:
    """Each rank copies half of every block; NCCL rebuilds it in the slot."""
    model = make_model("bfloat16")
    requests = [[asked(n=1)], [asked(n=1, seed=40, prompt="a dog")]]
    answers = run_ranks(2, serve, tmp_path, on_cuda(model, data=2, transfer="AllGather"), requests)
    for index, answer in enumerate(answers):
        expected = model.latents(requests[index][0]).float().numpy()
        assert (answer["latents"][0] == expected).all()


@pytest.mark.usefixtures("two_gpus")
def test_tensor_parallel_over_two_gpus_agrees(make_model: Callable[[str], Model], tmp_path: Path) -> None:
    """Within 1e-4 of the reference in float32, the same bits on both ranks."""
    model = make_model("float32")
    request = asked()
    answers = run_ranks(2, serve, tmp_path, on_cuda(model, tensor=2), [[request]])
    expected = model.latents(request).float().numpy()
    mine = answers[0]["latents"][0]
    assert abs(mine - expected).max() <= 1e-4 * abs(expected).max()
    assert (answers[1]["latents"][0] == mine).all()
