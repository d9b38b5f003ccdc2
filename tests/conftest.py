"""What a test needs is said by its folder: tests/unit nothing, tests/gpu a CUDA device.

A missing prerequisite is a skip that gives its reason, and a failure where DLO_REQUIRE_GPU=1 asks for it.
"""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder."""
    for item in items:
        if item.path.is_relative_to(TESTS / "gpu"):
            item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail where it is required, what lacks its device."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("DLO_REQUIRE_GPU") == "1":
        pytest.fail("DLO_REQUIRE_GPU=1, but torch sees no CUDA device")
    pytest.skip("torch sees no CUDA device")
