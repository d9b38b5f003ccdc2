"""What the queue is about: a DiffusionDeployment or a Node, by name. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Key(NamedTuple):
    """One thing to reconcile."""

    kind: Literal["Deployment", "Node"]
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}" if self.namespace else f"{self.kind}/{self.name}"


def deployment_key(namespace: str, name: str) -> Key:
    """The key of a DiffusionDeployment."""
    return Key("Deployment", namespace, name)


def node_key(name: str) -> Key:
    """The key of a Node and its NodeWeightCache."""
    return Key("Node", "", name)
