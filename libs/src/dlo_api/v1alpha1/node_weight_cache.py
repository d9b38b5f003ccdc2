"""NodeWeightCache: what one node should hold (the operator writes it) and what it holds (its agent does)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from dlo_api.meta import ApiModel, ObjectMeta
from dlo_api.v1alpha1.deployment_status import ConditionList
from dlo_api.v1alpha1.source import Source
from dlo_api.v1alpha1.types import (
    ComponentName,
    Coordinate,
    Count,
    Dtype,
    EntryKind,
    Hex,
    Line,
    Message,
    OptionalDnsSubdomain,
    OptionalHex,
    OptionalWord,
    Quantization,
    Reason,
    Time,
    Word,
    keyed_by,
    unique_by,
)

EntryPhase = Literal[
    "Pending", "Reserved", "Fetching", "Building", "Verifying", "Ready", "Quarantined", "Evicting", "Failed"
]
Selection = Literal["PipelineRest", "All"]

Id = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[0-9a-f]+$")]


class Pin(ApiModel):
    """What a source was resolved to; empty on the node that resolves for all."""

    revision: Line = Field(default="", description="Commit or version that the revision stands for.")
    digest: OptionalHex = Field(default="", description="Digest of the file list with its file digests.")


class NodeSource(ApiModel):
    """A source that the node reads."""

    id: Id = Field(description="Identity of the source; entries refer to it.")
    source: Source = Field(description="Where the model comes from: exactly one member.")
    variant: OptionalWord = Field(
        default="", description="Weight variant where a folder holds several whole sets."
    )
    secret_name: OptionalDnsSubdomain = Field(
        default="", description="Secret in the agent's namespace with the operator's copy of the credential."
    )
    pin: Pin = Field(default=Pin(), description="What it was resolved to; other bytes are a SourceMismatch.")


class NodeEntry(ApiModel):
    """A cache entry that the node should hold."""

    id: Id = Field(description="Identity of the entry in this list.")
    source_id: Id = Field(description="Source that it is built from.")
    kind: EntryKind = Field(
        description="Layout: final bytes of one coordinate. Files: source files as they are."
    )
    component: ComponentName | None = Field(default=None, description="Component of a Layout entry.")
    layout: OptionalWord = Field(
        default="", description="Named layout; empty for the one of the component's class."
    )
    tensor_size: Annotated[int, Field(ge=1, le=1024)] = Field(default=1, description="Tensor parallel size.")
    tensor_rank: Annotated[int, Field(ge=0, le=1023)] = Field(default=0, description="Tensor parallel rank.")
    dtype: Dtype = Field(default="Source", description="Type of the cached weights.")
    quantization: Quantization = Field(default="None", description="Quantization of the cached weights.")
    select: Selection | None = Field(
        default=None,
        description="Files of a Files entry: what a pipeline needs beside streamed weights, or All.",
    )
    streamed: Annotated[tuple[ComponentName, ...], Field(max_length=8)] = Field(
        default=(), description="Streamed components, whose weights PipelineRest leaves out."
    )
    retention_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        default=86_400, description="How long it stays after its last reference is gone."
    )
    verified_after: Time | None = Field(
        default=None,
        description="Its bytes count only if they were checked after this moment, when an engine found them wrong.",
    )


class NodeWeightCacheSpec(ApiModel):
    """What the node should hold; written by the operator alone."""

    sources: Annotated[
        tuple[NodeSource, ...], Field(max_length=64, json_schema_extra=keyed_by("id")), unique_by("id")
    ] = Field(default=(), description="Sources that entries are built from.")
    entries: Annotated[
        tuple[NodeEntry, ...], Field(max_length=256, json_schema_extra=keyed_by("id")), unique_by("id")
    ] = Field(default=(), description="Entries the node should hold.")


class RootStatus(ApiModel):
    """The cache root on the node's disk."""

    path: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        default=None, description="Path on the host, from the agent's Helm value."
    )
    gid: Count | None = Field(
        default=None, description="Group that may read it; a supplemental group of engines."
    )
    filesystem: Word | None = Field(default=None, description="Kind of file system.")
    total_bytes: Count | None = Field(default=None, description="Size of the file system.")
    free_bytes: Count | None = Field(default=None, description="Free bytes, in steps of one per cent.")
    reserved_bytes: Count | None = Field(default=None, description="Bytes promised to running builds.")
    used_bytes: Count | None = Field(default=None, description="Bytes of entries.")


class MemoryStatus(ApiModel):
    """The node's memory, as far as it limits engines."""

    total_bytes: Count | None = Field(default=None, description="Memory of the node.")
    warm_budget_bytes: Count | None = Field(default=None, description="Page cache the agent may warm.")
    lock_limit_bytes: Count | None = Field(default=None, description="Limit of locked memory for a process.")
    max_map_count: Count | None = Field(default=None, description="Limit of mappings for a process.")


class ComponentFacts(ApiModel):
    """Sizes of one component, from its headers."""

    name: ComponentName = Field(description="Name of the component.")
    bytes: Count | None = Field(default=None, description="Bytes of its weights.")
    blocks: Count | None = Field(default=None, description="Number of streamed blocks.")
    largest_block_bytes: Count | None = Field(default=None, description="Bytes of the largest block.")
    resident_bytes: Count | None = Field(default=None, description="Bytes outside all blocks.")


class SourceStatus(ApiModel):
    """What a source was resolved to on this node."""

    id: Id = Field(description="Identity of the source in the spec.")
    revision: Line | None = Field(default=None, description="Commit or version found.")
    digest: Hex | None = Field(default=None, description="Digest of the file list with its file digests.")
    files: Count | None = Field(default=None, description="Number of files.")
    bytes: Count | None = Field(default=None, description="Bytes of all files.")
    architecture: Word | None = Field(default=None, description="Class of the first streamed component.")
    layout_digest: Hex | None = Field(default=None, description="Digest of the layout that fits it.")
    head_counts: Annotated[tuple[Count, ...], Field(max_length=16)] = Field(
        default=(), description="Attention head counts that tensor and ulysses must divide."
    )
    components: Annotated[
        tuple[ComponentFacts, ...],
        Field(max_length=16, json_schema_extra=keyed_by("name")),
        unique_by("name"),
    ] = Field(default=(), description="Sizes of the components, from their headers.")
    rest_bytes: Count | None = Field(
        default=None, description="Bytes a pipeline needs beside streamed weights."
    )
    reason: Reason | None = Field(default=None, description="One stable word when it could not be resolved.")
    message: Message | None = Field(default=None, description="What is wrong and what to do about it.")


class NodeEntryStatus(ApiModel):
    """State of one entry on this node."""

    id: Id = Field(description="Identity of the entry in the spec.")
    kind: EntryKind = Field(description="Layout or Files.")
    component: ComponentName | None = Field(default=None, description="Component of a Layout entry.")
    input_key: Hex | None = Field(default=None, description="Key under which it is stored.")
    content_digest: Hex | None = Field(
        default=None, description="Digest of its content; equal on every node."
    )
    manifest_sha256: Hex | None = Field(
        default=None, description="Digest of its manifest, checked by engines."
    )
    coordinate: Coordinate | None = Field(
        default=None, description="Tensor rank / tensor size of a Layout entry."
    )
    phase: EntryPhase = Field(description="Where it is on its way.")
    bytes: Count | None = Field(default=None, description="Size on disk in bytes.")
    done_bytes: Count | None = Field(
        default=None, description="Bytes built so far; at most every ten seconds."
    )
    last_verified: Time | None = Field(default=None, description="When all its digests last checked out.")
    last_used: Time | None = Field(default=None, description="When a reader was last seen, by the hour.")
    attempts: Count | None = Field(default=None, description="Builds tried since the last success.")
    next_attempt: Time | None = Field(default=None, description="When the next build is tried.")
    reason: Reason | None = Field(default=None, description="One stable word when it is not ready.")
    message: Message | None = Field(default=None, description="What is wrong and what to do about it.")


class NodeWeightCacheStatus(ApiModel):
    """What the node holds; written by its agent alone, when something a reader needs has changed."""

    observed_generation: Count | None = Field(
        default=None, description="Generation of the spec last acted on."
    )
    agent_version: Word | None = Field(default=None, description="Version of the agent.")
    boot_id: Word | None = Field(
        default=None, alias="bootID", description="Boot of the node that this is about."
    )
    root: RootStatus | None = Field(default=None, description="The cache root on the node's disk.")
    memory: MemoryStatus | None = Field(default=None, description="The node's memory.")
    sources: Annotated[
        tuple[SourceStatus, ...], Field(max_length=64, json_schema_extra=keyed_by("id")), unique_by("id")
    ] = Field(default=(), description="What each source was resolved to.")
    entries: Annotated[
        tuple[NodeEntryStatus, ...], Field(max_length=256, json_schema_extra=keyed_by("id")), unique_by("id")
    ] = Field(default=(), description="State of each entry.")
    conditions: ConditionList = Field(default=(), description="Aspects of the state, one of each type.")


class NodeWeightCache(ApiModel):
    """The weight cache of one node, named after it and owned by it."""

    api_version: Literal["dlo.dev/v1alpha1"] = Field(description="Always dlo.dev/v1alpha1.")
    kind: Literal["NodeWeightCache"] = Field(description="Always NodeWeightCache.")
    metadata: ObjectMeta = Field(description="Standard object metadata.")
    spec: NodeWeightCacheSpec = Field(default=NodeWeightCacheSpec(), description="What the node should hold.")
    status: NodeWeightCacheStatus | None = Field(
        default=None, description="What the node holds; written by its agent alone."
    )
