"""Asks engines what they run on, over HTTP on their pods' own addresses.

An answer is kept for as long as the container runs; silence is remembered for a while, so that a network policy
in the way costs little. Must not fail a reconcile: an engine that cannot be asked is one that said nothing.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from dlo_api.v1alpha1.deployment_status import BackingKind
from dlo_kube.gateway import Object

from dlo_operator.observe import restarts
from dlo_operator.reconcile.inputs import EngineReport

_PATH: Final = "/v1/engine/status"
_TIMEOUT_SECONDS: Final = 1.0
_SILENCE_SECONDS: Final = 45.0
_LIMIT: Final = 256 * 1024
_MOST_KEPT: Final = 20_000
_WORD: Final = 64


class HttpEngines:
    """The reports of all engines."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], EngineReport] = {}
        self._silent: dict[tuple[str, int], float] = {}

    def report(self, pod: Object, port: int) -> EngineReport | None:
        """What the engine in a ready pod says of itself."""
        status, meta = pod.get("status") or {}, pod["metadata"]
        address = status.get("podIP")
        ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        )
        if not ready or not address or "deletionTimestamp" in meta:
            return None
        key, now = (str(meta["uid"]), restarts(pod)), self._monotonic()
        with self._lock:
            if key in self._known:
                return self._known[key]
            if now - self._silent.get(key, -_SILENCE_SECONDS) < _SILENCE_SECONDS:
                return None
        said = ask(str(address), port)
        with self._lock:
            for kept in (self._known, self._silent):
                if len(kept) > _MOST_KEPT:
                    kept.clear()
            if said is None:
                self._silent[key] = now
            else:
                self._known[key] = said
        return said


def ask(address: str, port: int) -> EngineReport | None:
    """The report of the engine at an address; None when it does not give one that can be read."""
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", _PATH)
        response = connection.getresponse()
        body = response.read(_LIMIT)
        return read_report(json.loads(body)) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def read_report(value: Any) -> EngineReport | None:
    """The part of an engine's status that the operator shows; None when it names no backing that is known."""
    if not isinstance(value, Mapping):
        return None
    backing, offload = value.get("backing"), value.get("offload")
    if not isinstance(backing, Mapping) or backing.get("kind") not in get_args(BackingKind):
        return None
    modes = offload if isinstance(offload, Mapping) else {}
    return EngineReport(
        backing=backing["kind"],
        fallback_code=str(backing.get("fallbackCode") or "")[:_WORD],
        mode=str(modes.get("mode") or "")[:_WORD],
        transfer=str(modes.get("transfer") or "")[:_WORD],
    )
