"""What a rank process does in tests of several ranks. Functions that a spawned process can import.

Each starts a runtime, uses it, closes it and returns plain values. See `fakes.ranks.run_ranks`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from dlo_cache.residency import slot_bytes
from dlo_engine.config import EngineConfig
from dlo_engine.groups import Groups
from dlo_engine.host_source import MappedSource
from dlo_engine.mapping import pss_bytes
from dlo_engine.protocol import GenerateRequest
from dlo_engine.runtime import Runtime
from dlo_engine.slots import DeviceMemory, SlotPool
from dlo_engine.streamer import Streamer
from dlo_engine.streams import HostStreams
from dlo_engine.transfer import CopyEngine
from fakes.block_images import block_image


def _ignore(_phase: str, _details: dict[str, Any]) -> None:
    """Nobody listens to the start."""


def _status_bytes(key: str) -> int:
    """A figure of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def serve(
    rank: int, rendezvous: str, config: EngineConfig, requests: Sequence[Sequence[GenerateRequest]]
) -> dict[str, Any]:
    """One rank: runs its data index's list of requests and returns latents, timings and allocations."""
    runtime = Runtime.start(config, rank, rendezvous, _ignore)
    pipeline = runtime.pipeline
    assert pipeline is not None
    latents, timings = [], []
    for request in requests[config.data_index(rank)]:
        found, times = pipeline.latents(request, lambda: False)
        assert found is not None
        latents.append(found.float().cpu().numpy())
        timings.append(times)
    answer = {
        "latents": latents,
        "timings": timings,
        "memory": dict(pipeline.memory.allocated),
        "status": runtime.status(),
        "sharedMemory": _status_bytes("RssShmem"),
    }
    runtime.close()
    runtime.close()
    return answer


def share_pages(rank: int, rendezvous: str, config: EngineConfig) -> dict[str, Any]:
    """One of two workers of one coordinate: what the kernel says of its mappings while both hold them."""
    runtime = Runtime.start(config, rank, rendezvous, _ignore)
    groups = runtime._groups
    groups.messages("both have touched every page")
    opened = runtime._entries.all()[0]
    directory = opened.entry.directory.resolve()
    paths = [str(directory / file.name) for file in opened.entry.files]
    smaps = Path(f"/proc/{os.getpid()}/smaps").read_text()
    places = sorted(
        (path, *line.split()[3:5]) for line in smaps.splitlines() for path in paths if line.endswith(path)
    )
    answer = {
        "pss": pss_bytes(smaps, paths),
        "status": runtime.status()["entries"][0]["pssBytes"],
        "places": places,
        "bytes": opened.nbytes,
        "writable": [line for line in smaps.splitlines() if str(directory) in line and " r--s " not in line],
    }
    groups.messages("both have looked")
    runtime.close()
    return answer


def cancel(
    rank: int, rendezvous: str, config: EngineConfig, cancelling: Sequence[int], requests: Any
) -> list[Any]:
    """A wave in which some data indices cancel after their first step; then one that nobody cancels."""
    runtime = Runtime.start(config, rank, rendezvous, _ignore)
    index = config.data_index(rank)
    assert runtime.pipeline is not None
    forwards = 0

    def count(_module: Any, _args: Any) -> None:
        nonlocal forwards
        forwards += 1

    runtime.pipeline.placed.model.register_forward_pre_hook(count)
    first = runtime.generate(requests[index], lambda: index in cancelling and config.tensor_rank(rank) == 0)
    steps = forwards
    second = runtime.generate(requests[index], lambda: False)
    runtime.close()
    return [(first.cancelled, first.images), steps, (second.cancelled, second.images)]


def fail_to_encode(rank: int, rendezvous: str, config: EngineConfig, requests: Any) -> list[Any]:
    """The replica of data index 1 cannot encode its first prompt."""
    runtime = Runtime.start(config, rank, rendezvous, _ignore)
    assert runtime.pipeline is not None
    index = config.data_index(rank)
    family: Any = runtime.pipeline.family
    encode = family.encode
    outcome: list[Any] = []

    def broken(*_args: Any) -> Any:
        raise ValueError("no such token")

    if index == 1:
        family.encode = broken
    try:
        runtime.generate(requests[index], lambda: False)
    except Exception as error:
        outcome.append((type(error).__name__, getattr(error, "code", None)))
    family.encode = encode
    outcome.append(runtime.generate(requests[index], lambda: False).images)
    runtime.close()
    return outcome


def gather_blocks(rank: int, rendezvous: str, size: int, lengths: Sequence[int]) -> list[Any]:
    """Streams blocks of these lengths over a weight group, three steps; the bytes each forward saw."""

    device = torch.device("cpu")
    groups = Groups(rank, 1, size, rendezvous=rendezvous, device=device, gather=True)
    engine = CopyEngine(HostStreams(), MappedSource(), gather=groups.weights, poison=True)
    images = {
        f"b{index}": block_image(
            f"b{index}", {"w": torch.arange(length, dtype=torch.int64).add(index).to(torch.uint8)}
        )
        for index, length in enumerate(lengths)
    }
    nbytes = slot_bytes([image.nbytes for image in images.values()], (), size)
    pool = SlotPool(DeviceMemory(device), 2, nbytes)
    streamer = Streamer(images, list(images), pool, engine)
    streamer.start()
    wrong = []
    for _ in range(3):
        streamer.begin_step()
        for name, image in images.items():
            slot = pool.slots[streamer.acquire(name)]
            if bytes(slot.buffer[: image.nbytes].numpy()) != bytes(image.segments[0].data):
                wrong.append(name)
            streamer.release(name)
    copied = engine.take_timings().copied_bytes
    engine.close()
    groups.close()
    return [wrong, copied, nbytes]


def break_in_a_step(rank: int, rendezvous: str, config: EngineConfig, request: GenerateRequest) -> str:
    """The last rank fails inside a block; the kind of error each rank ends with."""
    runtime = Runtime.start(config, rank, rendezvous, _ignore)
    assert runtime.pipeline is not None

    def fail(_module: Any, _args: Any) -> None:
        raise ZeroDivisionError("in a block")

    if rank == config.world - 1:
        block = runtime.pipeline.placed.model.get_submodule("single_transformer_blocks.1.attn")
        block.register_forward_pre_hook(fail)
    try:
        runtime.generate(request, lambda: False)
    except Exception as error:
        return type(error).__name__
    return "no error"


def start_only(rank: int, rendezvous: str, config: EngineConfig) -> tuple[str, str]:
    """The outcome of a start."""
    try:
        Runtime.start(config, rank, rendezvous, _ignore).close()
    except Exception as error:
        return str(getattr(error, "code", type(error).__name__)), str(error)
    return "ok", ""
