"""One operator at a time: a Lease that the leader renews, judged by each process's own clock.

Every write names the version that it was decided on, so that two processes can never both succeed. Who cannot
renew in time has lost and must end; nothing here ends the process by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from typing import Final

from dlo_api.names import OPERATOR_FIELD_MANAGER
from dlo_kube.errors import Conflict, KubeError
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import LEASE

from dlo_operator.errors import LeadershipLost

LEASE_NAME: Final = "dlo-operator-leader"
DURATION_SECONDS: Final = 30.0
RENEW_SECONDS: Final = 8.0
#: A leader that has not renewed for so long stops before another may start.
GIVE_UP_SECONDS: Final = 20.0
_MANAGER: Final = f"{OPERATOR_FIELD_MANAGER}-leader"


class Leader:
    """This process's wish to lead."""

    def __init__(
        self,
        gateway: Gateway,
        namespace: str,
        identity: str,
        *,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._identity = identity
        self._monotonic = monotonic
        self._now = now
        self._seen: tuple[str, float] = ("", 0.0)
        self._renewed: float | None = None

    def attempt(self) -> bool:
        """Takes or renews the Lease if that is allowed; whether this process leads now.

        Raises:
            LeadershipLost: another process leads, and this one did.
            KubeError: the API server could not be asked.
        """
        lease = self._gateway.get(LEASE, LEASE_NAME, self._namespace)
        spec = (lease or {}).get("spec") or {}
        holder, renewed = spec.get("holderIdentity") or "", str(spec.get("renewTime") or "")
        now = self._monotonic()
        if holder not in ("", self._identity):
            if self._renewed is not None:
                raise LeadershipLost(
                    f"{holder} leads now", hint="this process ends and starts again as a follower"
                )
            if self._seen[0] != f"{holder} {renewed}":
                self._seen = (f"{holder} {renewed}", now)
            if now - self._seen[1] < DURATION_SECONDS:
                return False
        try:
            self._write(lease, spec)
        except Conflict:
            return False
        self._renewed = now
        return True

    def lead(self, stop: threading.Event, wait: Callable[[float], bool] | None = None) -> None:
        """Renews until stopped.

        Raises:
            LeadershipLost: another leads, or renewing failed for too long.
        """
        pause = wait or stop.wait
        while not pause(RENEW_SECONDS):
            try:
                self.attempt()
            except KubeError as error:
                if self._monotonic() - (self._renewed or 0.0) > GIVE_UP_SECONDS:
                    raise LeadershipLost(
                        f"could not renew for {GIVE_UP_SECONDS:.0f} s: {error.message}",
                        hint="see the API server",
                    ) from error
            if self._monotonic() - (self._renewed or 0.0) > GIVE_UP_SECONDS:
                raise LeadershipLost(f"could not renew for {GIVE_UP_SECONDS:.0f} s")

    def release(self) -> None:
        """Lets the next process lead at once; failing is no harm, the Lease runs out."""
        lease = self._gateway.get(LEASE, LEASE_NAME, self._namespace)
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
            self._gateway.apply(self._object(lease, {"holderIdentity": ""}), manager=_MANAGER)
        self._renewed = None

    def _write(self, lease: Object | None, spec: Object) -> None:
        same = spec.get("holderIdentity") == self._identity
        stamp = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        fields = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(DURATION_SECONDS),
            "acquireTime": spec.get("acquireTime", stamp) if same else stamp,
            "renewTime": stamp,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if same else 1),
        }
        if lease is None:
            self._gateway.create(self._object(None, fields))
        else:
            self._gateway.apply(self._object(lease, fields), manager=_MANAGER)

    def _object(self, lease: Object | None, fields: Object) -> Object:
        meta: Object = {"name": LEASE_NAME, "namespace": self._namespace}
        if lease is not None:
            meta["uid"] = lease["metadata"]["uid"]
            meta["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": fields}
