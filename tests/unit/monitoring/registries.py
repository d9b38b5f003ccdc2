"""The metrics of all three programs, read from their real registries and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dlo_agent.metrics import Metrics as AgentMetrics
from dlo_engine.front.metrics import Metrics as EngineMetrics
from dlo_operator.metrics import Metrics as OperatorMetrics
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

REGISTRIES: Mapping[str, CollectorRegistry] = {
    "operator": OperatorMetrics(CollectorRegistry()).registry,
    "agent": AgentMetrics("test").registry,
    "engine": EngineMetrics().registry,
}


@dataclass(frozen=True)
class Described:
    """One metric as it is exposed; a counter's name has its ending."""

    component: str
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def described() -> tuple[Described, ...]:
    """Every metric of our own, in the order of component and name; what every process has is left out."""
    found = [
        Described(
            component,
            metric._name + ("_total" if metric._type == "counter" else ""),
            metric._type,
            tuple(metric._labelnames),
            metric._documentation,
        )
        for component, registry in REGISTRIES.items()
        for metric in _metrics(registry)
    ]
    order = list(REGISTRIES)
    return tuple(sorted(found, key=lambda each: (order.index(each.component), each.name)))


def _metrics(registry: CollectorRegistry) -> Iterable[Any]:
    return [each for each in registry._collector_to_names if isinstance(each, MetricWrapperBase)]
