"""What this machine has for a kind cluster, and the commands that reach its containers.

With Docker, kind uses Docker and the stock node image. Without, it uses podman and a node image made here from
distribution packages and built binaries. Nothing else in the tests knows which of the two it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterbin import ALL, KUBERNETES, binary, build, cache_folder, missing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASE_IMAGE = "localhost/debian:bookworm"
#: Debian packages of the way without Docker.
PACKAGES = (
    "aardvark-dns",
    "buildah",
    "containerd",
    "containernetworking-plugins",
    "debootstrap",
    "gcc",
    "iptables",
    "jq",
    "libc6-dev",
    "netavark",
    "podman",
    "runc",
)
#: What a cold machine writes: images, node, two nodes' disks.
DISK_BYTES = 45 * 10**9
_NETWORK = "kind"


class Unfit(Exception):
    """This machine cannot run a kind cluster; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Machine:
    """How containers are run here.

    Attributes:
        engine: `docker` or `podman`.
        node_image: empty for the stock image of this kind version.
    """

    engine: str
    node_image: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment of kind and of the container engine."""
        found = {**os.environ, "PATH": f"{cache_folder() / 'bin'}:{os.environ['PATH']}"}
        if self.engine == "podman":
            found["KIND_EXPERIMENTAL_PROVIDER"] = "podman"
            found["CONTAINERS_CONF"] = str(HERE / "kind" / "containers.conf")
        return found

    def run(self, arguments: Sequence[str], *, text: str | None = None, check: bool = True) -> str:
        """Output of a command; raises RuntimeError with the end of what it said when it fails."""
        return command(arguments, self.environment, text=text, check=check)


def find() -> Machine:
    """The way this machine would go; looks only."""
    if shutil.which("docker") is not None and _succeeds("docker", "info"):
        return Machine("docker", "")
    return Machine("podman", f"localhost/kindest-node:{KUBERNETES}")


def intent(machine: Machine) -> list[str]:
    """What preparing will do to this machine, for a person to read before it happens."""
    lines = [f"a kind cluster of two nodes, run by {machine.engine}; it is deleted at the end"]
    if lacking := missing(ALL):
        lines.append(f"build {len(lacking)} programs from Go modules into {cache_folder()} (15 minutes cold)")
    if machine.engine == "podman":
        if packages := _missing_packages():
            lines.append("install Debian packages: " + " ".join(packages))
        lines += [
            "make /lib/modules if it is not there; one bridge network named kind; one iptables rule that keeps "
            "the cluster's traffic on this machine",
            f"a node image from Debian packages, {machine.node_image} (3 minutes, once)",
        ]
    lines.append(
        "the product's three images (10 minutes cold, seconds later); up to 45 GB of disk while cold"
    )
    return lines


def prepare(machine: Machine) -> None:
    """Everything before the first cluster. Raises Unfit, or RuntimeError when a step fails."""
    if shutil.which("go") is None and missing(ALL):
        raise Unfit("go is not installed: it builds " + ", ".join(missing(ALL)))
    prepare_images(machine)
    build(ALL)
    if machine.engine == "podman":
        Path("/lib/modules").mkdir(exist_ok=True)
        _network(machine)
        if not _succeeds("buildah", "inspect", "--type", "image", machine.node_image):
            say(f"building {machine.node_image}")
            script = str(HERE / "kind" / "node-image.sh")
            command([script, machine.node_image, BASE_IMAGE, str(cache_folder())])


def prepare_images(machine: Machine) -> None:
    """What building the product's images needs. Raises Unfit, or RuntimeError when a step fails."""
    if machine.engine == "docker":
        return
    if os.getuid() != 0:
        raise Unfit("without Docker this needs root — install Docker, or run as root")
    _install(_missing_packages())
    if not _succeeds("buildah", "inspect", "--type", "image", BASE_IMAGE):
        say(f"building {BASE_IMAGE}")
        cache_folder().mkdir(parents=True, exist_ok=True)
        command([str(HERE / "kind" / "base-image.sh"), BASE_IMAGE, str(cache_folder() / "rootfs.tar")])


def command(
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    *,
    text: str | None = None,
    check: bool = True,
) -> str:
    """Output of a command; raises RuntimeError with the end of what it said when it fails."""
    done = subprocess.run(list(arguments), env=environment, input=text, capture_output=True, text=True)
    if check and done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"{' '.join(arguments[:6])} … failed with {done.returncode}:\n{tail}")
    return done.stdout


def say(line: str) -> None:
    """A line for the person who waits."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _missing_packages() -> tuple[str, ...]:
    return tuple(name for name in PACKAGES if not _succeeds("dpkg", "-s", name))


def _install(packages: Sequence[str]) -> None:
    if not packages:
        return
    if shutil.which("apt-get") is None:
        raise Unfit("install these, or Docker: " + " ".join(packages))
    say("installing " + " ".join(packages))
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command(["apt-get", "update", "-qq"], environment)
    command(["apt-get", "install", "-y", "-qq", *packages], environment)


def _network(machine: Machine) -> None:
    """The bridge that kind adopts, and the fence: nothing from the cluster leaves this machine."""
    if not _succeeds("podman", "network", "exists", _NETWORK, environment=machine.environment):
        machine.run(["podman", "network", "create", "-d", "bridge", "--subnet", "10.89.0.0/24", _NETWORK])
    form = "{{range .}}{{.NetworkInterface}}{{end}}"
    bridge = machine.run(["podman", "network", "inspect", _NETWORK, "--format", form]).strip()
    route = command(["ip", "-4", "route", "show", "default"]).split()
    if "dev" not in route:
        return
    rule = ["FORWARD", "-i", bridge, "-o", route[route.index("dev") + 1], "-j", "DROP"]
    if not _succeeds("iptables", "-t", "mangle", "-C", *rule):
        command(["iptables", "-t", "mangle", "-I", *rule])


def _succeeds(*arguments: str, environment: dict[str, str] | None = None) -> bool:
    try:
        return subprocess.run(arguments, env=environment, capture_output=True).returncode == 0
    except OSError:
        return False


def kind(machine: Machine, *arguments: str, text: str | None = None) -> str:
    """Output of `kind`."""
    return machine.run([str(binary("kind")), *arguments], text=text)
