"""What one engine on one node will take: ranks, entries, disk, memory and a bound for the step time. Pure.

Arithmetic over the spec and facts read from headers. Which blocks stay resident and how large a slot is comes
in from the cache library's residency planner; this module only adds up. Activations, the runtime's own memory
and the driver's are not counted: they do not follow from headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlo_api.errors import ApiError
from dlo_api.planned import (
    LayoutFacts,
    ModelFacts,
    Plan,
    PlannedEntry,
    PlannedRank,
    Residency,
    StepBound,
)
from dlo_api.topology import coordinate, ranks, weight_group
from dlo_api.v1alpha1.deployment_status import BackingKind
from dlo_api.v1alpha1.diffusion_deployment import DiffusionDeploymentSpec

_STAGING_SLOTS = 2


def expected_backing(
    spec: DiffusionDeploymentSpec, *, cuda_backing: BackingKind = "StagedCache"
) -> BackingKind:
    """Where blocks will be copied from when nothing goes wrong.

    Args:
        spec: the deployment.
        cuda_backing: what `Auto` reaches on this product's GPUs; `Off` always stages.
    """
    offload = spec.offload
    if offload.mode == "None":
        return "Resident"
    if spec.cache.policy == "Disabled":
        return "MappedCheckpoint" if spec.parallelism.tensor == 1 else "PrivateLoad"
    if spec.engine.device == "Cpu":
        return "MappedCache"
    if offload.host_registration.policy == "Off":
        return "StagedCache"
    return "RegisteredCache" if offload.host_registration.policy == "Required" else cuda_backing


def compute_plan(
    spec: DiffusionDeploymentSpec,
    facts: ModelFacts,
    residency: Sequence[Residency],
    *,
    cuda_backing: BackingKind = "StagedCache",
    bus_bytes_per_second: float | None = None,
) -> Plan:
    """The plan of one engine.

    Args:
        spec: an admitted spec.
        facts: what headers tell of its model.
        residency: the residency planner's decision for each tensor rank.
        cuda_backing: see `expected_backing`.
        bus_bytes_per_second: host-to-device rate of one rank (on the CPU: copy rate); None when not known.

    Raises:
        ApiError: code `InvalidTopology`, when facts or residency do not cover every tensor rank.
    """
    tensor_size = spec.parallelism.tensor
    _check_covers(facts, residency, tensor_size)
    group = weight_group(spec.parallelism, spec.offload.transfer)
    backing = expected_backing(spec, cuda_backing=cuda_backing)
    by_tensor_rank = [
        _Held.of(spec, facts, tensor_rank, residency[tensor_rank]) for tensor_rank in range(tensor_size)
    ]
    cpu = spec.engine.device == "Cpu"
    planned: list[PlannedRank] = []
    for place in ranks(spec.parallelism):
        held = by_tensor_rank[place.tensor_rank]
        staging = _STAGING_SLOTS * (held.slot_bytes // group.size) if backing == "StagedCache" else 0
        planned.append(
            PlannedRank(
                global_rank=place.global_rank,
                coordinate=place.coordinate,
                tensor_rank=place.tensor_rank,
                data_rank=place.data_rank,
                ulysses_rank=place.ulysses_rank,
                ring_rank=place.ring_rank,
                cfg_rank=place.cfg_rank,
                pipeline_rank=place.pipeline_rank,
                device_bytes=held.device_bytes,
                private_host_bytes=held.device_bytes if cpu else staging,
                locked_bytes=staging,
            )
        )
    entries = _entries(facts, tensor_size)
    layouts = sum(entry.bytes for entry in entries if entry.kind == "Layout")
    registered = sum(held.streamed_bytes for held in by_tensor_rank) if backing == "RegisteredCache" else 0
    remote = spec.model.source.directory is None
    return Plan(
        architecture=facts.architecture,
        device=spec.engine.device,
        backing=backing,
        group_kind=group.kind,
        group_size=group.size,
        ranks=tuple(planned),
        entries=entries,
        steps=_steps(spec, facts, residency, bus_bytes_per_second),
        source_bytes=facts.source_bytes,
        disk_bytes=layouts + facts.rest.file_bytes,
        build_bytes=facts.largest_file_bytes if remote else 0,
        shared_host_bytes=layouts,
        private_host_bytes=sum(rank.private_host_bytes for rank in planned),
        locked_bytes=registered + sum(rank.locked_bytes for rank in planned),
        device_bytes=0 if cpu else max(rank.device_bytes for rank in planned),
    )


def _check_covers(facts: ModelFacts, residency: Sequence[Residency], tensor_size: int) -> None:
    known: dict[str, set[int]] = {}
    for entry in facts.layouts:
        known.setdefault(entry.component, set()).add(entry.tensor_rank)
    every = set(range(tensor_size))
    lacking = sorted(component for component, tensor_ranks in known.items() if tensor_ranks != every)
    if not known or lacking or len(residency) != tensor_size:
        raise ApiError(
            f"sizes of {', '.join(lacking) or 'the model'} are not known for {tensor_size} tensor ranks",
            hint="give facts and residency for every tensor rank",
            code="InvalidTopology",
        )


@dataclass(frozen=True)
class _Held:
    """What every rank of one tensor rank holds."""

    device_bytes: int
    streamed_bytes: int
    slot_bytes: int

    @classmethod
    def of(
        cls, spec: DiffusionDeploymentSpec, facts: ModelFacts, tensor_rank: int, residency: Residency
    ) -> _Held:
        all_resident = spec.offload.mode == "None"
        device, streamed = 0, 0
        for entry in facts.layouts:
            if entry.tensor_rank != tensor_rank:
                continue
            left = 0 if all_resident else _streamed(entry, residency)
            streamed += left
            device += sum(entry.block_bytes) - left + entry.resident_bytes
        slot_bytes = residency.slot_bytes if streamed else 0
        device += residency.slots * slot_bytes
        if tensor_rank == 0:
            device += facts.rest.weight_bytes
        return cls(device, streamed, slot_bytes)


def _streamed(entry: LayoutFacts, residency: Residency) -> int:
    resident = residency.resident.get(entry.component, ())
    return sum(size for index, size in enumerate(entry.block_bytes) if index not in resident)


def _entries(facts: ModelFacts, tensor_size: int) -> tuple[PlannedEntry, ...]:
    layouts = (
        PlannedEntry("Layout", e.component, coordinate(e.tensor_rank, tensor_size), e.key, e.file_bytes)
        for e in facts.layouts
    )
    return (*layouts, PlannedEntry("Files", None, None, facts.rest.key, facts.rest.file_bytes))


def _steps(
    spec: DiffusionDeploymentSpec, facts: ModelFacts, residency: Sequence[Residency], rate: float | None
) -> tuple[StepBound, ...]:
    group_size = weight_group(spec.parallelism, spec.offload.transfer).size
    busiest: dict[str, int] = {}
    for entry in facts.layouts if spec.offload.mode != "None" else ():
        # Rounding up for a group's shares aside, each member copies its part of every block.
        copied = -(-_streamed(entry, residency[entry.tensor_rank]) // group_size)
        busiest[entry.component] = max(copied, busiest.get(entry.component, 0))
    return tuple(
        StepBound(component, copied, copied / rate if rate is not None else None)
        for component, copied in busiest.items()
    )
