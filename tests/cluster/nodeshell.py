"""Hands on a node: a privileged pod of the agent's image, which sees the node's processes and disk.

It is how tests break a disk or look at pages on any cluster; it never writes an API object's status.
"""

from __future__ import annotations

from typing import Any

from cluster.clusters import Cluster

NAMESPACE = "dlo-test-tools"
HOST = "/host"


class NodeShell:
    """Runs Python as root on a node; the node's root file system is at `HOST`."""

    def __init__(self, cluster: Cluster, node: str, image: str) -> None:
        self._cluster, self.node = cluster, node
        self._pod = f"shell-{node}"
        cluster.apply(_namespace(), _pod(self._pod, node, image))
        cluster.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", f"pod/{self._pod}", "--timeout=90s")

    def python(self, program: str, *arguments: str) -> str:
        """What a program prints; raises RuntimeError with its traceback."""
        return self._cluster.kubectl(
            *("exec", "-i", "-n", NAMESPACE, self._pod, "--", "python", "-", *arguments), text=program
        )


def _namespace() -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def _pod(name: str, node: str, image: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": node,
            "hostPID": True,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": "shell",
                    "image": image,
                    "command": ["python", "-c", "import signal; signal.pause()"],
                    "securityContext": {"privileged": True, "runAsUser": 0},
                    "volumeMounts": [
                        {"name": "host", "mountPath": HOST, "mountPropagation": "HostToContainer"}
                    ],
                }
            ],
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        },
    }
