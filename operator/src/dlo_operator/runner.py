"""The process: leadership, worker threads, periodic looks, and kopf in the main thread.

Ends when it is asked to, when leadership is lost, or when kopf gives up on the API server; starting again is
cheap and changes nothing. Must not decide anything about objects.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import kopf
import structlog
from dlo_kube.errors import KubeError
from dlo_obs.logs import describe
from prometheus_client import start_http_server

from dlo_operator import handlers
from dlo_operator.app import Operator
from dlo_operator.errors import LeadershipLost
from dlo_operator.leader import RENEW_SECONDS, Leader

_log = structlog.get_logger(__name__)
_COMPARE_SECONDS = 45.0
_JOIN_SECONDS = 10.0
_RETRY_SECONDS = 2.0
_LAG_SECONDS = 0.5


class Runner:
    """Runs an operator until it is stopped."""

    def __init__(
        self, operator: Operator, leader: Leader, login: Callable[..., Any], rng: random.Random
    ) -> None:
        self._operator = operator
        self._leader = leader
        self._login = login
        self._rng = rng
        self._stop = threading.Event()
        self._leads = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def run(self) -> int:
        """Blocks until the end; the exit status."""
        settings, metrics = self._operator.settings, self._operator.metrics
        metrics.build_info.labels(version("dlo-operator")).set(1)
        if settings.metrics_port:
            start_http_server(settings.metrics_port, registry=metrics.registry)
        self._thread("lead", self._lead)
        try:
            asyncio.run(self._watch())
        except Exception as error:
            self._failure = self._failure or error
        self._stop.set()
        self._operator.queue.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        if self._failure is None:
            self._release()
            return 0
        _log.error("Ended", error=describe(self._failure))
        return 1

    async def _watch(self) -> None:
        """kopf, which also answers the probe while another process leads."""
        health = self._operator.settings.health_port
        handlers.count_reconnects(self._operator.metrics.watch_reconnects)
        lag = asyncio.create_task(self._measure_lag())
        try:
            await kopf.operator(
                registry=handlers.registry(self._operator.tell, self._problem, self._login),
                settings=handlers.settings(self._rng),
                standalone=True,
                clusterwide=True,
                liveness_endpoint=f"http://0.0.0.0:{health}/healthz" if health else None,
                stop_flag=self._stop,
            )
        finally:
            lag.cancel()
            # Also when kopf has failed: a thread of its own waits for the flag, and the loop for that thread.
            self._stop.set()

    async def _measure_lag(self) -> None:
        while True:
            due = self._operator.clock.monotonic() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            self._operator.metrics.loop_lag.observe(max(0.0, self._operator.clock.monotonic() - due))

    def _problem(self) -> str:
        return self._operator.problem() if self._leads else ""

    def _lead(self) -> None:
        """Waits for leadership, then starts the work and renews."""
        while not self._stop.is_set():
            try:
                if self._leader.attempt():
                    break
            except KubeError as error:
                _log.warning("Could not ask for leadership", code=error.code, error=describe(error))
            self._stop.wait(RENEW_SECONDS / 2)
        if self._stop.is_set():
            return
        self._first_look()
        self._operator.metrics.leader.set(1)
        self._leads = True
        _log.info("Leads", identity=self._operator.settings.identity)
        self._operator.answered = self._operator.clock.monotonic()
        self._thread(
            "heartbeats",
            self._every(self._operator.settings.heartbeat_seconds, self._operator.look_at_heartbeats),
        )
        resync = self._operator.settings.resync_seconds
        self._thread("resync", self._every(resync, self._resync, first=resync))
        self._thread(
            "compare", self._every(_COMPARE_SECONDS, self._operator.compare_watches, first=_COMPARE_SECONDS)
        )
        for number in range(self._operator.settings.workers):
            self._thread(f"worker-{number}", self._work)
        try:
            self._leader.lead(self._stop)
        except LeadershipLost as error:
            # Nothing may be written from here on, not even by a worker in the middle of a reconcile.
            self._failure = error
            self._operator.metrics.leader.set(0)
            self._stop.set()

    def _first_look(self) -> None:
        """Before anything is decided, heartbeats are known, or every node would look dead after a start, and
        everything was listed once.
        """
        while not self._stop.is_set():
            try:
                self._operator.heartbeats.refresh()
                self._operator.resync()
            except KubeError as error:
                _log.warning("Could not take the first look", code=error.code, error=describe(error))
                self._stop.wait(_RETRY_SECONDS)
            else:
                return

    def _resync(self) -> None:
        self._operator.resync()
        self._operator.controller.sweep_secrets()
        self._operator.controller.sweep_volumes()

    def _work(self) -> None:
        while not self._stop.is_set():
            taken = self._operator.queue.take(timeout=1.0)
            if taken is not None:
                self._operator.work(taken)

    def _every(self, seconds: float, act: Callable[[], None], *, first: float = 0.0) -> Callable[[], None]:
        def run() -> None:
            pause, failures = first, 0
            while not self._stop.wait(pause):
                pause = seconds * (0.9 + 0.2 * self._rng.random())
                try:
                    act()
                    failures = 0
                except KubeError as error:
                    failures += 1
                    pause = min(pause, _RETRY_SECONDS * 2.0 ** min(failures, 10))
                    _log.warning("Could not look", what=threading.current_thread().name, code=error.code)

        return run

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded(target), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, target: Callable[[], None]) -> Callable[[], None]:
        """A thread that dies takes the process with it: half an operator is worse than none."""

        def run() -> None:
            try:
                target()
            except Exception as error:
                _log.exception("A thread ended", thread=threading.current_thread().name)
                self._failure = self._failure or error
                self._stop.set()

        return run

    def _release(self) -> None:
        try:
            self._leader.release()
        except KubeError as error:
            _log.warning("Could not give up leadership", code=error.code)
