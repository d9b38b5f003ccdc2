"""Version v1alpha1 of both kinds."""

from __future__ import annotations

from dlo_api.v1alpha1.diffusion_deployment import (
    DiffusionDeployment,
    DiffusionDeploymentSpec,
    ModelSpec,
    Offload,
    Parallelism,
)
from dlo_api.v1alpha1.node_weight_cache import NodeWeightCache, NodeWeightCacheSpec
from dlo_api.v1alpha1.source import DirectorySource, HuggingFaceSource, S3Source, Source

__all__ = [
    "DiffusionDeployment",
    "DiffusionDeploymentSpec",
    "DirectorySource",
    "HuggingFaceSource",
    "ModelSpec",
    "NodeWeightCache",
    "NodeWeightCacheSpec",
    "Offload",
    "Parallelism",
    "S3Source",
    "Source",
]
