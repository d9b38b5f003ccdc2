"""How long ago each node's heartbeat moved, on this process's own clock.

A Lease's times were written by another clock, so only that it changed counts, and when that was seen. After a
start every heartbeat counts as fresh for one interval. Must not write Leases: agents renew them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dlo_kube.gateway import Gateway
from dlo_kube.kinds import LEASE

from dlo_operator.reconcile.inputs import LEASE_LATE_SECONDS


class Heartbeats:
    """The heartbeats of all nodes."""

    def __init__(self, gateway: Gateway, namespace: str, monotonic: Callable[[], float]) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, float]] = {}
        self._late: frozenset[str] = frozenset()
        self._states: dict[str, bool] = {}

    def refresh(self) -> frozenset[str]:
        """Looks at the Leases; the nodes that became late, or came back or were first seen, since last time.

        Raises what `Gateway.list` raises.
        """
        listing = self._gateway.list(LEASE, self._namespace)
        now = self._monotonic()
        with self._lock:
            known = self._seen
            self._seen = {}
            appeared: set[str] = set()
            for lease in listing.items:
                name, moved = lease["metadata"]["name"], _moved(lease)
                if not moved:
                    continue
                before = known.get(name)
                if before is None:
                    appeared.add(name)
                self._seen[name] = before if before is not None and before[0] == moved else (moved, now)
            late = frozenset(
                name for name, (_, since) in self._seen.items() if now - since >= LEASE_LATE_SECONDS
            )
            changed = (late ^ self._late) | appeared | (known.keys() - self._seen.keys())
            self._late = late
            states = {name: name in late for name in self._seen}
            if states != self._states:
                self._states = states
            return frozenset(changed)

    def late(self) -> Mapping[str, bool]:
        """Whether each heartbeat was late at the last look; nodes without one are absent.

        The same object while nothing has changed. A heartbeat ages by looks alone: while none succeeds, nothing is
        known of any.
        """
        with self._lock:
            return self._states

    def age(self, node: str) -> float | None:
        """Seconds since the heartbeat was seen to move; None when there is none."""
        with self._lock:
            seen = self._seen.get(node)
            return None if seen is None else self._monotonic() - seen[1]


def _moved(lease: Mapping[str, Any]) -> str:
    """Something that changes with every renewal; empty before the first one."""
    return str((lease.get("spec") or {}).get("renewTime") or "")
