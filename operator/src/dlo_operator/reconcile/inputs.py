"""What one decision is made from: frozen values, read by `gather` and by nothing in here.

Times are handed in; ages are seconds on the operator's own clock. None means that a thing is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

from dlo_api.conditions import STORAGE_HEALTHY
from dlo_api.v1alpha1 import DiffusionDeploymentSpec, NodeWeightCacheSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntryStatus, NodeSource, NodeWeightCacheStatus

from dlo_operator.reconcile.record import Record

Object = dict[str, Any]
#: A heartbeat that has not moved for this long on the operator's clock is late.
LEASE_LATE_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Images:
    """The chart's images and how they are pulled."""

    engine: str
    agent: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanSettings:
    """Settings that decisions depend on.

    Attributes:
        namespace: of the operator and the heartbeats.
        agent_namespace: of the agents and of copied credentials.
        images: the chart's images.
        hub_endpoints, s3_endpoints: names that sources may use.
        gate_deadline_seconds: how long a pod's gate waits for entries.
    """

    namespace: str
    agent_namespace: str
    images: Images
    hub_endpoints: frozenset[str] = frozenset()
    s3_endpoints: frozenset[str] = frozenset()
    gate_deadline_seconds: int = 3600


@dataclass(frozen=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True)
class NodeFacts:
    """A Node, as far as placement looks at it."""

    name: str
    uid: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False


class Room(NamedTuple):
    """What a node offers for entries that it does not hold; None where that is not known.

    Attributes:
        unhealthy: whether its agent says that the storage is.
        mappings: most memory mappings of a process.
        free: bytes free on the cache's disk.
        budget: bytes that may be warmed.
    """

    unhealthy: bool = False
    mappings: int | None = None
    free: int | None = None
    budget: int | None = None


@dataclass(frozen=True)
class CacheFacts:
    """A NodeWeightCache with its heartbeat.

    Attributes:
        name: of the node and of the object.
        spec, status, generation: of the object; no status before the agent's first report.
        lease_age: seconds since the heartbeat moved; None when there never was one.
        reported: when the agent last changed the status.
    """

    name: str
    spec: NodeWeightCacheSpec
    status: NodeWeightCacheStatus | None = None
    generation: int = 0
    lease_age: float | None = None
    reported: datetime | None = None

    @cached_property
    def states(self) -> Mapping[str, NodeEntryStatus]:
        """What the node says of each entry, by id."""
        return {} if self.status is None else {entry.id: entry for entry in self.status.entries}

    @cached_property
    def listed(self) -> frozenset[str]:
        """Ids of the entries that the node is told to hold."""
        return frozenset(entry.id for entry in self.spec.entries)

    @cached_property
    def sources(self) -> Mapping[str, NodeSource]:
        """The sources that the node is told to read, by id."""
        return {source.id: source for source in self.spec.sources}

    @cached_property
    def ids(self) -> frozenset[str]:
        """Ids of all sources and entries that the node is told of, or tells of."""
        found = {source.id for source in self.spec.sources} | {entry.id for entry in self.spec.entries}
        if self.status is not None:
            found |= {source.id for source in self.status.sources} | self.states.keys()
        return frozenset(found)

    @cached_property
    def root(self) -> str:
        """Path of the cache's root; empty while it is not reported."""
        root = self.status.root if self.status is not None else None
        return (root.path or "") if root is not None else ""

    @cached_property
    def room(self) -> Room:
        """What the node offers whatever it holds."""
        status = self.status
        if status is None:
            return Room()
        return Room(
            unhealthy=any(c.type == STORAGE_HEALTHY and c.status == "False" for c in status.conditions),
            mappings=status.memory.max_map_count if status.memory is not None else None,
            free=status.root.free_bytes if status.root is not None else None,
            budget=(status.memory.warm_budget_bytes or None) if status.memory is not None else None,
        )

    @property
    def alive(self) -> bool:
        """Whether an agent has reported and its heartbeat moves."""
        return self.status is not None and self.lease_age is not None and not self.late

    @property
    def late(self) -> bool:
        """Whether there was a heartbeat and it stopped."""
        return self.lease_age is not None and self.lease_age >= LEASE_LATE_SECONDS


@dataclass(frozen=True)
class Trouble:
    """Why a container of a pod does not run.

    Attributes:
        reason: the kubelet's or the scheduler's word.
        message: container, exit status and the last line it left, for people.
        restarts: how often the container was started again.
        code: the word in front of that line; empty when there is none.
        ended: when the container ended, as the API has it; empty when it did not.
    """

    reason: str
    message: str
    restarts: int = 0
    code: str = ""
    ended: str = ""


@dataclass(frozen=True)
class EngineReport:
    """What an engine said of itself."""

    backing: str
    fallback_code: str = ""
    mode: str = ""
    transfer: str = ""


@dataclass(frozen=True)
class PodFacts:
    """One engine pod."""

    name: str
    node: str
    revision: str
    ready: bool
    record: Record | None = None
    deleting: bool = False
    finished: bool = False
    trouble: Trouble | None = None
    report: EngineReport | None = None


@dataclass(frozen=True)
class VolumeFacts:
    """The PersistentVolume and the claim through which pods of a namespace mount one cache root.

    Attributes:
        claim_uid: of the claim; empty while there is none.
        going: whether one of the two is being deleted, so that it must be made anew afterwards.
    """

    claim_uid: str = ""
    going: bool = False


@dataclass(frozen=True)
class WorkloadFacts:
    """The child Deployment.

    Attributes:
        revision, record: of its template.
        template: its pod template as it stands.
        replicas: asked for by its spec.
        settled: its controller has seen the newest spec.
        rolled_out: the newest template reached all replicas once (`NewReplicaSetAvailable`).
        deadline_exceeded: it made no progress for its deadline.
        refused: the server's words when pods could not be created.
    """

    revision: str
    record: Record | None
    replicas: int
    existing: int = 0
    updated: int = 0
    ready: int = 0
    settled: bool = False
    rolled_out: bool = False
    deadline_exceeded: bool = False
    refused: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)


SecretState = Literal["None", "Copied", "Missing", "Denied"]


@dataclass(frozen=True)
class Shortlist:
    """What of the whole fleet concerns one deployment.

    Attributes:
        matching: nodes that selector, affinity and tolerations admit, sorted; `eligible` those that have the GPUs too.
        by_name: the eligible ones.
        near: nodes that are told of, or tell of, its source or one of its entries.
        roots: paths at which any nodes keep their caches.
    """

    matching: tuple[NodeFacts, ...] = ()
    eligible: tuple[NodeFacts, ...] = ()
    by_name: Mapping[str, NodeFacts] = field(default_factory=dict)
    near: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DeploymentInputs:
    """All that decides about one DiffusionDeployment.

    Attributes:
        name, namespace, uid, generation: its metadata.
        spec: None when it cannot be read; then `spec_error` says why.
        status: what stands in its status now, as JSON values.
        created: its creation time.
        nodes, caches: all of the cluster, by name.
        pods: its engine pods.
        workload: its Deployment.
        foreign: children's names that others hold, as `Kind/name`.
        leaving: children's names that children of an earlier deployment of the name still have.
        has_budget: whether its PodDisruptionBudget exists.
        secret: of the source's credential.
        pod_security: level that the namespace enforces on pods; empty when none is known.
        volumes: what stands of the volume of each cache root, by path; only where volumes are asked for.
        template_error: the server's words when it refused the rendered template.
        now: the time of the decision.
        shortlist: as an index of the fleet has it; None to look at everything.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: DiffusionDeploymentSpec | None
    nodes: tuple[NodeFacts, ...]
    caches: Mapping[str, CacheFacts]
    settings: PlanSettings
    now: datetime
    spec_error: str = ""
    status: Mapping[str, Any] = field(default_factory=dict)
    pods: tuple[PodFacts, ...] = ()
    workload: WorkloadFacts | None = None
    foreign: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    has_budget: bool = False
    secret: SecretState = "None"  # noqa: S105 - a state, not a secret
    pod_security: str = ""
    volumes: Mapping[str, VolumeFacts] = field(default_factory=dict)
    template_error: str = ""
    shortlist: Shortlist | None = None

    @property
    def records(self) -> tuple[Record, ...]:
        """What running revisions stand on; the newest template's first."""
        found = [self.workload.record] if self.workload is not None else []
        found += [pod.record for pod in self.pods]
        return tuple(record for record in found if record is not None)
