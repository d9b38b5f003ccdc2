"""The running agent: the work loop with its watch, its heartbeat, its progress writer and its HTTP server."""

from __future__ import annotations

import threading
import time
from typing import Final

from dlo_kube.gateway import Gateway
from dlo_kube.informer import Watcher
from dlo_kube.kinds import NODE_WEIGHT_CACHE

from dlo_agent.health import HealthServer
from dlo_agent.lease import Heartbeat
from dlo_agent.loop import Loop
from dlo_agent.settings import Settings

STALE_SECONDS: Final = 120.0


class Service:
    """Everything of one agent; ``run`` blocks until ``stop``."""

    def __init__(self, settings: Settings, gateway: Gateway) -> None:
        self.loop = Loop(settings, gateway)
        self.watcher = Watcher(
            gateway, NODE_WEIGHT_CACHE, {"metadata.name": settings.node}, self.loop.changed
        )
        self.heartbeat = Heartbeat(
            gateway,
            node=settings.node,
            namespace=settings.namespace,
            holder=settings.node,
            alive=lambda: not self.not_alive(),
            clock=time.time,
            renewed=self.loop.metrics.renewed,
        )
        self.health = HealthServer(
            settings.port, alive=self.not_alive, ready=self.not_ready, registry=self.loop.metrics.registry
        )
        self._threads = [
            threading.Thread(target=target, name=f"dlo-{name}", daemon=True)
            for name, target in (
                ("watch", self.watcher.run),
                ("lease", self.heartbeat.run),
                ("progress", self.loop.board.run),
            )
        ]

    def run(self) -> None:
        """Until ``stop``. Raises SecondAgent; everything that runs is stopped first."""
        self.health.start()
        for thread in self._threads:
            thread.start()
        try:
            self.loop.run()
        finally:
            self.watcher.stop()
            self.heartbeat.stop()
            self.loop.board.stop()
            self.health.stop()

    def stop(self) -> None:
        """Ends ``run``; fit for a signal handler."""
        self.loop.stop()

    def not_alive(self) -> str:
        """Why the process should be restarted, "" if it should not: a loop or thread that stands still."""
        age = time.monotonic() - self.loop.last_turn
        if age > STALE_SECONDS:
            return f"the work loop has not turned for {age:.0f} s"
        dead = [thread.name for thread in self._threads if thread.ident is not None and not thread.is_alive()]
        return f"thread {dead[0]} has ended" if dead else ""

    def not_ready(self) -> str:
        """Why the agent cannot do its work now, "" if it can."""
        if self.loop.storage_problem is not None:
            return f"{self.loop.storage_problem.reason}: {self.loop.storage_problem.message}"
        return "" if self.watcher.synced else "the API server was not heard yet"
