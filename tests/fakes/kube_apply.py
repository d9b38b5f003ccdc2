"""Server-side apply on plain values: which fields a manager owns, and what an apply makes of an object.

Follows the API server's rules for maps, atomic lists and lists that are maps by key. Which lists are maps is
taken from the CRDs for our kinds and from a table for those of the core. Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from dlo_api.crdgen import KINDS, object_schema

Step = str | tuple[tuple[str, Any], ...]
Path = tuple[Step, ...]

_POD_SPEC: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "containers[].env": ("name",),
    "initContainers[].env": ("name",),
    "containers[].ports": ("containerPort", "protocol"),
    "containers[].volumeMounts": ("mountPath",),
    "initContainers[].volumeMounts": ("mountPath",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
}
_CORE: dict[str, dict[str, tuple[str, ...]]] = {
    "Deployment": {
        **{f".spec.template.spec.{path}": keys for path, keys in _POD_SPEC.items()},
        ".status.conditions": ("type",),
    },
    "Pod": {
        **{f".spec.{path}": keys for path, keys in _POD_SPEC.items()},
        ".status.conditions": ("type",),
    },
    "Node": {".status.conditions": ("type",)},
    "Service": {".spec.ports": ("port", "protocol")},
}


def _schema_lists(schema: dict[str, Any], where: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    if "x-kubernetes-list-map-keys" in schema:
        yield where, tuple(schema["x-kubernetes-list-map-keys"])
    for name, field in schema.get("properties", {}).items():
        yield from _schema_lists(field, f"{where}.{name}")
    if "items" in schema:
        yield from _schema_lists(schema["items"], f"{where}[]")


_LISTS: dict[str, dict[str, tuple[str, ...]]] = {
    **_CORE,
    **{kind.name: dict(_schema_lists(object_schema(kind))) for kind in KINDS},
}


class Fields:
    """The field paths of one kind."""

    def __init__(self, kind: str) -> None:
        self.lists = {".metadata.ownerReferences": ("uid",), **_LISTS.get(kind, {})}

    def owned(self, value: Any, path: Path = (), where: str = "") -> Iterator[Path]:
        """The paths that an apply of `value` owns: leaves, and the items of lists that are maps."""
        keys = self.lists.get(where)
        if isinstance(value, dict) and value:
            for name, item in value.items():
                yield from self.owned(item, (*path, name), f"{where}.{name}")
        elif isinstance(value, list) and keys is not None:
            for item in value:
                step = (*path, self._key(keys, item))
                yield step
                yield from self.owned(item, step, f"{where}[]")
        else:
            yield path

    @staticmethod
    def _key(keys: tuple[str, ...], item: dict[str, Any]) -> Step:
        return tuple((key, item.get(key, "TCP" if key == "protocol" else None)) for key in keys)

    def merge(self, live: Any, new: Any, where: str = "") -> Any:
        """`new` laid over `live`; both are left as they are."""
        keys = self.lists.get(where)
        if isinstance(live, dict) and isinstance(new, dict):
            merged = dict(live)
            for name, item in new.items():
                merged[name] = self.merge(live.get(name), item, f"{where}.{name}")
            return merged
        if isinstance(live, list) and isinstance(new, list) and keys is not None:
            rest = {self._key(keys, item): item for item in live}
            given = {self._key(keys, item): item for item in new}
            # In the order of the apply, as the server has it; what others added comes after.
            merged_items = [self.merge(rest.get(key), item, f"{where}[]") for key, item in given.items()]
            return merged_items + [item for key, item in rest.items() if key not in given]
        return copy.deepcopy(new)


def at(value: Any, path: Path) -> Any:
    """What stands at `path`; None when there is nothing."""
    for step in path:
        value = _child(value, step)
    return value


def _child(value: Any, step: Step) -> Any:
    if isinstance(step, str):
        return value.get(step) if isinstance(value, dict) else None
    return next((item for item in value or () if _matches(item, step)), None)


def _matches(item: Any, step: Step) -> bool:
    if isinstance(step, str):
        return False
    return isinstance(item, dict) and all(
        item.get(key, "TCP" if key == "protocol" else None) == wanted for key, wanted in step
    )


def without(value: Any, path: Path) -> Any:
    """`value` without what stands at `path`, and without the map or list that this leaves empty."""
    step, rest = path[0], path[1:]
    if isinstance(step, str):
        if not isinstance(value, dict) or step not in value:
            return value
        if rest:
            left = without(value[step], rest)
            changed = {**value, step: left}
            if left in ({}, []):
                del changed[step]
            return changed
        return {name: item for name, item in value.items() if name != step}
    if not isinstance(value, list):
        return value
    if not rest:
        return [item for item in value if not _matches(item, step)]
    return [without(item, rest) if _matches(item, step) else item for item in value]
