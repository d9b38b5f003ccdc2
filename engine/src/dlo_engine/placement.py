"""Put a component's weights where the plan says: residents on the device for good, the rest behind slots.

Must not open files and must not know families; it gets images, a model on `meta` in local shapes, and a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlo_cache import residency
from torch import nn

from dlo_engine.errors import BadEntry, Unsupported
from dlo_engine.hooks import Attachment, aliases, attach, bind_resident, bind_tied, fit, places, unbound
from dlo_engine.slots import DeviceMemory, SlotPool
from dlo_engine.specs import BlockImage, whole
from dlo_engine.streamer import Streamer
from dlo_engine.transfer import CopyEngine


@dataclass(frozen=True)
class Plan:
    """Which blocks stay (indices in execution order), how many slots there are and how long each is."""

    resident: tuple[int, ...]
    slots: int
    slot_bytes: int


def plan_residency(
    block_bytes: Sequence[int],
    *,
    resident: int | None,
    budget: int | None,
    slots: int,
    group_size: int,
) -> Plan:
    """`resident` blocks stay; None fills `budget` bytes (slots included). Raises dlo_cache's Invalid if too
    small.

    More residents than blocks means all. `group_size` is that of AllGather, else 1.
    """
    if resident is not None:
        chosen = residency.spread(block_bytes, min(resident, len(block_bytes)))
    else:
        chosen = residency.fit(block_bytes, budget or 0, slots, group_size)
    return Plan(chosen, slots, residency.slot_bytes(block_bytes, chosen, group_size))


class Placed:
    """A component ready to run. `close` takes the streaming off; the model keeps its residents."""

    def __init__(
        self,
        model: nn.Module,
        engine: CopyEngine,
        memory: DeviceMemory,
        streamer: Streamer | None,
        attachment: Attachment | None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.memory = memory
        self.streamer = streamer
        self._attachment = attachment

    def reset(self) -> None:
        """After a failed forward: rebuild the slot table."""
        if self.streamer is not None:
            self.streamer.reset()

    def close(self) -> None:
        """Finish copies, then take the hooks off. Idempotent."""
        self.engine.close()
        if self._attachment is not None:
            self._attachment.detach()


def place(
    model: nn.Module,
    blocks: Sequence[BlockImage],
    rest: BlockImage | None,
    plan: Plan,
    engine: CopyEngine,
    memory: DeviceMemory,
) -> Placed:
    """Load residents, attach streaming for the others and begin to fill the slots.

    `blocks` are in execution order; `rest` is what belongs to no block. Raises BadEntry when images and model
    do not fit each other.
    """
    images = [*([rest] if rest is not None else []), *blocks]
    fit(model, images)
    _load_tied(model, images, engine, memory)
    # A block of empty tensors alone has nothing to copy and may have no slot to copy it to.
    stays = [index in plan.resident or not block.nbytes for index, block in enumerate(blocks)]
    staying = [block for block, here in zip(blocks, stays, strict=True) if here]
    streamed = [block for block, here in zip(blocks, stays, strict=True) if not here]
    for image in (*([rest] if rest is not None else []), *staying):
        buffer = memory.allocate(image.nbytes, "resident")
        if image.nbytes:
            engine.fill(image, buffer)
        bind_resident(model, image, buffer)
    left = unbound(model, streamed)
    if left:
        raise Unsupported(
            f"The model computes {', '.join(left[:5])} itself, which its family does not provide"
        )
    if not streamed:
        return Placed(model, engine, memory, None, None)
    pool = SlotPool(memory, plan.slots, plan.slot_bytes)
    streamer = Streamer({b.name: b for b in streamed}, [b.name for b in streamed], pool, engine)
    attachment = attach(model, streamer, streamed, {slot.index: slot.buffer for slot in pool.slots})
    streamer.start()
    return Placed(model, engine, memory, streamer, attachment)


def _load_tied(
    model: nn.Module, images: Sequence[BlockImage], engine: CopyEngine, memory: DeviceMemory
) -> None:
    """A tensor that the model uses in several places has one owner and stays on the device for all."""
    stored = {
        f"{image.name}.{spec.name}" if image.name else spec.name: (image, spec)
        for image in images
        for spec in image.tensors
    }
    for group in aliases(places(model)).values():
        held = [stored[name] for name in group if name in stored]
        image, spec = held[0]
        data = image.tensor_data(spec)
        for other_image, other in held[1:]:
            if other_image.tensor_data(other) != data:
                raise BadEntry(f"The model ties {' and '.join(group)}, but the entry holds different values")
        buffer = memory.allocate(spec.nbytes, "resident")
        if spec.nbytes:
            engine.fill(whole(group[0], data), buffer)
        bind_tied(model, group, replace(spec, offset=0).view(buffer))
