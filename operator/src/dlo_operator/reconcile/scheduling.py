"""Whether a pod of a deployment may run on a node: the rules of `dlo_api.eligibility` over all nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dlo_api.eligibility import admits
from dlo_api.v1alpha1 import DiffusionDeploymentSpec

from dlo_operator.reconcile.inputs import NodeFacts


def matching(spec: DiffusionDeploymentSpec, nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Nodes that selector, required affinity and tolerations admit, whatever GPUs they have; by name."""
    return tuple(node for node in sorted(nodes, key=lambda node: node.name) if suits(spec, node))


def suits(spec: DiffusionDeploymentSpec, node: NodeFacts) -> bool:
    """Whether selector, required affinity and tolerations admit the node."""
    return not node.deleting and admits(spec.placement, node)
