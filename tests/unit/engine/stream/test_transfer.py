"""The copy engine: overlap, failures, accounting; and the order of streams and events (case 33)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from dlo_engine.host_source import MappedSource, StagedSource
from dlo_engine.placement import Placed
from dlo_engine.slots import DeviceMemory, Slot, SlotPool
from dlo_engine.specs import BlockImage
from dlo_engine.streamer import Streamer
from dlo_engine.streams import HostStreams
from dlo_engine.transfer import CopyEngine, TransferFailed
from fakes.block_images import block_image
from fakes.fake_streams import FakeStreams
from fakes.toy_model import WIDTH, stream_toy, toy_pair

CPU = torch.device("cpu")
PATIENCE = 20.0


def image_of(name: str, nbytes: int, value: int) -> BlockImage:
    """A block of equal bytes."""
    return block_image(name, {"w": torch.full((nbytes,), value, dtype=torch.uint8)})


class Gate:
    """Notes when the copy of each block began and ended, and lets compute wait for a beginning."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._changed = threading.Condition()

    def record(self, event: str, block: str, _slot: int) -> None:
        """The copy engine's recorder."""
        with self._changed:
            self.events.append((event, block))
            self._changed.notify_all()

    def await_count(self, event: str, block: str, count: int) -> bool:
        """Whether that happened `count` times within our patience."""
        with self._changed:
            return self._changed.wait_for(lambda: self.events.count((event, block)) >= count, PATIENCE)


def test_the_next_copy_begins_while_a_block_computes() -> None:
    """Every block's compute is held until the next block's copy has begun; a missing overlap is a timeout."""
    reference, empty = toy_pair({"blocks": [16, 24, 8, 16]})
    gate = Gate()
    placed = stream_toy(reference, empty, recorder=gate.record)
    names = empty.block_names
    runs = dict.fromkeys(names, 0)
    missed: list[str] = []

    def hold(index: int) -> None:
        name, following = names[index], names[(index + 1) % len(names)]
        runs[name] += 1
        # The last block of a step overlaps with the first copy of the next step.
        wanted = runs[name] + (1 if index + 1 == len(names) else 0)
        if not gate.await_count("copy-begin", following, wanted):
            missed.append(following)

    for index, name in enumerate(names):
        empty.get_submodule(f"{name}.down").register_forward_pre_hook(lambda _m, _a, i=index: hold(i))
    x = torch.randn(3, WIDTH)
    for _ in range(3):
        assert torch.equal(empty(x), reference(x))
    placed.close()
    assert not missed
    assert min(runs.values()) == 3


def test_a_slot_is_ready_before_use_and_free_before_refill() -> None:
    """The recorder's order: copy-end before ready, free before the next copy into that slot begins."""
    events: list[tuple[str, str, int]] = []
    reference, empty = toy_pair({"blocks": [16, 24, 8, 16, 8]})
    placed = stream_toy(reference, empty, recorder=lambda *event: events.append(event))
    x = torch.randn(3, WIDTH)
    for _ in range(3):
        empty(x)
    placed.close()
    for slot in (0, 1):
        held, state = "", "empty"
        for event, block, _ in (entry for entry in events if entry[2] == slot):
            if event == "copy-begin":
                assert state in ("empty", "free")
                held, state = block, "copying"
            elif event == "copy-end":
                assert (state, block) == ("copying", held)
                state = "filled"
            elif event == "ready":
                assert (state, block) == ("filled", held)
                state = "used"
            elif event == "free":
                assert (state, block) == ("used", held)
                state = "free"
    assert sum(event == "ready" for event, _, _ in events) == 15


def test_a_failed_copy_is_raised_where_the_block_is_used() -> None:
    """The cause is kept, the thread lives on, and the next use loads again."""

    class Breaking(MappedSource):
        broken = True

        def copy(self, image: BlockImage, *rest: Any) -> None:
            if self.broken:
                raise OSError("input/output error")
            super().copy(image, *rest)

    source = Breaking()
    engine = CopyEngine(HostStreams(), source)
    pool = SlotPool(DeviceMemory(CPU), 2, 4096)
    image = image_of("blocks.0", 4096, 3)
    streamer = Streamer({image.name: image}, [image.name], pool, engine)
    streamer.start()
    with pytest.raises(TransferFailed, match=r"block blocks\.0 failed: input/output error"):
        streamer.acquire(image.name)
    source.broken = False
    streamer.reset()
    assert pool.slots[streamer.acquire(image.name)].buffer[0] == 3
    engine.close()
    engine.close()


def test_a_device_that_the_copy_thread_cannot_use_fails_the_load() -> None:
    """Whoever waits for a block hears of it; a thread that dies unseen would leave it waiting for ever."""

    class Unusable(HostStreams):
        def enter_thread(self) -> None:
            raise RuntimeError("CUDA error: device is busy")

    engine = CopyEngine(Unusable(), MappedSource())
    image = image_of("blocks.0", 4096, 3)
    with pytest.raises(TransferFailed, match=r"blocks\.0 failed: CUDA error"):
        engine.fill(image, torch.empty(image.nbytes, dtype=torch.uint8))
    engine.close()


def test_timings_count_bytes_once() -> None:
    """Bytes of streamed blocks, pads included; taking them resets them; residents do not count."""
    reference, empty = toy_pair({"blocks": [16, 16, 16]})
    placed = stream_toy(reference, empty)
    x = torch.randn(2, WIDTH)
    placed.engine.take_timings()
    empty(x)
    timings = placed.engine.take_timings()
    size = image_bytes(placed)
    assert timings.copied_bytes == 3 * size
    assert timings.copy_ms > 0
    assert placed.engine.take_timings().copied_bytes == 0
    placed.close()


def image_bytes(placed: Placed) -> int:
    """Bytes of the toy's (equal) streamed blocks."""
    assert placed.streamer is not None
    (size,) = {image.nbytes for image in placed.streamer._images.values()}
    return size


def _run_deferred(seed: int, *, gather: bool, slots: int, piece: int) -> list[tuple[str, str, str]]:
    """Six blocks, four steps, executed in a random order that events allow; bytes are checked."""
    streams = FakeStreams(seed)
    source = StagedSource(
        streams,
        threads=1,
        piece_bytes=piece,
        count=2,
        allocate=lambda n: torch.empty(n, dtype=torch.uint8),
    )

    images = {f"b{i}": image_of(f"b{i}", 1024 * (1 + i % 3), i + 1) for i in range(6)}
    copied = ""

    def record(event: str, block: str, _slot: int) -> None:
        nonlocal copied
        if event == "copy-begin":
            copied = block

    class HalfGather:
        """The other rank's half of the block that was copied last arrives on the gather stream."""

        def byte_range(self, nbytes: int) -> tuple[int, int]:
            return 0, nbytes // 2

        def rebuild(self, buffer: torch.Tensor, nbytes: int) -> None:
            value = images[copied].segments[0].data[0]
            half = torch.full((nbytes - nbytes // 2,), value, dtype=torch.uint8)
            streams.copy_async(buffer[nbytes // 2 : nbytes], half, streams.gather)

    engine = CopyEngine(streams, source, gather=HalfGather() if gather else None, recorder=record)
    pool = SlotPool(DeviceMemory(CPU), slots, 4096)
    streamer = Streamer(images, list(images), pool, engine)
    streamer.start()
    wrong: list[str] = []

    def kernel(name: str, slot: Slot) -> None:
        image = images[name]
        if not bool((slot.buffer[: image.nbytes] == image.segments[0].data[0]).all()):
            wrong.append(name)

    orders = [list(images), ["b0", "b2", "b2", "b5"], ["b5", "b1"], list(images)]
    for order in orders:
        streamer.begin_step()
        for name in order:
            slot = pool.slots[streamer.acquire(name)]
            for _ in range(3):
                streams.launch(lambda n=name, s=slot: kernel(n, s))  # type: ignore[misc]
            streamer.release(name)
    engine.close()
    assert not wrong
    return streams.log


@pytest.mark.parametrize("gather", [False, True], ids=["rank-local", "all-gather"])
@pytest.mark.parametrize("slots", [2, 3])
def test_case_33_no_kernel_reads_a_slot_too_early_or_too_late(gather: bool, slots: int) -> None:
    """Forty random executions that respect only streams and events: each kernel sees its own bytes."""
    for seed in range(40):
        _run_deferred(seed, gather=gather, slots=slots, piece=700)


def test_case_33_the_compute_stream_is_asked_for_in_the_computing_thread() -> None:
    """Never inside the copy thread, where the copy stream may be current."""
    log = _run_deferred(0, gather=True, slots=2, piece=4096)
    asking = {thread for call, _, thread in log if call == "compute"}
    assert asking == {threading.current_thread().name}
    copying = {thread for call, stream, thread in log if call == "copy" and stream == "copy"}
    assert copying == {"dlo-copy"}


@pytest.mark.parametrize("broken", ["no-free-event", "no-ready-event"])
def test_case_33_the_check_itself_finds_a_missing_wait(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With either wait taken out, some execution reads wrong bytes: the test above can fail."""
    real = FakeStreams.wait

    def wait(self: FakeStreams, stream: object, event: object) -> None:
        skipped = self.copy if broken == "no-free-event" else self._compute
        if stream is not skipped:
            real(self, stream, event)

    monkeypatch.setattr(FakeStreams, "wait", wait)
    failed = 0
    for seed in range(10):
        try:
            _run_deferred(seed, gather=False, slots=2, piece=700)
        except AssertionError:
            failed += 1
    assert failed > 0


def test_staging_pieces_reassemble_any_range() -> None:
    """Pieces smaller than, equal to and larger than the range; several threads."""
    data = torch.arange(5000, dtype=torch.int64).to(torch.uint8)
    image = block_image("b", {"w": data})
    streams = HostStreams()
    for piece, threads in ((64, 1), (1000, 3), (5000, 2), (8192, 4)):
        source = StagedSource(
            streams,
            threads=threads,
            piece_bytes=piece,
            allocate=lambda n: torch.empty(n, dtype=torch.uint8),
        )
        for start, stop in ((0, 5000), (123, 4567), (10, 10)):
            target = torch.zeros(stop - start, dtype=torch.uint8)
            source.copy(image, start, stop, target, "host")
            assert torch.equal(target, data[start:stop])
        source.close()
