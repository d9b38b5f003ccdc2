"""`dlo-operator`: parses its command line, sets up logs, and runs until it is told to stop.

`dlo-operator cleanup` removes what it has made outside its release, and ends.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kopf
from dlo_kube.client import ClusterGateway
from dlo_kube.connection import from_kubeconfig, in_cluster
from dlo_kube.errors import KubeError
from dlo_kube.gateway import Served
from dlo_obs.logs import configure
from prometheus_client import CollectorRegistry

from dlo_operator.app import Clock, assemble
from dlo_operator.cleanup import clean_up, parse_cleanup
from dlo_operator.engines import HttpEngines
from dlo_operator.leader import Leader
from dlo_operator.metrics import Metrics
from dlo_operator.runner import Runner
from dlo_operator.settings import parse


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 when it was stopped, 1 when it failed or lost leadership, 2 for a wrong command line."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["cleanup"]:
        return _clean_up(words[1:])
    settings = parse(words)
    configure()
    metrics = Metrics(CollectorRegistry())
    gateway = _connect(settings.kubeconfig, metrics.served)
    if gateway is None:
        return 1
    login = kopf.login_with_service_account
    if settings.kubeconfig:
        # kopf has a client of its own, which takes a file's name from the environment alone.
        os.environ["KUBECONFIG"] = settings.kubeconfig
        login = kopf.login_with_kubeconfig
    clock, rng = Clock(), random.Random()  # noqa: S311 - jitter, no secret
    engines = HttpEngines(time.monotonic)
    operator = assemble(gateway, settings, clock=clock, engines=engines, rng=rng, metrics=metrics)
    engines.answered = operator.look_at
    leader = Leader(
        gateway, settings.plan.namespace, settings.identity, monotonic=clock.monotonic, now=clock.now
    )
    try:
        return Runner(operator, leader, login, rng).run()
    finally:
        gateway.close()


def _clean_up(words: list[str]) -> int:
    """One line for each kind of leftover; 1 when something could not be removed."""
    settings = parse_cleanup(words)
    gateway = _connect(settings.kubeconfig)
    if gateway is None:
        return 1
    failed = False
    try:
        for step in clean_up(gateway, settings):
            sys.stdout.write(f"removed {step.removed} {step.what}\n")
            if step.problem:
                failed = True
                sys.stderr.write(f"error: {step.problem}\n")
    finally:
        gateway.close()
    return 1 if failed else 0


def _connect(kubeconfig: str, observe: Callable[[Served], None] | None = None) -> ClusterGateway | None:
    """The gateway; None, with the error told, where there is no access."""
    try:
        configuration = from_kubeconfig(Path(kubeconfig)) if kubeconfig else in_cluster()
    except KubeError as error:
        sys.stderr.write(f"error: {error.code}: {error}\n")
        return None
    return ClusterGateway(configuration, user_agent="dlo-operator", observe=observe)


if __name__ == "__main__":
    sys.exit(main())
