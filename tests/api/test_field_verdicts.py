"""One verdict, field by field: each field of a full object is given odd values, here and on the server.

Known differences, all on the strict side here or without meaning:
- an unknown field is refused here by its name; the server drops it (and `kubectl apply` refuses it too);
- 1.0 is no integer here;
- a null inside a value that is handed on to the pod is dropped here and kept there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api.apiserver import ApiServer
from dlo_api.crdgen import KINDS, object_schema
from dlo_api.errors import ApiError
from dlo_api.load import load_manifest

_FULL = yaml.safe_load((Path(__file__).parent / "full_deployment.yaml").read_text(encoding="utf-8"))
_SPEC: dict[str, Any] = object_schema(KINDS[0])["properties"]["spec"]
_OTHER_SOURCES: dict[str, dict[str, Any]] = {
    "directory": {"directory": {"root": "samples", "path": "digits"}},
    "s3": {"s3": {"bucket": "models", "prefix": "a", "secretRef": {"name": "s3"}, "endpoint": "mirror"}},
}
_ODD: tuple[Any, ...] = (
    None, "", "a\n", "A b", "é" * 40, "x" * 5000, "-1Gi", -1, 2**63, 1.5, True, [], {}, ["a", "a"],
    [{"name": "a"}, {"name": "a"}], {"a": 1},
)  # fmt: skip


def _paths(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in schema.get("properties", {}).items():
        yield (*path, name)
        yield from _paths(field, (*path, name))


def _with(path: tuple[str, ...], odd: Any) -> dict[str, Any]:
    value = {name: copy.deepcopy(_FULL[name]) for name in ("apiVersion", "kind", "metadata", "spec")}
    value["metadata"]["namespace"] = "default"
    if len(path) > 2 and path[2] in _OTHER_SOURCES:
        value["spec"]["model"]["source"] = copy.deepcopy(_OTHER_SOURCES[path[2]])
    holder = value["spec"]
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = odd
    return value


def _said_here(value: dict[str, Any]) -> tuple[Any, bool]:
    """The spec as the product reads it, or None; and whether unknown fields are all that is wrong."""
    try:
        return load_manifest(json.dumps(value), "odd", cluster=True).spec.to_json(), False
    except ApiError as error:
        return None, {problem.message for problem in error.problems} == {"unknown field"}


@pytest.mark.parametrize("part", sorted(_SPEC["properties"]))
def test_odd_values_get_the_same_verdict(server: ApiServer, part: str) -> None:
    """Refused on both sides or on neither, and stored as it is read."""
    paths = [path for path in _paths(_SPEC) if path[0] == part]
    differing = []
    verdicts = set()
    for path in paths:
        for odd in _ODD:
            value = _with(path, odd)
            spec, only_unknown = _said_here(value)
            stored, error = server.admit(value, "diffusiondeployments")
            verdicts.add(stored is not None)
            if only_unknown and stored is not None:
                continue
            if spec != (stored or {}).get("spec"):
                differing.append((".".join(path), odd, "here" if spec else "not here", str(error)))
    assert differing == []
    assert verdicts == {True, False}
