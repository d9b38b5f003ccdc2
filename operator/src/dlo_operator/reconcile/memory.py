"""Host memory and shared memory of one engine pod, from sizes in headers. Pure; all sizes in bytes.

An upper bound by the largest block: exact residency follows from tensors that only a node sees. The processes
themselves (interpreter, libraries, CUDA context, activations on the CPU) are counted with fixed sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dlo_api.topology import world_size
from dlo_api.v1alpha1 import DiffusionDeploymentSpec

from dlo_operator.reconcile.record import ModelSizes

_MI: Final = 2**20
_FRONT: Final = 256 * _MI
_RANK: Final = {"Cpu": 1024 * _MI, "Cuda": 3072 * _MI}
_SHM_OF_A_RANK: Final = {"Cpu": 64 * _MI, "Cuda": 512 * _MI}
_SLOTS: Final = 2


@dataclass(frozen=True)
class PodMemory:
    """Host memory of one engine.

    Attributes:
        private: what its processes allocate.
        shared: size of `/dev/shm`.
        locked: part of `private` that is pinned for copies.
    """

    private: int
    shared: int
    locked: int


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
    return PodMemory(_up(private), world * _SHM_OF_A_RANK[device], locked)


def _up(size: int) -> int:
    return -(-size // _MI) * _MI
