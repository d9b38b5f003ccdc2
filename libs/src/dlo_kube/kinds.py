"""The kinds that this product reads or writes, and where the API server keeps them. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from dlo_api import names

from dlo_kube.errors import Invalid


class Kind(NamedTuple):
    """One kind of object, e.g. `Kind("apps/v1", "Deployment", "deployments", True)`."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """URL path of one object, or of the collection; without a namespace: of all namespaces."""
        parts = ["apis" if "/" in self.api_version else "api", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        return "/" + "/".join(parts)


DIFFUSION_DEPLOYMENT: Final = Kind(
    names.API_VERSION, names.DIFFUSION_DEPLOYMENT, names.DIFFUSION_DEPLOYMENTS, True
)
NODE_WEIGHT_CACHE: Final = Kind(names.API_VERSION, names.NODE_WEIGHT_CACHE, names.NODE_WEIGHT_CACHES, False)
NAMESPACE: Final = Kind("v1", "Namespace", "namespaces", False)
NODE: Final = Kind("v1", "Node", "nodes", False)
POD: Final = Kind("v1", "Pod", "pods", True)
SERVICE: Final = Kind("v1", "Service", "services", True)
SECRET: Final = Kind("v1", "Secret", "secrets", True)
EVENT: Final = Kind("events.k8s.io/v1", "Event", "events", True)
PERSISTENT_VOLUME: Final = Kind("v1", "PersistentVolume", "persistentvolumes", False)
PERSISTENT_VOLUME_CLAIM: Final = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims", True)
DEPLOYMENT: Final = Kind("apps/v1", "Deployment", "deployments", True)
POD_DISRUPTION_BUDGET: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", True)
LEASE: Final = Kind("coordination.k8s.io/v1", "Lease", "leases", True)

KINDS: Final = (
    DIFFUSION_DEPLOYMENT,
    NODE_WEIGHT_CACHE,
    NAMESPACE,
    NODE,
    POD,
    SERVICE,
    SECRET,
    EVENT,
    PERSISTENT_VOLUME,
    PERSISTENT_VOLUME_CLAIM,
    DEPLOYMENT,
    POD_DISRUPTION_BUDGET,
    LEASE,
)
_BY_NAME: Final[Mapping[tuple[str, str], Kind]] = {(kind.api_version, kind.kind): kind for kind in KINDS}


def kind_of(obj: Mapping[str, Any]) -> Kind:
    """The kind of an object.

    Raises:
        Invalid: `apiVersion` and `kind` name none that is known here.
    """
    found = _BY_NAME.get((obj.get("apiVersion", ""), obj.get("kind", "")))
    if found is None:
        raise Invalid(
            f"apiVersion {obj.get('apiVersion')!r}, kind {obj.get('kind')!r}: not a kind of this product",
            hint="add it to dlo_kube.kinds",
        )
    return found
