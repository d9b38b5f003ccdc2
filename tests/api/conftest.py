"""One API server for the whole folder, with our CRDs installed; a namespace of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from api.apiserver import ApiServer
from dlo_kube.client import ClusterGateway

CRDS = Path(__file__).parents[2] / "crds"
_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A running server that serves both kinds."""
    with ApiServer(tmp_path_factory.mktemp("apiserver")) as running:
        running.kubectl("apply", "--server-side", "-f", str(CRDS))
        running.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRDS))
        yield running


@pytest.fixture(scope="session")
def gateway(server: ApiServer) -> Iterator[ClusterGateway]:
    """The administrator's gateway to it."""
    made = server.gateway()
    yield made
    made.close()


@pytest.fixture
def namespace(gateway: ClusterGateway) -> str:
    """A new namespace. Nothing removes it: the server goes at the end."""
    name = f"test-{next(_NUMBERS)}"
    gateway.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name
