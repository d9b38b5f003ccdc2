"""A fresh cache root for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from dlo_cache.root import Root, init_root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """An empty root."""
    return init_root(tmp_path / "cache")
