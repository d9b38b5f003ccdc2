"""What a deployment needs on a node: its source's id and its entries, from the spec alone. Pure.

The operator lists them in NodeWeightCaches; whoever explains a deployment finds them there by the same ids.
"""

from __future__ import annotations

from typing import Final

from dlo_api.identity import identified, source_id
from dlo_api.v1alpha1.diffusion_deployment import DiffusionDeploymentSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntry
from dlo_api.v1alpha1.source import Source

_UNNAMED: Final = "0"


def secret_of(spec: DiffusionDeploymentSpec) -> tuple[str, str] | None:
    """Name and key (empty: all keys) of the Secret that the deployment's source is read with."""
    return secret_of_source(spec.model.source)


def secret_of_source(source: Source) -> tuple[str, str] | None:
    """Name and key (empty: all keys) of the Secret that a source is read with."""
    if source.hugging_face is not None and source.hugging_face.token_secret_ref is not None:
        reference = source.hugging_face.token_secret_ref
        return reference.name, reference.key
    if source.s3 is not None and source.s3.secret_ref is not None:
        return source.s3.secret_ref.name, ""
    return None


def id_of_source(spec: DiffusionDeploymentSpec, namespace: str) -> str:
    """The id of the deployment's source."""
    return id_in_namespace(spec.model.source, spec.model.variant, namespace)


def id_in_namespace(source: Source, variant: str, namespace: str) -> str:
    """The id of a source that a deployment of this namespace names."""
    secret = secret_of_source(source)
    return source_id(source, variant=variant, secret=f"{namespace}/{secret[0]}" if secret is not None else "")


def entries_for(spec: DiffusionDeploymentSpec, source: str) -> tuple[NodeEntry, ...]:
    """Every entry that an engine of this spec may map.

    Under `Required` a Layout per component and tensor rank, and the rest of the pipeline. Under `Opportunistic`
    the whole checkpoint beside the Layouts, so that there is something to fall back on; under `Disabled` the
    whole checkpoint alone.
    """
    size, policy = spec.parallelism.tensor, spec.cache.policy
    layouts = [
        NodeEntry(
            id=_UNNAMED,
            source_id=source,
            kind="Layout",
            component=component,
            layout=spec.model.layout,
            tensor_size=size,
            tensor_rank=rank,
            dtype=spec.model.dtype,
            quantization=spec.model.quantization,
            retention_seconds=spec.cache.retention_seconds,
        )
        for component in (spec.model.components if policy != "Disabled" else ())
        for rank in range(size)
    ]
    required = policy == "Required"
    rest = NodeEntry(
        id=_UNNAMED,
        source_id=source,
        kind="Files",
        select="PipelineRest" if required else "All",
        streamed=tuple(sorted(spec.model.components)) if required else (),
        retention_seconds=spec.cache.retention_seconds,
    )
    return tuple(identified(entry) for entry in (*layouts, rest))
