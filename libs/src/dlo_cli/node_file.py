"""Nodes from a file, as ``kubectl get node N -o yaml`` writes them; NodeWeightCaches may stand beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from dlo_api.names import API_VERSION, NODE_WEIGHT_CACHE

from dlo_cli.errors import UsageError

MAX_BYTES = 64 * 2**20
_HINT = "save one with kubectl get node NAME -o yaml"
Json = Mapping[str, Any]


@dataclass(frozen=True)
class NodeFile:
    """The objects of a file: nodes in their order, and what agents reported, by node."""

    nodes: tuple[Json, ...]
    caches: Mapping[str, Json]


def read_nodes(file: Path) -> NodeFile:
    """The nodes of a file. Raises UsageError where it holds none, or anything else."""
    nodes: list[Json] = []
    caches: dict[str, Json] = {}
    for obj in _objects(file):
        name = (obj.get("metadata") or {}).get("name") if isinstance(obj.get("metadata"), Mapping) else None
        kind = (obj.get("apiVersion"), obj.get("kind"))
        if not isinstance(name, str) or not name:
            raise UsageError(f"{file}: a {kind[1]} without metadata.name", hint=_HINT, code="NotANode")
        if kind == ("v1", "Node"):
            nodes.append(obj)
        elif kind == (API_VERSION, NODE_WEIGHT_CACHE):
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
        documents = [each for each in yaml.safe_load_all(data.decode()) if each is not None]
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
    return str(document.get("kind", "")).endswith("List")
