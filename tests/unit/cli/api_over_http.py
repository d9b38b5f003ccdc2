"""A cluster in memory behind HTTP, so that a command's whole way to it is the real one: kubeconfig, client, proxy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dlo_kube.errors import Denied
from dlo_kube.kinds import KINDS
from fakes.kube import FakeCluster
from unit.kube.http_server import Answer, Asked, status

TOKEN = "let-me-in"


class ClusterOverHttp:
    """Answers GETs as an API server: objects, lists, label and field selectors, and engines through pods/proxy."""

    def __init__(self, cluster: FakeCluster, engine: Mapping[str, Any] | None = None) -> None:
        self.cluster, self.engine = cluster, engine

    def __call__(self, asked: Asked) -> Answer:
        """One answer."""
        if asked.headers.get("authorization") != f"Bearer {TOKEN}":
            return status(401, "Unauthorized", "Unauthorized")
        if asked.path.endswith("/proxy/v1/engine/status"):
            if self.engine is None:
                return status(
                    403, "Forbidden", 'pods "digits-1" is forbidden: cannot get resource "pods/proxy"'
                )
            return Answer(body=json.dumps(self.engine).encode())
        try:
            return self._objects(asked)
        except Denied as error:
            return status(403, "Forbidden", error.message)

    def _objects(self, asked: Asked) -> Answer:
        parts = [unquote(part) for part in asked.path.strip("/").split("/")]
        version = parts[1] if parts[0] == "api" else "/".join(parts[1:3])
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = None
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = next((k for k in KINDS if (k.api_version, k.plural) == (version, rest[0])), None)
        if kind is None:
            return status(404, "NotFound", "the server could not find the requested resource")
        if len(rest) > 1:
            found = self.cluster.get(kind, rest[1], namespace)
            if found is None:
                return status(404, "NotFound", f"{kind.plural} {rest[1]!r} not found", name=rest[1])
            return Answer(body=json.dumps(found).encode())
        labels, fields = (
            dict(pair.split("=", 1) for pair in asked.query.get(name, "").split(",") if pair)
            for name in ("labelSelector", "fieldSelector")
        )
        items = self.cluster.list(kind, namespace, labels=labels, fields=fields).items
        return Answer(body=json.dumps({"metadata": {"resourceVersion": "1"}, "items": list(items)}).encode())


def kubeconfig(folder: Path, url: str, *, token: str = TOKEN, namespace: str = "") -> Path:
    """A kubeconfig file of one context, `lab`."""
    context = {"cluster": "lab", "user": "jane", **({"namespace": namespace} if namespace else {})}
    value = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": url}}],
        "users": [{"name": "jane", "user": {"token": token}}],
        "contexts": [{"name": "lab", "context": context}],
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(value))
    return file
