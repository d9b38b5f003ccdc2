"""Nodes from a file, as ``kubectl get node N -o yaml`` writes them; NodeWeightCaches may stand beside them.

No API server has looked at a file, so the fields that are judged by are checked here: whatever stands in it, the
rest may rely on their kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from dlo_api.names import API_VERSION, NODE_WEIGHT_CACHE
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from dlo_cli.errors import UsageError

MAX_BYTES = 16 * 2**20
# The parser in C takes a third of the time, and has its own bound on nesting.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HINT = "save one with kubectl get node NAME -o yaml"
Json = Mapping[str, Any]


@dataclass(frozen=True)
class NodeFile:
    """The objects of a file: nodes in their order, and what agents reported, by node."""

    nodes: tuple[Json, ...]
    caches: Mapping[str, Json]


class _Shape(BaseModel):
    """Fields that somebody looks at, if they are there; all others pass unseen."""

    model_config = ConfigDict(strict=True, alias_generator=to_camel)


class _Taint(_Shape):
    key: str | None = None
    value: str | None = None
    effect: str | None = None


class _Condition(_Shape):
    type: str
    status: str
    reason: str | None = None
    message: str | None = None


class _Metadata(_Shape):
    labels: dict[str, str] | None = None


class _NodeSpec(_Shape):
    unschedulable: bool | None = None
    taints: list[_Taint] | None = None


class _NodeStatus(_Shape):
    allocatable: dict[str, str | int] | None = None
    conditions: list[_Condition] | None = None


class _Node(_Shape):
    metadata: _Metadata
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


class _Root(_Shape):
    path: str | None = None
    free_bytes: int | None = None


class _Memory(_Shape):
    warm_budget_bytes: int | None = None
    lock_limit_bytes: int | None = None


class _Entry(_Shape):
    id: str | None = None
    phase: str | None = None
    bytes: int | None = None


class _CacheStatus(_Shape):
    root: _Root | None = None
    memory: _Memory | None = None
    entries: list[_Entry] | None = None
    conditions: list[_Condition] | None = None


class _Cache(_Shape):
    metadata: _Metadata
    status: _CacheStatus | None = None


def read_nodes(file: Path) -> NodeFile:
    """The nodes of a file. Raises UsageError where it holds none, or anything else."""
    nodes: list[Json] = []
    caches: dict[str, Json] = {}
    for obj in _objects(file):
        name = (obj.get("metadata") or {}).get("name") if isinstance(obj.get("metadata"), Mapping) else None
        kind = (obj.get("apiVersion"), obj.get("kind"))
        if not all(isinstance(word, str) for word in kind):
            raise UsageError(f"{file}: an object without apiVersion and kind", hint=_HINT, code="NotANode")
        if not isinstance(name, str) or not name:
            raise UsageError(f"{file}: a {kind[1]} without metadata.name", hint=_HINT, code="NotANode")
        if kind == ("v1", "Node"):
            _check(_Node, obj, f"{file}: Node {name}")
            nodes.append(obj)
        elif kind == (API_VERSION, NODE_WEIGHT_CACHE):
            _check(_Cache, obj, f"{file}: {NODE_WEIGHT_CACHE} {name}")
            caches[name] = obj
        else:
            raise UsageError(
                f"{file}: {kind[0]} {kind[1]} {name} is neither a Node nor a {NODE_WEIGHT_CACHE}",
                hint=_HINT,
                code="NotANode",
            )
    if not nodes:
        raise UsageError(f"{file}: there is no Node in it", hint=_HINT, code="NotANode")
    strange = sorted(set(caches) - {node["metadata"]["name"] for node in nodes})
    if strange:
        raise UsageError(
            f"{file}: {NODE_WEIGHT_CACHE} {strange[0]} is of a node that is not in it",
            hint="give the Node of that name beside it",
            code="NotANode",
        )
    return NodeFile(tuple(nodes), caches)


def _check(shape: type[_Shape], obj: Json, what: str) -> None:
    try:
        shape.model_validate(obj)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:200]
        raise UsageError(f"{what}: {place}: {first['msg']}", hint=_HINT, code="NotANode") from None


def _objects(file: Path) -> Iterator[Json]:
    """Every object, those of lists one by one."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}", hint=_HINT) from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{file}: is larger than {MAX_BYTES // 2**20} MiB", hint="give fewer nodes a file")
    try:
        documents = [each for each in yaml.load_all(data.decode(), _LOADER) if each is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark is not None else str(file)
        raise UsageError(f"{where}: not YAML: {error.problem}", hint=_HINT) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not YAML: {' '.join(str(error).split())[:200]}", hint=_HINT) from error
    for document in documents:
        items = document.get("items") if isinstance(document, dict) and _is_list(document) else [document]
        for obj in items if isinstance(items, list) else [items]:
            if not isinstance(obj, dict):
                raise UsageError(f"{file}: something that is no object", hint=_HINT, code="NotANode")
            yield obj


def _is_list(document: Json) -> bool:
    kind = document.get("kind")
    return isinstance(kind, str) and kind.endswith("List")
