"""The front's Prometheus metrics, in a registry of their own.

Names are part of the product (docs/monitoring.md). The deployment's name is no label: it comes from the scrape.
Knows numbers only, no ranks and no HTTP.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 400, 1000)
_PHASES = ("map", "verify", "register", "import", "warmup")


class Metrics:
    """Counters and gauges of one engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gauge("dlo_build_info", "Always 1; the version of the program.", "version").labels(
            version("dlo-operator")
        ).set(1)
        self._requests = Counter(
            "dlo_engine_requests",
            "Image requests by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in ("ok", "refused", "rejected", "unavailable", "cancelled", "failed"):
            self._requests.labels(outcome)
        self._duration = self._histogram("request", "From admission to the last picture, queue included.")
        self._queued = self._histogram("request_queue", "From admission to the start on a replica.")
        self._compute = self._histogram("request_compute", "Time in which the blocks of a request computed.")
        self._copy = self._histogram("request_copy", "Time in which weights of a request were copied.")
        self._wait = self._histogram("request_wait", "Time in which a request waited for weights.")
        self._step = self._histogram("step", "Mean time of one step of a request: compute and wait.")
        self._copied = Counter(
            "dlo_engine_copied_bytes", "Weight bytes copied for requests.", registry=self.registry
        )
        self._queue = self._gauge("dlo_engine_queue_length", "Requests that wait.")
        self._running = self._gauge("dlo_engine_running_requests", "Requests that run.")
        self._ready = self._gauge("dlo_engine_ready", "1 while requests are admitted.")
        self._backing = self._gauge(
            "dlo_engine_backing_info",
            "What backs the streamed weights; the labelled series is 1.",
            *("kind", "fallback_code", "verified"),
        )
        self._registered = self._gauge(
            "dlo_engine_registered_bytes", "Entry bytes registered with devices by all ranks."
        )
        self._entry = self._gauge(
            "dlo_engine_entry_bytes",
            "Bytes of the entries in use, each once; component is empty for the files of the rest.",
            *("component", "coordinate"),
        )
        self._pss = self._gauge(
            "dlo_engine_entry_pss_bytes",
            "This engine's share of the entries' pages in memory: a page that n processes map counts 1/n.",
            *("component", "coordinate"),
        )
        self._start = self._gauge(
            "dlo_engine_start_duration_seconds", "Time of each phase of the start, slowest rank.", "phase"
        )
        self._gauge(
            "dlo_engine_memlock_limit_bytes",
            "Memory that may be locked (RLIMIT_MEMLOCK); +Inf without limit.",
        ).set(memlock_limit())

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"dlo_engine_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

    def count(self, outcome: str) -> None:
        """One request ended so."""
        self._requests.labels(outcome).inc()

    def started(self, seconds: float) -> None:
        """A request began to run on a replica, this long after its admission."""
        self._queued.observe(seconds)

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

    def show(self, status: Mapping[str, Any]) -> None:
        """Take the engine's status document as it is now."""
        backing = status["backing"]
        self._backing.clear()
        verified = "true" if backing["verified"] else "false"
        self._backing.labels(backing["kind"], backing["fallbackCode"] or "", verified).set(1)
        entries = status["entries"]
        self._registered.set(sum(entry.get("registeredBytes", 0) for entry in entries))
        for gauge, name in ((self._entry, "bytes"), (self._pss, "pssBytes")):
            gauge.clear()
            for entry in entries:
                if name in entry:
                    gauge.labels(entry.get("component") or "", entry.get("coordinate") or "").inc(entry[name])
        for phase in _PHASES:
            if f"{phase}Ms" in status["start"]:
                self._start.labels(phase).set(status["start"][f"{phase}Ms"] / 1000)

    def render(self, *, queued: int, running: int, ready: bool) -> bytes:
        """The exposition text."""
        self._queue.set(queued)
        self._running.set(running)
        self._ready.set(ready)
        return generate_latest(self.registry)


def memlock_limit() -> float:
    """Bytes that this process, and each rank after it, may lock; infinite where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)
