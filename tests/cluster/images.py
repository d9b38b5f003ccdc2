"""The product's three images, built from its own Dockerfile and put into nodes of a kind cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from cluster.machine import BASE_IMAGE, ROOT, Machine, command, say

VERSION = version("dlo-operator")
ROLES = ("operator", "agent", "engine")
#: The registry part of the images' names: one that can never be pulled from.
REGISTRY = "localhost"
_SHARED = ("/etc/ssl/certs", "/etc/resolv.conf", "/etc/pip.conf")


def name_of(role: str, registry: str = REGISTRY) -> str:
    """The image of a role, as pods name it."""
    return f"{registry}/dlo/{role}:{VERSION}".removeprefix("/")


def build(machine: Machine, roles: Iterable[str] = ROLES) -> None:
    """Builds them; layers that are there already are not made again. Raises RuntimeError."""
    for role in roles:
        say(f"building {name_of(role)}")
        target = ["--target", role, "-t", name_of(role), str(ROOT)]
        if machine.engine == "docker":
            command(["docker", "build", "-q", *target])
            continue
        # The host's trust and package settings hold for its builds as well.
        mounts = [f"--volume={path}:{path}:ro" for path in _SHARED if Path(path).exists()]
        how = ["--layers", "--isolation", "chroot", "--network", "host", f"--build-arg=BASE={BASE_IMAGE}"]
        command(["buildah", "bud", "-q", *how, *mounts, *target])


def load(machine: Machine, role: str, nodes: Iterable[str]) -> None:
    """Streams an image into nodes that lack it; an archive on disk would take gigabytes and minutes."""
    name = name_of(role)
    identity = machine.run([machine.engine, "image", "inspect", "--format", "{{.Id}}", name]).strip()
    for node in nodes:
        if identity.removeprefix("sha256:") in _images_of(machine, node):
            continue
        say(f"loading {name} into {node}")
        save = [
            machine.engine,
            "save",
            *(["--format=docker-archive"] if machine.engine == "podman" else []),
            name,
        ]
        into = [machine.engine, "exec", "-i", node, "ctr", "-n", "k8s.io", "images", "import", "-"]
        with subprocess.Popen(save, env=machine.environment, stdout=subprocess.PIPE) as saving:
            done = subprocess.run(
                into, env=machine.environment, stdin=saving.stdout, capture_output=True, text=True
            )
        if done.returncode or saving.returncode:
            raise RuntimeError(f"{name} could not be loaded into {node}: {done.stderr[-800:]}")


def _images_of(machine: Machine, node: str) -> str:
    return machine.run([machine.engine, "exec", node, "crictl", "images", "--no-trunc", "-q"])
