"""What a test needs is said by its folder: tests/unit nothing, tests/gpu a CUDA device, tests/api an API server,
tests/cluster a cluster.

A missing prerequisite is a skip that gives its reason, and a failure where DLO_REQUIRE_GPU=1, DLO_REQUIRE_API=1 or
DLO_CLUSTER=1 asks for it.
"""

import os
import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NEEDS = {
    "gpu": "needs a CUDA device (folder tests/gpu)",
    "api": "needs an API server (folder tests/api)",
    "cluster": "needs a cluster (folder tests/cluster)",
}


def pytest_configure(config: pytest.Config) -> None:
    """One marker a folder; and signals that work in children.

    A background job of a shell starts with interrupts ignored, and what is ignored, children ignore too.
    """
    for name, what in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {what}")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder."""
    for item in items:
        for name in NEEDS:
            if item.path.is_relative_to(TESTS / name):
                item.add_marker(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail where it is required, what lacks its device or server."""
    for name, lacks in (("gpu", _lacks_gpu), ("api", _lacks_api), ("cluster", _lacks_cluster)):
        if item.get_closest_marker(name) is None or (reason := lacks()) is None:
            continue
        required = f"DLO_REQUIRE_{name.upper()}"
        if os.environ.get(required) == "1":
            pytest.fail(f"{required}=1, but {reason}")
        pytest.skip(reason)


def _lacks_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _lacks_api() -> str | None:
    from clusterbin import missing

    lacking = missing()
    if not lacking:
        return None
    return f"{', '.join(lacking)} not built: run python tests/clusterbin.py (needs Go)"


def _lacks_cluster() -> str | None:
    # What DLO_CLUSTER=1 needs and cannot get is an error of the fixture that makes the cluster.
    if os.environ.get("DLO_CLUSTER") == "1" or os.environ.get("DLO_KUBECONFIG"):
        return None
    return "no cluster asked for: DLO_CLUSTER=1 makes one with kind, DLO_KUBECONFIG=FILE uses another"
