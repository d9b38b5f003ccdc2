"""The values of a plan: facts and decisions go in, tables and totals come out. Pure; sizes in bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic.alias_generators import to_camel

from dlo_api.topology import GroupKind
from dlo_api.v1alpha1.deployment_status import BackingKind


@dataclass(frozen=True)
class LayoutFacts:
    """One Layout entry: a streamed component at one tensor rank.

    Attributes:
        component: name of the component.
        tensor_rank: tensor rank that it is cut for.
        key: its input key; empty while it is not known.
        block_bytes: bytes of each block's image, in execution order.
        resident_bytes: bytes of everything outside the blocks.
        file_bytes: bytes of its files on disk.
    """

    component: str
    tensor_rank: int
    key: str
    block_bytes: tuple[int, ...]
    resident_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class FilesFacts:
    """The Files entry with the rest of the pipeline.

    Attributes:
        key: its input key; empty while it is not known.
        file_bytes: bytes of its files on disk.
        weight_bytes: bytes of the weights in it (text encoders, VAE); tensor rank 0 of each replica has them.
    """

    key: str
    file_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """What headers tell of a model; all sizes in bytes.

    Attributes:
        architecture: class of the first streamed component.
        source_bytes: size of the source's files.
        largest_file_bytes: its largest weight file, which a build from a remote source keeps for a while.
        layouts: one for each streamed component and tensor rank.
        rest: the rest of the pipeline.
    """

    architecture: str
    source_bytes: int
    largest_file_bytes: int
    layouts: tuple[LayoutFacts, ...]
    rest: FilesFacts


@dataclass(frozen=True)
class Residency:
    """What the residency planner decided for one tensor rank.

    Attributes:
        slots: device slots.
        slot_bytes: bytes of each slot, already rounded for the weight group.
        resident: component name -> indices of the blocks that stay on the device.
    """

    slots: int
    slot_bytes: int
    resident: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class PlannedRank:
    """One rank; all sizes in bytes.

    `device_bytes` are slots, resident blocks, other weights and, on tensor rank 0, the rest of the pipeline;
    on the CPU they are host memory and part of `private_host_bytes`.
    """

    global_rank: int
    coordinate: str
    tensor_rank: int
    data_rank: int
    ulysses_rank: int
    ring_rank: int
    cfg_rank: int
    pipeline_rank: int
    device_bytes: int
    private_host_bytes: int
    locked_bytes: int


@dataclass(frozen=True)
class PlannedEntry:
    """One entry that the node must hold."""

    kind: Literal["Layout", "Files"]
    component: str | None
    coordinate: str | None
    key: str
    bytes: int


@dataclass(frozen=True)
class StepBound:
    """Least time of a step of one component: its streamed bytes over the bus.

    Attributes:
        component: name of the component.
        streamed_bytes: bytes that the busiest rank copies in each pass.
        seconds: bound for the pass; None when the bus rate is not known.
    """

    component: str
    streamed_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """Everything `dlo plan` prints, for one engine on one node; all sizes in bytes.

    Attributes:
        architecture: class of the first streamed component.
        device: Cuda or Cpu.
        backing: where blocks will be copied from.
        group_kind, group_size: who shares a block's copy.
        ranks, entries, steps: the tables.
        source_bytes: size of the source.
        disk_bytes: entries on disk.
        build_bytes: head-room that building them needs beside that, for a while.
        shared_host_bytes: entries mapped by all ranks, each counted once.
        private_host_bytes: what ranks allocate beside that.
        locked_bytes: part of the host memory that is pinned for copies.
        device_bytes: device memory of the fullest rank; 0 on the CPU.
    """

    architecture: str
    device: str
    backing: BackingKind
    group_kind: GroupKind
    group_size: int
    ranks: tuple[PlannedRank, ...]
    entries: tuple[PlannedEntry, ...]
    steps: tuple[StepBound, ...]
    source_bytes: int
    disk_bytes: int
    build_bytes: int
    shared_host_bytes: int
    private_host_bytes: int
    locked_bytes: int
    device_bytes: int

    @property
    def host_bytes(self) -> int:
        """Host memory of the node: shared once, and every rank's own."""
        return self.shared_host_bytes + self.private_host_bytes

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values with camelCase names; what is not known is absent."""
        written: dict[str, Any] = _camel(asdict(self))
        return written | {"hostBytes": self.host_bytes}


def _camel(value: Any) -> Any:
    if isinstance(value, dict):
        return {to_camel(key): _camel(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_camel(item) for item in value]
    return value
