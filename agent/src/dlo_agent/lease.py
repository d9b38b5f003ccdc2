"""The agent's heartbeat: the node's Lease, renewed while the work loop turns.

The operator makes the Lease and judges its age by its own clock; the agent only renews the one that is there.
A loop that stands still stops the heartbeat, whatever this thread does. Must not create the Lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import structlog
from dlo_api.identity import node_lease_name
from dlo_api.names import AGENT_FIELD_MANAGER
from dlo_kube.errors import KubeError
from dlo_kube.gateway import Gateway
from dlo_kube.kinds import LEASE

RENEW_SECONDS: Final = 40.0
_AFTER_FAILURE_SECONDS: Final = 10.0

_log = structlog.get_logger(__name__)


class Heartbeat:
    """Renews the Lease of ``node`` in ``namespace`` as long as ``alive()``; ``run`` is a thread's target."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        node: str,
        namespace: str,
        holder: str,
        alive: Callable[[], bool],
        clock: Callable[[], float],
        renewed: Callable[[float], None] = lambda _: None,
    ) -> None:
        """``renewed`` is told the time of every renewal, in seconds since 1970."""
        self._renewed = renewed
        self._gateway, self._namespace = gateway, namespace
        self._name, self._holder = node_lease_name(node), holder
        self._alive, self._clock = alive, clock
        self._stop = threading.Event()

    def run(self) -> None:
        """Renews until ``stop``."""
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                pause = RENEW_SECONDS if self.beat() else _AFTER_FAILURE_SECONDS
            except KubeError as error:
                pause = _AFTER_FAILURE_SECONDS
                _log.warning("Could not renew the lease", reason=error.code)

    def stop(self) -> None:
        """Ends ``run``."""
        self._stop.set()

    def beat(self) -> bool:
        """Renews once; False if the loop stands still or there is no Lease yet. Raises KubeError."""
        if not self._alive():
            return False
        lease = self._gateway.get(LEASE, self._name, self._namespace)
        if lease is None:
            return False
        at = self._clock()
        now = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._gateway.apply(
            {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                # With its uid, so that a lease that has just gone is not made anew.
                "metadata": {
                    "name": self._name,
                    "namespace": self._namespace,
                    "uid": lease["metadata"]["uid"],
                },
                "spec": {"holderIdentity": self._holder, "renewTime": now},
            },
            manager=AGENT_FIELD_MANAGER,
        )
        self._renewed(at)
        return True
