"""Whether a pod of a deployment may run on a node: the scheduler's own rules for selectors, affinity and taints.

Only what the scheduler requires; what it prefers is its own business. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dlo_api.errors import QuantityInvalid
from dlo_api.quantity import parse_quantity
from dlo_api.topology import world_size
from dlo_api.v1alpha1 import DiffusionDeploymentSpec

from dlo_operator.reconcile.inputs import NodeFacts, Taint

_KEEPS_OUT: Final = frozenset({"NoSchedule", "NoExecute"})


def matching(spec: DiffusionDeploymentSpec, nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Nodes that selector, required affinity and tolerations admit, whatever GPUs they have; by name."""
    placement = spec.placement
    terms = (
        placement.affinity.get("nodeAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", {})
        .get("nodeSelectorTerms")
    )
    return tuple(
        node
        for node in sorted(nodes, key=lambda node: node.name)
        if not node.deleting
        and all(node.labels.get(key) == value for key, value in placement.node_selector.items())
        and (terms is None or any(_term_matches(term, node) for term in terms))
        and all(
            any(_tolerates(toleration, taint) for toleration in placement.tolerations)
            for taint in node.taints
            if taint.effect in _KEEPS_OUT
        )
    )


def gpus(spec: DiffusionDeploymentSpec, node: NodeFacts) -> int:
    """GPUs of the node, by the deployment's resource name."""
    try:
        return parse_quantity(node.allocatable.get(spec.placement.gpu_resource, "0"))
    except QuantityInvalid:
        return 0


def engines_that_fit(spec: DiffusionDeploymentSpec, node: NodeFacts) -> int:
    """Engines that fit the node by its GPUs; on the CPU one is counted a node, since nothing bounds them."""
    if spec.engine.device == "Cpu":
        return 1
    return gpus(spec, node) // world_size(spec.parallelism)


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    effect, key = toleration.get("effect") or "", toleration.get("key") or ""
    if effect not in ("", taint.effect) or key not in ("", taint.key):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return key != "" and (toleration.get("value") or "") == taint.value


def _term_matches(term: Mapping[str, Any], node: NodeFacts) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_matches(item, node.labels) for item in expressions) and all(
        _matches(item, {"metadata.name": node.name}) for item in fields
    )


def _matches(item: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    value, wanted = values.get(item.get("key", "")), item.get("values") or []
    check = _OPERATORS.get(item.get("operator", ""))
    return check is not None and check(value, wanted)


def _above(value: str | None, wanted: list[str]) -> int:
    """1, 0 or -1 as the value is above, equal to or below the one wanted; 0 when they are no numbers."""
    try:
        difference = int(value or "") - int(wanted[0])
    except (ValueError, IndexError):
        return 0
    return (difference > 0) - (difference < 0)


_OPERATORS: Final[Mapping[str, Callable[[str | None, list[str]], bool]]] = {
    "In": lambda value, wanted: value in wanted,
    "NotIn": lambda value, wanted: value not in wanted,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": lambda value, wanted: _above(value, wanted) > 0,
    "Lt": lambda value, wanted: _above(value, wanted) < 0,
}
