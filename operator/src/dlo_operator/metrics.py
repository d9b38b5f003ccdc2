"""Every metric of the operator, defined apart from logic. Names as in the reference of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dlo_kube.gateway import Served
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
)
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from dlo_operator.keys import Key

_STATUSES = ("True", "False", "Unknown")
_KEYS = ("Deployment", "Node")
_WATCHED = (DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, NODE, POD, DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET)


class Metrics:
    """The operator's metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.reconciles = Counter("dlo_reconcile", "Reconciles.", ["kind", "result"], registry=registry)
        self.errors = Counter(
            "dlo_reconcile_errors", "Failed reconciles.", ["kind", "reason"], registry=registry
        )
        self.duration = Histogram(
            "dlo_reconcile_duration_seconds",
            "Duration of a reconcile.",
            ["kind"],
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30),
            registry=registry,
        )
        self.depth = Gauge("dlo_workqueue_depth", "Keys that wait.", ["kind"], registry=registry)
        self.queued = Histogram(
            "dlo_workqueue_queue_duration_seconds",
            "Time that a due key waited.",
            ["kind"],
            buckets=(0.005, 0.05, 0.25, 1, 5, 30, 120),
            registry=registry,
        )
        self.retries = Counter(
            "dlo_workqueue_retries", "Keys put back after a failure.", ["kind"], registry=registry
        )
        self.unfinished = Gauge(
            "dlo_workqueue_unfinished_seconds", "Age of the oldest key that is due.", registry=registry
        )
        self.watch_activity = Gauge(
            "dlo_watch_last_activity_timestamp_seconds",
            "When a watch last told something, or a listing showed that it had told everything.",
            ["kind"],
            registry=registry,
        )
        self.watch_reconnects = Counter(
            "dlo_watch_reconnects",
            "Watches begun anew out of order.",
            ["kind", "cause"],
            registry=registry,
        )
        self.api_requests = Counter(
            "dlo_api_requests",
            "Calls to the API server, the watches' own aside.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.api_duration = Histogram(
            "dlo_api_request_duration_seconds",
            "Duration of a call to the API server.",
            ["verb", "resource"],
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30),
            registry=registry,
        )
        self.loop_lag = Histogram(
            "dlo_event_loop_lag_seconds",
            "How late the loop that takes the watches' events comes to what is due.",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 10),
            registry=registry,
        )
        self.relists = Counter("dlo_relist", "Full listings.", ["kind", "cause"], registry=registry)
        self.ghosts = Counter(
            "dlo_resync_ghosts",
            "Objects found changed or deleted by a full listing only.",
            ["kind"],
            registry=registry,
        )
        self.leader = Gauge("dlo_leader", "1 while this process leads.", registry=registry)
        self.build_info = Gauge("dlo_build_info", "Always 1.", ["version"], registry=registry)
        self.resources = Gauge(
            "dlo_resources", "Objects by condition.", ["kind", "condition", "status"], registry=registry
        )
        self.condition = Gauge(
            "dlo_deployment_condition",
            "1 for the status that a condition of a DiffusionDeployment has.",
            ["namespace", "name", "condition", "status"],
            registry=registry,
        )
        self._known: dict[Key, dict[str, str]] = {}
        ProcessCollector(registry=registry)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """A counter that first appears with its first event hides that event from `increase`."""
        for kind in _KEYS:
            for result in ("Done", "Failed"):
                self.reconciles.labels(kind, result)
            for each in (self.duration, self.queued, self.retries, self.depth):
                each.labels(kind)
        for watched in _WATCHED:
            self.ghosts.labels(watched.kind)

    def served(self, call: Served) -> None:
        """Counts one call to the API server."""
        self.api_requests.labels(call.verb, call.resource, call.code).inc()
        self.api_duration.labels(call.verb, call.resource).observe(call.seconds)

    def conditions(self, key: Key, found: Iterable[Mapping[str, Any]]) -> None:
        """Shows the conditions of one deployment."""
        now = {str(condition["type"]): str(condition["status"]) for condition in found}
        before = self._known.get(key, {})
        self._known[key] = now
        for kind, status in now.items():
            if before.get(kind) == status:
                continue
            for each in _STATUSES:
                self.condition.labels(key.namespace, key.name, kind, each).set(each == status)
            if kind in before:
                self.resources.labels("DiffusionDeployment", kind, before[kind]).dec()
            self.resources.labels("DiffusionDeployment", kind, status).inc()

    def forget(self, key: Key) -> None:
        """Removes the series of a deployment that is gone."""
        for kind, status in self._known.pop(key, {}).items():
            self.resources.labels("DiffusionDeployment", kind, status).dec()
            for each in _STATUSES:
                self.condition.remove(key.namespace, key.name, kind, each)
