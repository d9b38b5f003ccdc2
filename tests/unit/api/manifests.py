"""Manifests for the tests of `dlo_api`: the smallest one, and changes to it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from dlo_api.v1alpha1 import DiffusionDeployment

TEXT = """\
apiVersion: dlo.dev/v1alpha1
kind: DiffusionDeployment
metadata: {name: digits}
spec:
  model:
    source:
      directory: {root: samples, path: digits}
"""

_SMALLEST: dict[str, Any] = {
    "apiVersion": "dlo.dev/v1alpha1",
    "kind": "DiffusionDeployment",
    "metadata": {"name": "digits"},
    "spec": {"model": {"source": {"directory": {"root": "samples", "path": "digits"}}}},
}


def manifest(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The smallest manifest with fields set by dotted path, e.g. `{"spec.replicas": 2}`."""
    value = copy.deepcopy(_SMALLEST)
    for path, new in (changes or {}).items():
        *parents, last = path.split(".")
        holder = value
        for name in parents:
            holder = holder.setdefault(name, {})
        holder[last] = copy.deepcopy(new)
    return value


def deployment(changes: Mapping[str, Any] | None = None) -> DiffusionDeployment:
    """The deployment of that manifest, fields checked and rules not."""
    return DiffusionDeployment.model_validate_json(json.dumps(manifest(changes)), by_name=False)
