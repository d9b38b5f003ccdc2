"""Status of a DiffusionDeployment: counts, a bounded list of problems, conditions. The operator writes it.

An unknown number is absent, never 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from dlo_api.conditions import Condition
from dlo_api.meta import ApiModel
from dlo_api.v1alpha1.types import (
    ComponentName,
    Coordinate,
    Count,
    EntryKind,
    Hex,
    Message,
    Reason,
    Size,
    Word,
    keyed_by,
    unique_by,
)

BackingKind = Literal[
    "RegisteredCache",
    "StagedCache",
    "MappedCache",
    "MappedCheckpoint",
    "PrivateLoad",
    "Resident",
    "Unreported",
]
ConditionList = Annotated[
    tuple[Condition, ...], Field(max_length=32, json_schema_extra=keyed_by("type")), unique_by("type")
]


class RevisionStatus(ApiModel):
    """Which revisions are served and being rolled out."""

    current: Word | None = Field(default=None, description="Revision whose engines serve.")
    updating: Word | None = Field(
        default=None, description="Revision being warmed or rolled out, when another."
    )
    source_digest: Hex | None = Field(default=None, description="Digest of the source's pinned file list.")


class EntryStatus(ApiModel):
    """One cache entry that the deployment needs."""

    kind: EntryKind = Field(
        description="Layout: final bytes of one coordinate. Files: source files as they are."
    )
    component: ComponentName | None = Field(default=None, description="Component of a Layout entry.")
    coordinate: Coordinate | None = Field(
        default=None, description="Tensor rank / tensor size of a Layout entry."
    )
    input_key: Hex | None = Field(default=None, description="Key under which nodes store it.")
    content_digest: Hex | None = Field(
        default=None, description="Digest of its content; equal on every node."
    )
    bytes: Count | None = Field(default=None, description="Size on disk in bytes.")


class NodeCounts(ApiModel):
    """Nodes by state of the entries."""

    desired: Count | None = Field(default=None, description="Nodes that should hold the entries.")
    ready: Count | None = Field(default=None, description="Nodes that hold all of them, verified.")
    warming: Count | None = Field(default=None, description="Nodes that are building some.")
    failed: Count | None = Field(default=None, description="Nodes on which an entry failed.")


class CacheStatus(ApiModel):
    """The host weight cache as this deployment sees it."""

    entries: Annotated[tuple[EntryStatus, ...], Field(max_length=64)] = Field(
        default=(), description="Entries of the updating revision."
    )
    nodes: NodeCounts | None = Field(default=None, description="Nodes by state of the entries.")
    summary: Annotated[str, StringConstraints(max_length=32)] | None = Field(
        default=None, description="Ready / desired nodes, for kubectl; dashboards use the numbers."
    )
    bytes_per_node: Count | None = Field(default=None, description="Bytes of entries on each node.")
    saved_bytes_per_node: Count | None = Field(
        default=None, description="Host memory that private copies would take beyond the shared one."
    )


class OffloadStatus(ApiModel):
    """What the engines report to run with."""

    mode: Word | None = Field(default=None, description="Offload mode in effect.")
    transfer: Word | None = Field(default=None, description="Transfer in effect.")
    backing: BackingKind | None = Field(default=None, description="Where blocks are copied from.")
    fallback_code: Word | None = Field(
        default=None, description="Stable code of the fallback, when there is one."
    )


class PlanStatus(ApiModel):
    """What the plan computed for one engine and one node."""

    gpus_per_pod: Count | None = Field(default=None, description="GPUs of one engine pod.")
    disk_per_node: Size | None = Field(default=None, description="Disk that entries and their build need.")
    host_memory_per_node: Size | None = Field(
        default=None, description="Host memory, shared entries counted once."
    )
    locked_memory_per_node: Size | None = Field(default=None, description="Host memory pinned for copies.")


class ProblemStatus(ApiModel):
    """One node's problem."""

    node: Annotated[str, StringConstraints(max_length=253)] = Field(description="Name of the node.")
    entry: Annotated[str, StringConstraints(max_length=128)] | None = Field(
        default=None, description="Key or id of the entry concerned."
    )
    reason: Reason = Field(description="One stable CamelCase word.")
    message: Message = Field(default="", description="What is wrong and what to do about it.")


class DiffusionDeploymentStatus(ApiModel):
    """What is found."""

    observed_generation: Count | None = Field(
        default=None, description="Generation of the spec last acted on."
    )
    phase: Word | None = Field(default=None, description="One word for kubectl; never read by anything.")
    revision: RevisionStatus | None = Field(default=None, description="Which revisions serve and roll out.")
    replicas: Count | None = Field(default=None, description="Engines that exist.")
    updated_replicas: Count | None = Field(default=None, description="Engines of the newest revision.")
    ready_replicas: Count | None = Field(default=None, description="Engines that serve.")
    selector: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        default=None, description="Label selector of the engine pods, for autoscalers."
    )
    cache: CacheStatus | None = Field(default=None, description="The host weight cache of this deployment.")
    offload: OffloadStatus | None = Field(default=None, description="What the engines report to run with.")
    plan: PlanStatus | None = Field(default=None, description="What the plan computed.")
    problems: Annotated[tuple[ProblemStatus, ...], Field(max_length=10)] = Field(
        default=(), description="At most ten problems of nodes; counts are in cache.nodes."
    )
    conditions: ConditionList = Field(default=(), description="Aspects of the state, one of each type.")
