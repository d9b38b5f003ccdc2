"""Writes the status to the API server: only when it differs, never faster than the server takes it.

The last status that was written is the measure; at the start it is the one that the object carries, so that a
restart in an unchanged world writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import structlog
from dlo_api.names import AGENT_FIELD_MANAGER
from dlo_kube.errors import KubeError, Unavailable
from dlo_kube.gateway import Gateway
from dlo_kube.kinds import NODE_WEIGHT_CACHE

from dlo_agent.world import Status

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0

_log = structlog.get_logger(__name__)


class Reporter:
    """The one writer of this node's status."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._uid = ""
        self._written: Status | None = None
        self._based_on = ""
        self._pause = 0.0
        self._not_before = 0.0

    def previous(self, obj: Mapping[str, Any]) -> Status | None:
        """The status before: what was written last, or what the object carries."""
        seen: Status | None = obj.get("status")
        if self._uid != obj["metadata"].get("uid"):
            self._uid = obj["metadata"].get("uid", "")
            self._written = seen
        if seen is None and obj["metadata"].get("resourceVersion") != self._based_on:
            self._written = None  # somebody took it away; our own view may lag behind our first write
        return self._written

    def send(self, obj: Mapping[str, Any], status: Status, now: float, jitter: float) -> bool:
        """Writes ``status`` if it differs from the one before; returns whether nothing is left to write.

        A failure is logged and answered with a growing pause; it is never raised.
        """
        if status == self.previous(obj):
            return True
        if now < self._not_before:
            return False
        metadata = obj["metadata"]
        body = {
            "apiVersion": NODE_WEIGHT_CACHE.api_version,
            "kind": NODE_WEIGHT_CACHE.kind,
            "metadata": {"name": metadata["name"], "uid": metadata["uid"]},
            "status": status,
        }
        try:
            self._gateway.apply_status(body, manager=AGENT_FIELD_MANAGER)
        except KubeError as error:
            asked = (error.retry_after or 0.0) if isinstance(error, Unavailable) else 0.0
            self._pause = min(max(self._pause * 2, _FIRST_PAUSE), _LONGEST_PAUSE)
            self._not_before = now + max(asked, self._pause * (1 + jitter / 4))
            _log.warning("Could not write the status", reason=error.code)
            return False
        self._written, self._pause, self._not_before = status, 0.0, 0.0
        self._based_on = metadata.get("resourceVersion", "")
        return True
