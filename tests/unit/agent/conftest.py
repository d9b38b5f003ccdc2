"""A node with an empty cache root for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dlo_cache.root import init_root
from unit.agent.one_node import OneNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[OneNode]:
    """An agent on an empty root."""
    made = OneNode(init_root(tmp_path / "cache").path)
    yield made
    made.close()
