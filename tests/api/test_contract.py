"""The real gateway on a real API server keeps the contract that the fake keeps."""

from contract.gateway import GatewayContract


class TestClusterGateway(GatewayContract):
    """Over HTTPS."""
