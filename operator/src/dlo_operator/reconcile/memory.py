"""What an engine needs of its node: memory, mappings, bytes of entries; from sizes in headers. Pure.

All sizes in bytes.

An upper bound by the largest block: exact residency follows from tensors that only a node sees. The processes
themselves (interpreter, libraries, CUDA context, activations on the CPU) are counted with fixed sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dlo_api.topology import world_size
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.v1alpha1.node_weight_cache import SourceStatus

from dlo_operator.reconcile.placement import Needs
from dlo_operator.reconcile.record import ModelSizes

_MI: Final = 2**20
_FRONT: Final = 256 * _MI
_RANK: Final = {"Cpu": 1024 * _MI, "Cuda": 3072 * _MI}
_SHM_OF_A_RANK: Final = {"Cpu": 64 * _MI, "Cuda": 512 * _MI}
_SLOTS: Final = 2
#: Mappings of a process beside the weights: interpreter, libraries, allocators, device.
_OWN_MAPPINGS: Final = 4096


@dataclass(frozen=True)
class PodMemory:
    """Host memory of one engine.

    Attributes:
        private: what its processes allocate.
        shared: size of `/dev/shm`.
        locked: part of `private` that is pinned for copies.
        fallback: what ranks allocate beside that where they use no Layout entry and so cut the checkpoint
            themselves; 0 where they would map it as it is.
    """

    private: int
    shared: int
    locked: int
    fallback: int = 0


def pod_memory(spec: DiffusionDeploymentSpec, sizes: ModelSizes) -> PodMemory:
    """The memory of an engine of this spec."""
    device, tensor = spec.engine.device, spec.parallelism.tensor
    world = world_size(spec.parallelism)
    slot, held = 0, 0
    for component in sizes.components:
        if component.name not in spec.model.components:
            continue
        block = -(-(component.largest_block_bytes or 0) // tensor)
        blocks = component.blocks or 0
        layers = spec.offload.resident_layers
        kept = blocks if spec.offload.mode == "None" or layers == "Auto" else min(layers, blocks)
        if kept < blocks:
            slot = max(slot, block)
        held += kept * block + (component.resident_bytes or 0)
    staging = _SLOTS * slot * world
    if device == "Cpu":
        replicas = world // tensor
        model = staging + held * world + (sizes.rest_bytes or 0) * replicas
        locked = 0
    else:
        model, locked = staging, staging
    private = _FRONT + world * _RANK[device] + model
    return PodMemory(_up(private), world * _SHM_OF_A_RANK[device], locked, _up(_cut(spec, sizes)))


def _cut(spec: DiffusionDeploymentSpec, sizes: ModelSizes) -> int:
    """Bytes of all ranks' own parts of the streamed components, where a policy lets them cut them."""
    tensor = spec.parallelism.tensor
    if spec.cache.policy == "Required" or tensor == 1:
        return 0
    streamed = sum(part.bytes or 0 for part in sizes.components if part.name in spec.model.components)
    return -(-streamed // tensor) * world_size(spec.parallelism)


def needs_of(spec: DiffusionDeploymentSpec, facts: SourceStatus | None) -> Needs:
    """What a node must have for the entries of this spec, as far as headers tell."""
    if facts is None:
        return Needs()
    streamed = [part for part in facts.components if part.name in spec.model.components]
    policy, files = spec.cache.policy, facts.files or 0
    blocks = [part.blocks for part in streamed]
    mappings = None
    if streamed and None not in blocks:
        mappings = _OWN_MAPPINGS + files + sum((count or 0) + 1 for count in blocks)
    # Cuts of one component for all ranks add up to about itself.
    layouts = [part.bytes for part in streamed]
    rest = facts.rest_bytes if policy == "Required" else facts.bytes
    if rest is None or not layouts or None in layouts:
        return Needs(mappings=mappings)
    cut = 0 if policy == "Disabled" else sum(size or 0 for size in layouts)
    return Needs(cut + rest, mappings)


def _up(size: int) -> int:
    return -(-size // _MI) * _MI
