"""A kind cluster with the product installed, for a person: `make kind`, `make kind-down`.

python -m cluster up | down | prepare      (with tests/ on PYTHONPATH)
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster import clusters, images
from cluster.machine import Machine, Unfit, find, intent, kind, prepare, prepare_images, say
from cluster.product import Release
from clusterbin import binary, cache_folder

NAME = "dlo"


def main(words: list[str]) -> int:
    """The command; returns the exit status."""
    if len(words) != 1 or words[0] not in _COMMANDS:
        say(f"usage: python -m cluster {'|'.join(_COMMANDS)}")
        return 2
    machine = find()
    try:
        _COMMANDS[words[0]](machine)
    except (Unfit, RuntimeError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def ready(machine: Machine) -> None:
    """Says what will be done, and does it: programs, node image, the product's images."""
    say("This machine gets:")
    for line in intent(machine):
        say(f"  - {line}")
    prepare(machine)
    images.build(machine)


def _up(machine: Machine) -> None:
    ready(machine)
    folder = cache_folder()
    cluster = clusters.create(machine, folder, name=NAME)
    say("installing the chart")
    Release(cluster, images.REGISTRY).install()
    kubectl = f"{binary('kubectl')} --kubeconfig {cluster.kubeconfig}"
    say(f"The cluster {NAME} is there with DLO Operator in dlo-system. Next:\n")
    say(f"  export KUBECONFIG={cluster.kubeconfig} PATH={binary('kubectl').parent}:$PATH")
    say("  kubectl apply -f examples/digits-cluster.yaml")
    say("  kubectl wait --for=condition=Ready ddep/digits --timeout=300s")
    say("  kubectl port-forward svc/digits 8000 &\n")
    say(f"make kind-down removes it ({kubectl} is the same without export).")


def _down(machine: Machine) -> None:
    kind(machine, "delete", "cluster", "--name", NAME)
    Path(cache_folder() / f"{NAME}.kubeconfig").unlink(missing_ok=True)


def _images(machine: Machine) -> None:
    prepare_images(machine)
    images.build(machine)


_COMMANDS = {"up": _up, "down": _down, "images": _images}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
