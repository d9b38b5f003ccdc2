"""DiffusionDeployment: what a user asks for. The spec; its status is in `deployment_status`.

Defaults are part of the API: none is ever changed in a served version.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from dlo_api.meta import ApiModel, ObjectMeta
from dlo_api.v1alpha1.deployment_status import DiffusionDeploymentStatus
from dlo_api.v1alpha1.source import Source
from dlo_api.v1alpha1.types import (
    ComponentSet,
    Degree,
    Dtype,
    OptionalDnsSubdomain,
    OptionalWord,
    PassThrough,
    Quantization,
    SecretReference,
    Size,
    StringMap,
    keyed_by,
    unique_by,
)

EngineKind = Literal["Native", "VllmOmni"]
Device = Literal["Cuda", "Cpu"]
OffloadMode = Literal["None", "DistributedLayerwise"]
Transfer = Literal["RankLocal", "AllGather"]
RegistrationPolicy = Literal["Auto", "Required", "Off"]
CachePolicy = Literal["Required", "Opportunistic", "Disabled"]
OnFallback = Literal["Fail", "Continue"]
Verify = Literal["Always", "OnPublish"]
Mount = Literal["HostPath", "PersistentVolume"]
PrewarmScope = Literal["Needed", "All"]

_Seconds = Annotated[int, Field(ge=1, le=604_800)]


_RESOURCE = r"^[a-zA-Z0-9]([-a-zA-Z0-9_./]*[a-zA-Z0-9])?$"


class ModelSpec(ApiModel):
    """Which model, and in what form its weights are kept."""

    source: Source = Field(description="Where the model comes from: exactly one member.")
    components: ComponentSet = Field(
        default=("transformer",),
        description="Streamed components; two where a pipeline has two DiTs. Text encoders may be listed.",
    )
    variant: OptionalWord = Field(
        default="", description="Weight variant (fp16, …) where a folder holds several whole sets."
    )
    layout: OptionalWord = Field(
        default="", description="Layout named in the Helm values; empty for the one of the component's class."
    )
    dtype: Dtype = Field(
        default="Source", description="Type of the cached weights; Source keeps each tensor's own."
    )
    quantization: Quantization = Field(
        default="None", description="Quantization applied when entries are built."
    )


class EngineSpec(ApiModel):
    """Which engine serves the model, and what its pods carry."""

    kind: EngineKind = Field(
        default="Native", description="Engine that serves the model. Cannot be changed later."
    )
    version: OptionalWord = Field(
        default="", description="Version of the engine; needed for VllmOmni with an image of one's own."
    )
    device: Device = Field(default="Cuda", description="Device the model computes on.")
    image: Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\s]*$")] = Field(
        default="", description="Engine image; empty for the chart's image of that kind."
    )
    image_pull_secrets: Annotated[
        tuple[SecretReference, ...],
        Field(max_length=16, json_schema_extra=keyed_by("name")),
        unique_by("name"),
    ] = Field(default=(), description="Secrets for pulling the image.")
    service_account_name: OptionalDnsSubdomain = Field(
        default="", description="ServiceAccount of the engine pods; empty for the namespace's default."
    )
    extra_args: Annotated[
        tuple[Annotated[str, StringConstraints(max_length=1024)], ...], Field(max_length=64)
    ] = Field(default=(), description="Arguments added to the engine's command line.")
    extra_env: Annotated[tuple[PassThrough, ...], Field(max_length=64)] = Field(
        default=(), description="Environment variables (core EnvVar) added to the engine container."
    )
    resources: PassThrough = Field(
        default={}, description="Container resources, merged over what the plan computes."
    )
    pod_labels: StringMap = Field(default={}, description="Labels added to engine pods.")
    pod_annotations: StringMap = Field(default={}, description="Annotations added to engine pods.")


class Parallelism(ApiModel):
    """Degrees of parallelism of one engine; their product, without expert, is its number of ranks."""

    tensor: Degree = Field(
        default=1, description="Tensor parallel size: each rank holds a cut of every weight."
    )
    data: Degree = Field(
        default=1, description="Data parallel size: replicas of the model inside the engine."
    )
    ulysses: Degree = Field(default=1, description="Ulysses sequence parallel size.")
    ring: Degree = Field(default=1, description="Ring sequence parallel size.")
    cfg: Degree = Field(default=1, description="Classifier-free guidance parallel size.")
    pipeline: Degree = Field(default=1, description="Pipeline parallel size.")
    expert: Degree = Field(default=1, description="Expert parallel size; adds no ranks.")


class HostRegistration(ApiModel):
    """Whether cache mappings are registered with the GPU driver for direct copies."""

    policy: RegistrationPolicy = Field(
        default="Auto",
        description='Auto registers where possible, else stages; "Off" (quoted in YAML) always stages.',
    )
    limit: Size | None = Field(
        default=None, description="Most distinct entry bytes one engine registers; absent for no limit."
    )


class Offload(ApiModel):
    """How the streamed components reach the device."""

    mode: OffloadMode = Field(
        default="DistributedLayerwise",
        description="Whether blocks are streamed through device slots, or resident.",
    )
    transfer: Transfer = Field(
        default="RankLocal",
        description="RankLocal copies whole blocks per rank; AllGather shares the copy among replicas.",
    )
    resident_layers: Annotated[
        int | Literal["Auto"],
        Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
    ] = Field(
        default=0,
        description="Blocks kept on the device, spread evenly: a number, or Auto to fill deviceMemoryBudget.",
    )
    device_memory_budget: Size | None = Field(
        default=None, description="Device memory per rank that residentLayers: Auto may fill."
    )
    host_registration: HostRegistration = Field(
        default=HostRegistration(), description="Registration of cache mappings with the GPU driver."
    )


class Prewarm(ApiModel):
    """Which nodes get the entries before any engine needs them, and at what pace."""

    scope: PrewarmScope = Field(
        default="Needed", description="Needed nodes plus spares, or All eligible ones."
    )
    spare_nodes: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=1, description="Warm nodes beyond the needed ones."
    )
    min_ready_nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="Warm nodes that make the cache ready and let a rollout begin."
    )
    max_parallel_nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=4, description="Nodes that build entries at the same time."
    )
    progress_deadline_seconds: _Seconds = Field(
        default=3600, description="Warm-up without progress for this long is reported as DeadlineExceeded."
    )


class CacheSpec(ApiModel):
    """The host weight cache: whether it must serve, how it is checked, mounted, warmed and kept."""

    policy: CachePolicy = Field(
        default="Required",
        description="Required serves from entries only; Opportunistic may load otherwise; Disabled has none.",
    )
    on_fallback: OnFallback = Field(
        default="Fail", description="Whether an engine that got less than was asked for fails or serves."
    )
    verify: Verify = Field(
        default="Always",
        description="Whether engines check all digests at start, or trust the check at publish.",
    )
    mount: Mount = Field(
        default="HostPath",
        description="How engine pods reach the cache; PersistentVolume passes Pod Security `restricted`.",
    )
    prewarm: Prewarm = Field(default=Prewarm(), description="Which nodes are warmed, and at what pace.")
    retention_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        default=86_400, description="How long entries stay after their last reference is gone."
    )


class Placement(ApiModel):
    """Where engine pods may run."""

    node_selector: StringMap = Field(default={}, description="Labels a node must have.")
    tolerations: Annotated[tuple[PassThrough, ...], Field(max_length=64)] = Field(
        default=(), description="Tolerations (core type) of the engine pods."
    )
    affinity: PassThrough = Field(default={}, description="Affinity (core type) of the engine pods.")
    priority_class_name: OptionalDnsSubdomain = Field(
        default="", description="PriorityClass of the engine pods."
    )
    runtime_class_name: OptionalDnsSubdomain = Field(
        default="", description="RuntimeClass of the engine pods."
    )
    gpu_resource: Annotated[
        str,
        StringConstraints(
            min_length=1, max_length=253, pattern=r"^[a-zA-Z0-9]([-a-zA-Z0-9_./]*[a-zA-Z0-9])?$"
        ),
    ] = Field(default="nvidia.com/gpu", description="Extended resource that counts GPUs.")


class Rollout(ApiModel):
    """How a new revision replaces the old one."""

    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=1, description="Engines that may be missing during a rollout."
    )
    max_surge: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0, description="Engines above replicas during a rollout; each needs free GPUs."
    )
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        default=600, description="How long an engine may finish its requests before it is stopped."
    )
    progress_deadline_seconds: _Seconds = Field(
        default=3600, description="A rollout without progress for this long is reported as DeadlineExceeded."
    )


class Serving(ApiModel):
    """The HTTP side of the engine."""

    port: Annotated[int, Field(ge=1, le=65_535)] = Field(
        default=8000, description="Port of the Service and the pods."
    )
    max_queued_requests: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=64, description="Requests that may wait; more are refused with 429."
    )
    service_annotations: StringMap = Field(default={}, description="Annotations added to the Service.")


class DiffusionDeploymentSpec(ApiModel):
    """What is asked for."""

    model: ModelSpec = Field(description="Which model, and in what form its weights are kept.")
    engine: EngineSpec = Field(default=EngineSpec(), description="Which engine serves it.")
    replicas: Annotated[int, Field(ge=0, le=1000)] = Field(default=1, description="Number of engines.")
    parallelism: Parallelism = Field(
        default=Parallelism(), description="Degrees of parallelism of one engine."
    )
    offload: Offload = Field(default=Offload(), description="How streamed components reach the device.")
    cache: CacheSpec = Field(default=CacheSpec(), description="The host weight cache.")
    placement: Placement = Field(default=Placement(), description="Where engine pods may run.")
    rollout: Rollout = Field(default=Rollout(), description="How a new revision replaces the old one.")
    serving: Serving = Field(default=Serving(), description="The HTTP side of the engine.")
    suspend: bool = Field(
        default=False, description="Stops all engines without forgetting the deployment; entries are kept."
    )


class DiffusionDeployment(ApiModel):
    """A diffusion model served by engines that stream its blocks from the host weight cache."""

    api_version: Literal["dlo.dev/v1alpha1"] = Field(description="Always dlo.dev/v1alpha1.")
    kind: Literal["DiffusionDeployment"] = Field(description="Always DiffusionDeployment.")
    metadata: ObjectMeta = Field(description="Standard object metadata.")
    spec: DiffusionDeploymentSpec = Field(description="What is asked for.")
    status: DiffusionDeploymentStatus | None = Field(
        default=None, description="What is found; written by the operator alone."
    )
