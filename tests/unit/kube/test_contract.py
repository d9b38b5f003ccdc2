"""The fake cluster keeps the contract of a gateway, as the real server does in tests/api."""

import pytest
from contract.gateway import GatewayContract
from fakes.kube import FakeCluster


@pytest.fixture
def gateway() -> FakeCluster:
    """An empty cluster."""
    return FakeCluster()


@pytest.fixture
def namespace() -> str:
    """The fake has every namespace."""
    return "default"


class TestFakeCluster(GatewayContract):
    """In memory."""
