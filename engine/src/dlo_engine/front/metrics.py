"""The front's Prometheus metrics, in a registry of their own.

Names are part of the product (docs/reference). Knows numbers only, no processes and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 400, 1000)


class Metrics:
    """Counters and gauges of one engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "dlo_engine_requests",
            "Image requests by outcome: ok, refused, rejected, unavailable, cancelled, failed.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in ("ok", "refused", "rejected", "unavailable", "cancelled", "failed"):
            self._requests.labels(outcome)
        self._duration = self._histogram("request", "From admission to the last picture, queue included.")
        self._compute = self._histogram("request_compute", "Time in which the blocks of a request computed.")
        self._copy = self._histogram("request_copy", "Time in which weights of a request were copied.")
        self._wait = self._histogram("request_wait", "Time in which a request waited for weights.")
        self._step = self._histogram("step", "Mean time of one step of a request: compute and wait.")
        self._copied = Counter(
            "dlo_engine_copied_bytes", "Weight bytes copied for requests.", registry=self.registry
        )
        self._queue = Gauge("dlo_engine_queue_length", "Requests that wait.", registry=self.registry)
        self._running = Gauge("dlo_engine_running_requests", "Requests that run.", registry=self.registry)
        self._ready = Gauge("dlo_engine_ready", "1 while requests are admitted.", registry=self.registry)
        self._backing = Gauge(
            "dlo_engine_backing_info",
            "What backs the streamed weights; the labelled series is 1.",
            ["kind", "fallback_code", "verified"],
            registry=self.registry,
        )
        self._registered = Gauge(
            "dlo_engine_registered_bytes", "Entry bytes registered by all ranks.", registry=self.registry
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"dlo_engine_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

    def count(self, outcome: str) -> None:
        """One request ended so."""
        self._requests.labels(outcome).inc()

    def finished(self, seconds: float, timings: Mapping[str, float]) -> None:
        """A request was answered with pictures; timings as in GenerateResult."""
        self.count("ok")
        self._duration.observe(seconds)
        for name, histogram in (("computeMs", self._compute), ("copyMs", self._copy), ("waitMs", self._wait)):
            if name in timings:
                histogram.observe(timings[name] / 1000)
        if timings.get("steps") and "computeMs" in timings:
            total = timings["computeMs"] + timings.get("waitMs", 0)
            self._step.observe(total / 1000 / timings["steps"])
        self._copied.inc(timings.get("copiedBytes", 0))

    def backing(self, status: Mapping[str, Any]) -> None:
        """The engine became ready with this status document."""
        backing = status["backing"]
        self._backing.clear()
        verified = "true" if backing["verified"] else "false"
        self._backing.labels(backing["kind"], backing["fallbackCode"] or "", verified).set(1)
        self._registered.set(sum(entry.get("registeredBytes", 0) for entry in status["entries"]))

    def render(self, *, queued: int, running: int, ready: bool) -> bytes:
        """The exposition text."""
        self._queue.set(queued)
        self._running.set(running)
        self._ready.set(ready)
        return generate_latest(self.registry)
