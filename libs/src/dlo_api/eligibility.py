"""Whether a pod of a deployment may run on a node, and if not by which rule: what the scheduler requires. Pure.

Selectors, required node affinity and taints, judged as the scheduler does. What it only prefers, and how much of
a node is taken by other pods, is its own business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from dlo_api.errors import QuantityInvalid
from dlo_api.quantity import parse_quantity
from dlo_api.topology import world_size
from dlo_api.v1alpha1.diffusion_deployment import DiffusionDeploymentSpec, Placement

_KEEPS_OUT: Final = frozenset({"NoSchedule", "NoExecute"})


class TaintLike(Protocol):
    """A taint of a node."""

    @property
    def key(self) -> str:
        """Its key."""

    @property
    def value(self) -> str:
        """Its value; may be empty."""

    @property
    def effect(self) -> str:
        """NoSchedule, PreferNoSchedule or NoExecute."""


class NodeLike(Protocol):
    """A Node, as far as placement looks at it."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""

    @property
    def taints(self) -> Iterable[TaintLike]:
        """Its taints."""

    @property
    def allocatable(self) -> Mapping[str, str]:
        """Quantities that pods may use, by resource."""


class Refusal(NamedTuple):
    """A rule that keeps a pod off a node.

    Attributes:
        field_path: the field of the spec that decides.
        message: what the node has, and what is asked for.
        hint: what to change.
    """

    field_path: str
    message: str
    hint: str


def refusals(placement: Placement, node: NodeLike) -> Iterator[Refusal]:
    """Every rule that keeps the deployment's pods off the node, one by one; nothing when it may run there."""
    for key, value in placement.node_selector.items():
        if node.labels.get(key) != value:
            yield Refusal(
                "spec.placement.nodeSelector",
                f"label {key} is {_shown(node.labels.get(key))}, {value!r} is asked for",
                f"label the node {key}={value}, or change the selector",
            )
    affinity = placement.affinity.get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    if terms is not None and not any(_term_matches(term, node) for term in terms):
        yield Refusal(
            "spec.placement.affinity",
            f"none of its required terms holds: {_terms(terms)}",
            "label the node, or change the affinity",
        )
    for taint in node.taints:
        if taint.effect in _KEEPS_OUT and not any(
            _tolerates(toleration, taint) for toleration in placement.tolerations
        ):
            named = f"{taint.key}={taint.value}" if taint.value else taint.key
            yield Refusal(
                "spec.placement.tolerations",
                f"taint {named}:{taint.effect} is not tolerated",
                f"add a toleration of {taint.key}, or remove the taint",
            )


def admits(placement: Placement, node: NodeLike) -> bool:
    """Whether selector, required affinity and tolerations let the deployment's pods run on the node."""
    return next(refusals(placement, node), None) is None


def gpus(spec: DiffusionDeploymentSpec, node: NodeLike) -> int:
    """GPUs of the node, by the deployment's resource name."""
    try:
        return parse_quantity(node.allocatable.get(spec.placement.gpu_resource, "0"))
    except QuantityInvalid:
        return 0


def engines_that_fit(spec: DiffusionDeploymentSpec, node: NodeLike) -> int:
    """Engines that fit the node by its GPUs; on the CPU one is counted a node, since nothing bounds them."""
    if spec.engine.device == "Cpu":
        return 1
    return gpus(spec, node) // world_size(spec.parallelism)


def _shown(value: str | None) -> str:
    return "not there" if value is None else repr(value)


def _terms(terms: Iterable[Mapping[str, Any]]) -> str:
    """The terms on one line, short."""
    words = [
        f"{item.get('key')} {item.get('operator')} {json.dumps(item.get('values') or [])}"
        for term in terms
        for item in (*(term.get("matchExpressions") or ()), *(term.get("matchFields") or ()))
    ]
    shown = "; ".join(words) or "it has no expression"
    return shown if len(shown) <= 160 else f"{shown[:159]}…"


def _tolerates(toleration: Mapping[str, Any], taint: TaintLike) -> bool:
    effect, key = toleration.get("effect") or "", toleration.get("key") or ""
    if effect not in ("", taint.effect) or key not in ("", taint.key):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return key != "" and (toleration.get("value") or "") == taint.value


def _term_matches(term: Mapping[str, Any], node: NodeLike) -> bool:
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
