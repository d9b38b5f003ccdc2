"""Block images made from tensors, as the entry format lays them out, without a cache.

For tests of streaming below the level of entries. Must not be used to test the format itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from dlo_engine.specs import BlockImage, TensorSpec, whole
from torch import nn

ALIGNMENT = 256


def block_image(name: str, tensors: Mapping[str, torch.Tensor]) -> BlockImage:
    """An image of these tensors in their order, each at a multiple of 256 bytes, gaps zero; read-only."""
    specs, offset = [], 0
    for key, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        specs.append(TensorSpec(key, tensor.dtype, tuple(tensor.shape), offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    memory = mmap.mmap(-1, max(offset, 1))
    for spec, tensor in zip(specs, tensors.values(), strict=True):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if spec.nbytes else None
        if raw is not None:
            memory[spec.offset : spec.offset + spec.nbytes] = raw.numpy().tobytes()
    return whole(name, memoryview(memory).toreadonly()[:offset], tuple(specs))


def images_of(model: nn.Module, blocks: tuple[str, ...]) -> tuple[list[BlockImage], BlockImage]:
    """Images of a model's blocks (in this order) and of everything else, from its state."""
    state = dict(model.state_dict())
    images = []
    for block in blocks:
        prefix = block + "."
        own = {name[len(prefix) :]: state.pop(name) for name in list(state) if name.startswith(prefix)}
        images.append(block_image(block, own))
    return images, block_image("", state)
