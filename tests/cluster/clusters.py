"""A cluster to test on: one made by kind for this run, or any other that a kubeconfig file names."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster import images
from cluster.machine import Machine, command, kind, say
from clusterbin import binary

NAME = "dlo-test"
_CONFIG = """\
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}]
"""


@dataclass
class Cluster:
    """A running cluster.

    Attributes:
        kubeconfig: file of an administrator.
        machine: what runs its nodes; None for a cluster that is not ours.
        name: kind's name of it.
    """

    kubeconfig: Path
    machine: Machine | None = None
    name: str = ""

    def words(self, program: str, *arguments: str) -> list[str]:
        """The command line of `kubectl` or `helm` for this cluster."""
        return [str(binary(program)), "--kubeconfig", str(self.kubeconfig), *arguments]

    def kubectl(self, *arguments: str, text: str | None = None, check: bool = True) -> str:
        """What `kubectl` prints; raises RuntimeError with its words when it fails."""
        return command(self.words("kubectl", *arguments), text=text, check=check)

    def refused(self, *arguments: str, text: str | None = None) -> str:
        """The words with which `kubectl` fails; the test fails when it does not."""
        words = self.words("kubectl", *arguments)
        done = subprocess.run(words, input=text, capture_output=True, text=True)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def get(self, kind: str, name: str = "", namespace: str = "", **labels: str) -> Any:
        """An object, or the list of items; None when it is not there."""
        words = ["get", kind, *([name] if name else []), "-o", "json", "--ignore-not-found"]
        words += ["-n", namespace] if namespace else []
        if labels:
            words += ["-l", ",".join(f"{key}={value}" for key, value in labels.items())]
        printed = self.kubectl(*words)
        if not printed.strip():
            return None if name else []
        found = json.loads(printed)
        return found if name else found["items"]

    def apply(self, *objects: dict[str, Any]) -> None:
        """Applies objects as a user does."""
        self.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects))

    def nodes(self) -> list[str]:
        """Names of nodes, the control plane's first."""
        items = self.get("nodes")
        control = "node-role.kubernetes.io/control-plane"
        return [
            node["metadata"]["name"]
            for node in sorted(
                items, key=lambda n: (control not in n["metadata"]["labels"], n["metadata"]["name"])
            )
        ]


def create(machine: Machine, folder: Path, *, name: str = NAME) -> Cluster:
    """A cluster of two nodes with the product's images, the engine's on the worker alone. Raises RuntimeError."""
    kubeconfig = folder / f"{name}.kubeconfig"
    cluster = Cluster(kubeconfig, machine, name)
    if name in kind(machine, "get", "clusters").split():
        kind(machine, "export", "kubeconfig", "--name", name, "--kubeconfig", str(kubeconfig))
    else:
        say(f"creating the kind cluster {name}")
        image = ["--image", machine.node_image] if machine.node_image else []
        where = ["--name", name, "--kubeconfig", str(kubeconfig)]
        kind(machine, "create", "cluster", *where, *image, "--config", "-", "--wait", "180s", text=_CONFIG)
    cluster.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=120s")
    cluster.kubectl("-n", "kube-system", "rollout", "status", "deploy/coredns", "--timeout=120s")
    nodes = cluster.nodes()
    for role in images.ROLES:
        images.load(machine, role, nodes[1:] if role == "engine" else nodes)
    return cluster


def delete(cluster: Cluster) -> None:
    """Removes a cluster that `create` made, with its nodes' disks."""
    if cluster.machine is not None:
        kind(cluster.machine, "delete", "cluster", "--name", cluster.name)


def until(what: str, done: Callable[[], Any], seconds: float, state: Callable[[], Any] = lambda: "") -> Any:
    """What `done` says once it says something true; the test fails with `state` when time is up."""
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end, f"not {what} in {seconds:.0f} s: {state()}"
        time.sleep(0.5)
    return found
