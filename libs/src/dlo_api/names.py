"""Names that more than one part must spell alike: group, kinds, labels, field managers, child objects."""

from __future__ import annotations

from typing import Final

GROUP: Final = "dlo.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
CATEGORY: Final = "dlo"

DIFFUSION_DEPLOYMENT: Final = "DiffusionDeployment"
DIFFUSION_DEPLOYMENTS: Final = "diffusiondeployments"
NODE_WEIGHT_CACHE: Final = "NodeWeightCache"
NODE_WEIGHT_CACHES: Final = "nodeweightcaches"

#: Longest name of a DiffusionDeployment, so that names of its children stay within 63 characters.
NAME_MAX_LENGTH: Final = 40

#: The source root that ships with the product.
SAMPLES_ROOT: Final = "samples"

OPERATOR_FIELD_MANAGER: Final = "dlo-operator"
AGENT_FIELD_MANAGER: Final = "dlo-agent"

#: Secrets are read in a user's namespace only where this ClusterRole is bound to the operator.
SECRET_READER_ROLE: Final = "dlo-secret-reader"  # noqa: S105 - the name of a ClusterRole


def label(name: str) -> str:
    """A label or annotation key of ours, e.g. `dlo.dev/revision`."""
    return f"{GROUP}/{name}"
