"""A model hub and an S3 store as pods of the cluster: the stand-ins of the unit tests, in the agent's image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.clusters import Cluster
from cluster.nodeshell import NAMESPACE, NodeShell

FAKES = Path(__file__).parents[1] / "fakes"
TOKEN = "hf_stand-in-token"
KEY_ID = "AKIASTANDIN"
REPO, BUCKET = "dlo/digits", "models"
ENDPOINTS = {
    "hub": [{"name": "stand-in", "url": f"http://hub.{NAMESPACE}.svc:8080"}],
    "s3": [{"name": "stand-in", "url": f"http://s3.{NAMESPACE}.svc:8080"}],
}
_COMMANDS = {
    "hub": ["--repo", REPO, "--token", TOKEN, "--private"],
    "s3": ["--bucket", BUCKET, "--access-key-id", KEY_ID],
}


class StandIns:
    """The hub `hub` with a private repository, the store `s3` with a private bucket; both hold the sample model."""

    def __init__(self, cluster: Cluster, shell: NodeShell, image: str) -> None:
        self._shell = shell
        names = ("hub.py", "s3.py", "serving.py")
        files = {name: (FAKES / name).read_text() for name in names}
        meta = {"name": "stand-ins", "namespace": NAMESPACE}
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": files})
        for name in _COMMANDS:
            cluster.apply(_service(name), _pod(name, image))
        cluster.kubectl(
            *("-n", NAMESPACE, "wait", "--for=condition=Ready", "pod/hub", "pod/s3", "--timeout=120s")
        )

    def fault(self, name: str, kind: str = "") -> None:
        """Breaks one of them in a way of the stand-ins (`unavailable`, `slow` …), or mends it."""
        address = f"http://{name}.{NAMESPACE}.svc:8080/stand-in/fault"
        self._shell.python(
            "import sys, urllib.request as u\n"
            "u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), method='PUT'), timeout=20).read()",
            *(address, kind),
        )


def hub(token: bool = True, **more: Any) -> dict[str, Any]:
    """A source: the hub's repository, with a token from the Secret `hub`."""
    secret = {"tokenSecretRef": {"name": "hub", "key": "token"}} if token else {}
    return {"source": {"huggingFace": {"repo": REPO, "endpoint": "stand-in", **secret, **more}}}


def s3(**more: Any) -> dict[str, Any]:
    """A source: the store's prefix, with the keys from the Secret `s3`."""
    return {
        "source": {
            "s3": {
                "bucket": BUCKET,
                "prefix": "digits",
                "endpoint": "stand-in",
                "secretRef": {"name": "s3"},
                **more,
            }
        }
    }


def _service(name: str) -> dict[str, Any]:
    ports = [{"name": f"p{port}", "port": port} for port in (8080, 8081)]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"stand-in": name}, "ports": ports},
    }


def _pod(name: str, image: str) -> dict[str, Any]:
    command = ["python", f"/stand-ins/fakes/{name}.py", "--folder", "/opt/dlo/samples/digits"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"stand-in": name}},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": name,
                    "image": image,
                    "command": [*command, "--port", "8080", *_COMMANDS[name]],
                    "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
                    "volumeMounts": [{"name": "code", "mountPath": "/stand-ins/fakes"}],
                }
            ],
            "volumes": [{"name": "code", "configMap": {"name": "stand-ins"}}],
        },
    }


def secret(namespace: str, name: str, **data: str) -> dict[str, Any]:
    """A Secret of a user."""
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": data}
