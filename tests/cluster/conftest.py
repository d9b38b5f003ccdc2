"""One cluster and one release for the whole folder; a namespace of its own for each test.

`DLO_CLUSTER=1` makes a kind cluster and deletes it afterwards (`DLO_KEEP_CLUSTER=1` keeps it for the next run).
`DLO_KUBECONFIG=FILE` uses that cluster as it is, with images from the registry `DLO_IMAGE_REGISTRY`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import clusters, images
from cluster.__main__ import ready
from cluster.clusters import Cluster
from cluster.machine import find, say
from cluster.nodeshell import NodeShell
from cluster.product import Deployed, Release, example
from cluster.standins import ENDPOINTS, StandIns

#: A folder of models on every node, for named source roots.
MODELS = "/srv/dlo-test-models"
_MAKE_MODELS = f"""
import shutil
from pathlib import Path
root = Path("/host{MODELS}")
root.mkdir(parents=True, exist_ok=True)
root.chmod(0o755)
# The folder itself stays: running agents have it mounted.
for folder in root.iterdir():
    shutil.rmtree(folder)
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster."""
    if given := os.environ.get("DLO_KUBECONFIG"):
        yield Cluster(Path(given))
        return
    machine = find()
    ready(machine)
    made = clusters.create(machine, tmp_path_factory.mktemp("cluster"))
    yield made
    if os.environ.get("DLO_KEEP_CLUSTER") != "1":
        say(f"deleting the kind cluster {made.name}")
        clusters.delete(made)


@pytest.fixture(scope="session")
def registry() -> str:
    """Where the cluster's nodes have the product's images from."""
    return os.environ.get("DLO_IMAGE_REGISTRY", images.REGISTRY)


@pytest.fixture(scope="session")
def shells(cluster: Cluster, registry: str) -> dict[str, NodeShell]:
    """Hands on every node, by its name."""
    return {node: NodeShell(cluster, node, images.name_of("agent", registry)) for node in cluster.nodes()}


@pytest.fixture(scope="session")
def release(cluster: Cluster, registry: str, shells: dict[str, NodeShell]) -> Release:
    """The chart, installed as a newcomer does, with one more source root: `models`, a folder of each node."""
    for shell in shells.values():
        shell.python(_MAKE_MODELS)
    made = Release(cluster, registry)
    made.install(sourceRoots=[{"name": "models", "hostPath": MODELS}], endpoints=ENDPOINTS)
    return made


@pytest.fixture(scope="session")
def stores(cluster: Cluster, registry: str, shells: dict[str, NodeShell], worker: str) -> StandIns:
    """A hub and an S3 store in the cluster."""
    return StandIns(cluster, shells[worker], images.name_of("agent", registry))


@pytest.fixture(scope="session")
def worker(cluster: Cluster) -> str:
    """The node that engines run on."""
    return cluster.nodes()[-1]


@contextmanager
def new_namespace(cluster: Cluster, prefix: str) -> Iterator[str]:
    """A namespace of a name that was never used.

    Its objects go one kind at a time, since a namespace that is deleted with pods waits for half of their grace
    period before it looks again.
    """
    name = f"{prefix}-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "ddep", "--all", "-n", name, "--wait", check=False)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A new namespace, deleted after the test."""
    with new_namespace(cluster, "test") as name:
        yield name


@pytest.fixture
def deploy(cluster: Cluster, release: Release, namespace: str) -> Callable[..., Deployed]:
    """Applies the example with another spec, in the test's namespace."""
    assert release.name

    def apply(name: str = "digits", **spec: Any) -> Deployed:
        cluster.apply(example(namespace, name, **spec))
        return Deployed(cluster, name, namespace)

    return apply
