"""Whether what the CRD passes through has the shape that decisions read: objects, lists and words in their places.

The API server judges such fields only when the pods' template is applied; what is read of them before that must not
be an obstacle. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dlo_api.v1alpha1 import DiffusionDeploymentSpec

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
_NAMES: Final[Mapping[type, str]] = {dict: "an object", list: "a list", str: "a string"}


def misshapen(spec: DiffusionDeploymentSpec) -> str:
    """The first field with another shape than it must have, and which; empty when there is none."""
    placement, engine = spec.placement, spec.engine
    found = [
        *_affinity(placement.affinity, "spec.placement.affinity"),
        *_each(list(placement.tolerations), "spec.placement.tolerations", _toleration),
        *_members(engine.resources, "spec.engine.resources", {"limits": dict, "requests": dict}),
    ]
    return found[0] if found else ""


def _affinity(value: dict[str, Any], path: str) -> Iterator[str]:
    yield from _members(value, path, {"nodeAffinity": dict})
    node, path = value.get("nodeAffinity"), f"{path}.nodeAffinity"
    if not isinstance(node, dict):
        return
    yield from _members(node, path, {_REQUIRED: dict, _PREFERRED: list})
    required = node.get(_REQUIRED)
    if isinstance(required, dict):
        path = f"{path}.{_REQUIRED}"
        yield from _members(required, path, {"nodeSelectorTerms": list})
        yield from _each(required.get("nodeSelectorTerms"), f"{path}.nodeSelectorTerms", _term)


def _term(value: Any, path: str) -> Iterator[str]:
    yield from _members(value, path, {"matchExpressions": list, "matchFields": list})
    if isinstance(value, dict):
        for name in ("matchExpressions", "matchFields"):
            yield from _each(value.get(name), f"{path}.{name}", _expression)


def _expression(value: Any, path: str) -> Iterator[str]:
    yield from _members(value, path, {"key": str, "operator": str, "values": list})
    if isinstance(value, dict):
        yield from _each(value.get("values"), f"{path}.values", _word)


def _toleration(value: Any, path: str) -> Iterator[str]:
    yield from _members(value, path, dict.fromkeys(("key", "operator", "value", "effect"), str))


def _word(value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, str):
        yield f"{path} must be a string"


def _members(value: Any, path: str, kinds: dict[str, type]) -> Iterator[str]:
    """Members that are there, and are no null, are of these kinds."""
    if not isinstance(value, dict):
        yield f"{path} must be an object"
        return
    for name, kind in kinds.items():
        if value.get(name) is not None and not isinstance(value[name], kind):
            yield f"{path}.{name} must be {_NAMES[kind]}"


def _each(values: Any, path: str, check: Callable[[Any, str], Iterator[str]]) -> Iterator[str]:
    for number, value in enumerate(values if isinstance(values, list) else ()):
        yield from check(value, f"{path}[{number}]")
