"""`dlo-operator`: parses its command line, sets up logs, and runs until it is told to stop."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import kopf
from dlo_kube.client import ClusterGateway
from dlo_kube.connection import from_kubeconfig, in_cluster
from dlo_kube.errors import KubeError
from dlo_obs.logs import configure

from dlo_operator.app import Clock, assemble
from dlo_operator.engines import HttpEngines
from dlo_operator.leader import Leader
from dlo_operator.runner import Runner
from dlo_operator.settings import parse


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 when it was stopped, 1 when it failed or lost leadership, 2 for a wrong command line."""
    settings = parse(sys.argv[1:] if argv is None else argv)
    configure()
    try:
        configuration = from_kubeconfig(Path(settings.kubeconfig)) if settings.kubeconfig else in_cluster()
    except KubeError as error:
        sys.stderr.write(f"error: {error.code}: {error}\n")
        return 1
    login = kopf.login_with_service_account
    if settings.kubeconfig:
        # kopf has a client of its own, which takes a file's name from the environment alone.
        os.environ["KUBECONFIG"] = settings.kubeconfig
        login = kopf.login_with_kubeconfig
    gateway = ClusterGateway(configuration, user_agent="dlo-operator")
    clock, rng = Clock(), random.Random()  # noqa: S311 - jitter, no secret
    operator = assemble(gateway, settings, clock=clock, engines=HttpEngines(time.monotonic), rng=rng)
    leader = Leader(
        gateway, settings.plan.namespace, settings.identity, monotonic=clock.monotonic, now=clock.now
    )
    try:
        return Runner(operator, leader, login, rng).run()
    finally:
        gateway.close()


if __name__ == "__main__":
    sys.exit(main())
