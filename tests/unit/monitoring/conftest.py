"""What the tests of monitoring share: living parts, and a Prometheus that has scraped them at work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusterbin import MONITORING, missing
from unit.monitoring.living import Parts, living
from unit.monitoring.server import Prometheus


def require_prometheus() -> None:
    """Skips, with the reason, where Prometheus is not built."""
    if lacking := missing(MONITORING):
        pytest.skip(f"{', '.join(lacking)} not built: run python tests/clusterbin.py (needs Go)")


@pytest.fixture(scope="session")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Operator, agent and engine that have done nothing yet."""
    with living(tmp_path_factory) as found:
        yield found


@pytest.fixture(scope="session")
def prometheus(idle: Parts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus | None]:
    """Has scraped all three before, during and after their work; None where Prometheus is not built."""
    if missing(MONITORING):
        idle.work()
        yield None
        return
    targets = [idle.operator.target, idle.agent.target, idle.engine.target]
    with Prometheus(tmp_path_factory.mktemp("prometheus"), targets) as server:
        server.wait_for_scrapes(2)
        idle.work()
        server.wait_for_scrapes(2)
        yield server


@pytest.fixture
def asked(prometheus: Prometheus | None) -> Prometheus:
    """The Prometheus to ask; a skip where there is none."""
    require_prometheus()
    assert prometheus is not None
    return prometheus


@pytest.fixture
def parts(idle: Parts, prometheus: Prometheus | None) -> Parts:
    """Operator, agent and engine that have done their work."""
    return idle
