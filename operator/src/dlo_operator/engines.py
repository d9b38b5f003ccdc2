"""Asks engines what they run on, over HTTP on their pods' own addresses.

An answer is kept for as long as the container runs; silence is remembered for a while, so that a network policy
in the way costs little. Must not fail a reconcile: an engine that cannot be asked is one that said nothing.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, cast, get_args

from dlo_api.v1alpha1.deployment_status import BackingKind
from dlo_kube.gateway import Object

from dlo_operator.observe import restarts
from dlo_operator.reconcile.inputs import EngineReport

_PATH: Final = "/v1/engine/status"
_TIMEOUT_SECONDS: Final = 1.0
_SILENCE_SECONDS: Final = 45.0
_LIMIT: Final = 256 * 1024
_MOST_KEPT: Final = 20_000
_CHUNK: Final = 64 * 1024
_WORD: Final = re.compile("[A-Za-z][A-Za-z0-9]{0,63}")
#: After an engine that was not quick, nobody waits for any for so long.
_HURRY_SECONDS: Final = 10.0
_ASKERS: Final = 8
_Engine = tuple[str, int]  # uid of the pod, restarts


class HttpEngines:
    """The reports of all engines; safe to use from several threads.

    Asking is done beside the reconciles. A reconcile waits a moment for the first answer, since most engines are
    quick and their word then is in the status that says Ready; where one is not, nobody waits for a while.

    Args:
        monotonic: seconds on a clock that never jumps.
        patience: seconds that a reconcile waits for an answer.

    Attributes:
        answered: told of a pod about whose engine it is known, after nobody waited any more, what it says, or that
            it says nothing.
    """

    def __init__(self, monotonic: Callable[[], float], patience: float = 0.1) -> None:
        self._monotonic = monotonic
        self._patience = patience
        self._hurried = -_HURRY_SECONDS
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_ASKERS, thread_name_prefix="ask")
        self._asking: dict[_Engine, Future[EngineReport | None]] = {}
        self._known: dict[_Engine, EngineReport] = {}
        self._silent: dict[_Engine, float] = {}
        self.answered: Callable[[Object], object] = id

    def report(self, pod: Object, port: int) -> EngineReport | None:
        """What the engine in a ready pod says of itself; None when it has not said anything yet."""
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
            if now - self._silent.get(key, -_SILENCE_SECONDS) < _SILENCE_SECONDS or key in self._asking:
                return None
            hurried = now - self._hurried < _HURRY_SECONDS
            asking = self._asking[key] = self._pool.submit(ask, str(address), port)
        try:
            said = asking.result(0.0 if hurried else self._patience)
        except TimeoutError:
            with self._lock:
                self._hurried = now
            asking.add_done_callback(lambda done: self._late(key, pod, done.result()))
            return None
        self._keep(key, said)
        return said

    def asking(self, pod: Object) -> bool:
        """Whether it will be known soon what the engine says: `answered` is told then."""
        with self._lock:
            return (str(pod["metadata"]["uid"]), restarts(pod)) in self._asking

    def _late(self, key: _Engine, pod: Object, said: EngineReport | None) -> None:
        self._keep(key, said)
        self.answered(pod)

    def _keep(self, key: _Engine, said: EngineReport | None) -> None:
        with self._lock:
            self._asking.pop(key, None)
            for kept in (self._known, self._silent):
                if len(kept) > _MOST_KEPT:
                    kept.clear()
            if said is None:
                self._silent[key] = self._monotonic()
            else:
                self._known[key] = said


def ask(address: str, port: int) -> EngineReport | None:
    """The report of the engine at an address; None when it does not give one that can be read in time.

    The time holds for the whole answer: an engine is what its owner says it is, and may send a byte now and then.
    """
    host = f"[{address}]" if ":" in address else address
    request = f"GET {_PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
    end = time.monotonic() + _TIMEOUT_SECONDS
    received = bytearray()
    try:
        with socket.create_connection((address, port), timeout=_TIMEOUT_SECONDS) as connection:
            connection.sendall(request.encode())
            while len(received) < _LIMIT and (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                if not (chunk := connection.recv(_CHUNK)):
                    break
                received += chunk
        response = http.client.HTTPResponse(cast("socket.socket", _Received(bytes(received))))
        response.begin()
        said = response.read()
        return read_report(json.loads(said)) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None


class _Received:
    """What a connection has brought, for the parser of answers, which reads from sockets."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        """All of it."""
        return io.BytesIO(self._data)


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
        fallback_code=_word(backing.get("fallbackCode")),
        mode=_word(modes.get("mode")),
        transfer=_word(modes.get("transfer")),
    )


def _word(value: Any) -> str:
    """A word that a status may carry; empty for anything else."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else ""
