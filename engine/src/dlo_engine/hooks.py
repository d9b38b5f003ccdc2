"""Attach streaming to a model's blocks and take it off again: the only module that rebinds parameters.

Parameters are swapped as objects in their modules' tables; `.data` is never touched. Off duty, a streamed
block holds placeholders on `meta`. Torch does not refuse every use of those (a linear on the CPU may return
memory it never wrote), so layers of a block must run inside the block's forward only. Must not copy bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from dlo_engine.errors import BadEntry
from dlo_engine.specs import BlockImage
from dlo_engine.streamer import Streamer

Table = Literal["_parameters", "_buffers"]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor hangs: a key in a module's parameter or buffer table."""

    module: nn.Module
    table: Table
    key: str

    def get(self) -> torch.Tensor:
        """The object there now."""
        tensor: torch.Tensor = getattr(self.module, self.table)[self.key]
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Make `tensor` the object there, without a look at the old one."""
        getattr(self.module, self.table)[self.key] = tensor

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as the kind of object this table holds."""
        return nn.Parameter(tensor, requires_grad=False) if self.table == "_parameters" else tensor


def places(model: nn.Module) -> dict[str, Place]:
    """Every parameter and persistent buffer of the model by full name; tied ones under each name."""
    found: dict[str, Place] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or key in module._non_persistent_buffers_set:
                continue
            table: Table = "_parameters" if key in module._parameters else "_buffers"
            found[f"{prefix}.{key}" if prefix else key] = Place(module, table, key)
    return found


def aliases(found: Mapping[str, Place]) -> dict[str, tuple[str, ...]]:
    """Tensors that the model itself ties, by their first name: all names, that one included."""
    names: dict[int, list[str]] = {}
    for name, place in found.items():
        names.setdefault(id(place.get()), []).append(name)
    return {group[0]: tuple(group) for group in names.values() if len(group) > 1}


def fit(model: nn.Module, images: Sequence[BlockImage]) -> None:
    """Check the images of a component against its model on `meta`, and give the placeholders their types.

    The entry decides types, the model names and shapes. Raises BadEntry that names what is missing, what the
    model does not have and what has another shape; a name left out counts as present where the model ties it.
    """
    found = places(model)
    ties = {name: group for group in aliases(found).values() for name in group}
    stored = {f"{i.name}.{s.name}" if i.name else s.name: s for i in images for s in i.tensors}
    have = {other for name in stored for other in ties.get(name, (name,))}
    _refuse("lacks", [name for name in found if name not in have])
    _refuse("holds what the model does not have:", [name for name in stored if name not in found])
    _refuse(
        "holds other shapes:",
        [
            f"{name} {list(spec.shape)} instead of {list(found[name].get().shape)}"
            for name, spec in stored.items()
            if spec.shape != tuple(found[name].get().shape)
        ],
    )
    for name, spec in stored.items():
        typed = found[name].wrap(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        for other in ties.get(name, (name,)):
            found[other].put(typed)


_SHOWN = 5


def _refuse(what: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise BadEntry(
            f"The entry {what} {', '.join(names[:_SHOWN])}{more}",
            hint="config.json and weights belong to different models, or the layout does not fit the model",
        )


class Binding:
    """One block's places, and for every slot one set of tensors that are views into that slot."""

    def __init__(self, spots: Sequence[Place], sets: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._spots = tuple(spots)
        self._placeholders = [spot.get() for spot in spots]
        self._sets = {
            index: [spot.wrap(tensor) for spot, tensor in zip(spots, tensors, strict=True)]
            for index, tensors in sets.items()
        }

    def bind(self, slot: int) -> None:
        """Put the slot's objects in place."""
        for spot, tensor in zip(self._spots, self._sets[slot], strict=True):
            spot.put(tensor)

    def unbind(self) -> None:
        """Put the placeholders back."""
        for spot, tensor in zip(self._spots, self._placeholders, strict=True):
            spot.put(tensor)


def bind_resident(model: nn.Module, image: BlockImage, buffer: torch.Tensor) -> None:
    """Give every tensor of an image its final object: a view of `buffer`, which holds the image for good.

    Where the model ties a tensor, all its names get the one object.
    """
    found = places(model)
    ties = {name: group for group in aliases(found).values() for name in group}
    for name, tensor in image.views(buffer).items():
        full = f"{image.name}.{name}" if image.name else name
        if found[full].get().is_meta:
            bound = found[full].wrap(tensor)
            for other in ties.get(full, (full,)):
                found[other].put(bound)


def bind_tied(model: nn.Module, names: Sequence[str], tensor: torch.Tensor) -> None:
    """Give all of a tensor's names in the model one object for good."""
    found = places(model)
    bound = found[names[0]].wrap(tensor)
    for name in names:
        found[name].put(bound)


def unbound(model: nn.Module, streamed: Iterable[BlockImage]) -> list[str]:
    """Tensors still on `meta`, computed buffers included, that no streamed block will bring."""
    coming = {f"{image.name}.{spec.name}" for image in streamed for spec in image.tensors}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, tensor in named if tensor.is_meta and name not in coming]


class Attachment:
    """Streaming on one model. `detach` leaves the model exactly as it was before."""

    def __init__(self, model: nn.Module, streamer: Streamer) -> None:
        self._streamer = streamer
        self._undo: list[Callable[[], None]] = []
        step = model.register_forward_pre_hook(lambda _module, _args: streamer.begin_step())
        self._undo.append(step.remove)

    def stream(self, name: str, block: nn.Module, binding: Binding) -> None:
        """Make every forward of `block` run on its slot's objects."""
        own = block.__dict__.get("forward")
        original = block.forward
        streamer = self._streamer

        running = 0

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            slot = streamer.acquire(name)
            running += 1
            try:
                binding.bind(slot)
                return original(*args, **kwargs)
            finally:
                running -= 1
                if not running:  # a block that called itself still needs its weights
                    binding.unbind()
                streamer.release(name)

        def undo() -> None:
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = own

        block.forward = forward
        self._undo.append(undo)

    def detach(self) -> None:
        """Take every hook off. Idempotent."""
        while self._undo:
            self._undo.pop()()


def attach(
    model: nn.Module, streamer: Streamer, images: Iterable[BlockImage], buffers: Mapping[int, torch.Tensor]
) -> Attachment:
    """Attach streaming of `images` (whole blocks, checked by `fit`) to `model`.

    `buffers` are the slots' bytes by slot index. A tensor bound for good (tied to a resident one) keeps its
    object.
    """
    found = places(model)
    attachment = Attachment(model, streamer)
    for image in images:
        pairs = [(found[f"{image.name}.{spec.name}"], spec) for spec in image.tensors]
        streamed = [(place, spec) for place, spec in pairs if place.get().is_meta]
        spots = [place for place, _ in streamed]
        sets = {index: [spec.view(buffer) for _, spec in streamed] for index, buffer in buffers.items()}
        attachment.stream(image.name, model.get_submodule(image.name), Binding(spots, sets))
    return attachment
