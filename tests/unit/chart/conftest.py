"""Tests of the chart run the real helm; without it they are skipped, or fail where a run asks for everything."""

from __future__ import annotations

import os

import pytest
from clusterbin import missing


@pytest.fixture(autouse=True)
def _helm() -> None:
    if not missing(("helm",)):
        return
    reason = "helm not built: run python tests/clusterbin.py helm (needs Go)"
    if os.environ.get("DLO_CLUSTER") == "1":
        pytest.fail(f"DLO_CLUSTER=1, but {reason}")
    pytest.skip(reason)
