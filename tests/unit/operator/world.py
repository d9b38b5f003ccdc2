"""A cluster in memory with the operator in it, driven by hand: no thread, no clock, no network."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from dlo_kube.gateway import Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    Kind,
)
from dlo_kube.kinds import NAMESPACE as NAMESPACE_KIND
from dlo_operator.app import Clock, assemble
from dlo_operator.keys import node_key
from dlo_operator.mirror import kinds
from dlo_operator.pace import Pace
from dlo_operator.reconcile.inputs import EngineReport, Images, PlanSettings
from dlo_operator.settings import Settings
from fakes.kube import FakeCluster
from unit.api.manifests import manifest
from unit.operator.kubelets import Kubelets
from unit.operator.simulated import Agent, Content

NAMESPACE = "team"
ALL = (DIFFUSION_DEPLOYMENT, NODE, NODE_WEIGHT_CACHE, DEPLOYMENT, POD, SERVICE, POD_DISRUPTION_BUDGET)
SETTINGS = Settings(
    plan=PlanSettings(
        namespace="dlo-system",
        agent_namespace="dlo-agents",
        images=Images(engine="engine:1", agent="agent:1"),
        hub_endpoints=frozenset({"mirror"}),
    ),
    identity="operator-0",
)


class Time(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        """Seconds since the start of the test."""
        return self.seconds

    def now(self) -> datetime:
        """The time of day."""
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)


class Reports:
    """Engines that all say the same of themselves."""

    def __init__(self) -> None:
        self.said: EngineReport | None = EngineReport(
            backing="MappedCache", mode="DistributedLayerwise", transfer="RankLocal"
        )
        self.slow = False

    def report(self, pod: Object, port: int) -> EngineReport | None:
        """What a ready pod's engine says."""
        ready = {"type": "Ready", "status": "True"} in pod["status"].get("conditions", [])
        return self.said if ready and not self.slow else None

    def asking(self, pod: Object) -> bool:
        """Whether engines take their time."""
        del pod
        return self.slow


class World:
    """The cluster, its simulated parts, and an operator that can be killed and started again."""

    def __init__(self, nodes: int = 2) -> None:
        self.time = Time()
        self.operating = False
        self.cluster = FakeCluster(now=lambda: self.time.seconds)
        self.content = Content()
        self.agents: dict[str, Agent] = {}
        self.kubelets = Kubelets(self.cluster, self.agents)
        self.reports = Reports()
        for number in range(1, nodes + 1):
            self.add_node(f"node-{number}")
        self.start()

    def add_node(self, name: str, **changes: Any) -> Agent:
        """A node joins, with its agent."""
        node: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "spec": {},
            "status": {"allocatable": {"cpu": "8"}},
        }
        self.cluster.put(node | changes)
        self.agents[name] = Agent(self.cluster, name, self.content, SETTINGS.plan.namespace)
        return self.agents[name]

    def start(self) -> None:
        """A fresh operator, that knows nothing."""
        self.operator = assemble(
            self.cluster,
            SETTINGS,
            clock=self.time,
            engines=self.reports,
            rng=random.Random(1),
            pace=Pace(calm=0.0, settle=0.0, node=0.0),
        )
        self.hear()

    def hear(self) -> None:
        """The operator hears of everything that has happened, as from its watches."""
        for kind in kinds():
            self.operator.mirror.refresh(kind)

    def settle(self, *, turns: int = 60) -> int:
        """Lets everybody act until nobody changes anything; the number of turns. Fails when it does not end."""
        quiet = 0
        for turn in range(turns):
            # Twice, since a heartbeat that comes back is seen one turn later.
            quiet = 0 if self.turn() else quiet + 1
            if quiet == 2:
                return turn
        raise AssertionError(f"nothing settled after {turns} turns")

    def turn(self) -> bool:
        """One turn of operator, agents and kubelets; whether anything changed."""
        before = self.version()
        self.operate()
        for agent in self.agents.values():
            agent.step(most=1)
        self.kubelets.step()
        return self.version() != before

    def operate(self) -> None:
        """The operator looks at every key until its own queue is empty."""
        self.operating = True
        try:
            self.operator.heartbeats.refresh()
            self.operator.resync()
            while (taken := self.operator.queue.take(timeout=0)) is not None:
                self.operator.work(taken)
        finally:
            self.operating = False

    def version(self) -> tuple[Any, ...]:
        """Something that changes with every object, heartbeats aside."""
        return tuple(
            (obj["kind"], obj["metadata"]["name"], obj["metadata"]["resourceVersion"])
            for kind in ALL
            for obj in self.cluster.objects(kind)
        )

    def create(self, name: str = "digits", changes: dict[str, Any] | None = None) -> None:
        """A user applies a DiffusionDeployment: tensor 2 on the CPU, with these changes by dotted path."""
        given = {
            "spec.engine.device": "Cpu",
            "spec.parallelism.tensor": 2,
            "spec.replicas": 2,
            **(changes or {}),
        }
        obj = manifest({"metadata.name": name, "metadata.namespace": NAMESPACE, **given})
        self.cluster.put(obj)

    def enforce(self, level: str) -> None:
        """The namespace of the deployments enforces this level of Pod Security."""
        labels = {"pod-security.kubernetes.io/enforce": level}
        meta = {"name": NAMESPACE, "labels": labels}
        if self.cluster.get(NAMESPACE_KIND, NAMESPACE) is None:
            self.cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        self.cluster.edit(NAMESPACE_KIND, NAMESPACE, lambda obj: obj["metadata"].update(labels=labels))

    def change(self, path: str, value: Any, name: str = "digits") -> None:
        """A user changes one field of the spec."""

        def set_it(obj: Object) -> None:
            holder = obj
            *parents, last = path.split(".")
            for part in parents:
                holder = holder.setdefault(part, {})
            holder[last] = copy.deepcopy(value)

        self.cluster.edit(DIFFUSION_DEPLOYMENT, name, set_it, NAMESPACE)

    def delete(self, name: str = "digits") -> None:
        """A user deletes it, and the garbage collector runs."""
        self.cluster.remove(DIFFUSION_DEPLOYMENT, name, NAMESPACE)
        self.cluster.collect()

    def object(self, kind: Kind, name: str = "digits") -> Object:
        """An object that must be there."""
        found = self.cluster.get(kind, name, NAMESPACE if kind.namespaced else None)
        assert found is not None, f"{kind.kind} {name} is not there"
        return found

    def condition(self, kind: str, name: str = "digits") -> tuple[str, str]:
        """Status and reason of a condition."""
        for condition in self.object(DIFFUSION_DEPLOYMENT, name)["status"]["conditions"]:
            if condition["type"] == kind:
                return condition["status"], condition["reason"]
        raise AssertionError(f"no condition {kind}")

    def message(self, kind: str, name: str = "digits") -> str:
        """Words of a condition."""
        conditions = self.object(DIFFUSION_DEPLOYMENT, name)["status"]["conditions"]
        return next(str(c["message"]) for c in conditions if c["type"] == kind)

    def node_entries(self, node: str) -> set[str]:
        """Ids of the entries that a node is told to hold."""
        return {
            entry["id"] for entry in self.object(NODE_WEIGHT_CACHE, node).get("spec", {}).get("entries", [])
        }

    def claimed(self) -> set[str]:
        """Nodes that are told to hold something."""
        return {name for name in self.agents if self.node_entries(name)}

    def look(self, node: str) -> None:
        """The operator looks at one node's key."""
        self.hear()
        self.operator.controller.reconcile(node_key(node))

    def silence(self, *nodes: str) -> None:
        """These nodes' heartbeats stop, and two minutes pass."""
        for node in nodes:
            self.agents[node].alive = False
        self.operate()
        self.time.seconds += 121
        for agent in self.agents.values():
            agent.step(most=0)
        self.operate()

    def writes(self, action: Callable[[], None]) -> int:
        """Write calls during an action, heartbeats aside."""
        before = sum(self.cluster.writes.values())
        action()
        return sum(self.cluster.writes.values()) - before
