"""One API server for the whole folder, with our CRDs installed; a namespace of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api.apiserver import ApiServer
from api.charted import agents, cluster  # noqa: F401 - fixtures of the tests of the chart
from dlo_kube.client import ClusterGateway

CRDS = Path(__file__).parents[2] / "crds"
_NUMBERS = itertools.count(1)


@contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    """A running server that serves both kinds."""
    with ApiServer(folder) as running:
        running.kubectl("apply", "--server-side", "-f", str(CRDS))
        running.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRDS))
        yield running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The server that most tests share."""
    with serving(tmp_path_factory.mktemp("apiserver")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server of the test's own: to be killed, or to hold nobody else's objects."""
    with serving(tmp_path_factory.mktemp("own")) as running:
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
