"""What the nodes that should hold a deployment's entries say, and why any of them does not. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final, Literal

from dlo_api.eligibility import engines_that_fit, gpus, refusals
from dlo_api.names import OPERATOR_FIELD_MANAGER, label
from dlo_api.topology import coordinate, world_size
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.wanted import entries_for, id_of_source
from pydantic import ValidationError

from dlo_cli.causes import Cause, cause, conditions, grouped
from dlo_cli.cluster import Seen

HEARTBEAT_LATE: Final = timedelta(seconds=120)
_FILES: Final = {"PipelineRest": "rest of the pipeline", "All": "whole checkpoint"}
_KUBELETS: Final = "kube-node-lease"
_TOGETHER: Final = timedelta(seconds=60)
_ENOUGH: Final = 2  # of two clocks nobody knows which is off
_STOPPED: Final = frozenset({"Failed", "Quarantined"})
AgentState = Literal["Alive", "Late", "Silent", "Unknown"]
Json = Mapping[str, Any]


@dataclass(frozen=True)
class EntryRow:
    """One wanted entry as its node reports it; a number that is not known is None."""

    id: str
    what: str
    revision: Literal["Both", "Running", "Updating"]
    phase: str
    bytes: int | None = None
    done_bytes: int | None = None
    reason: str = ""
    message: str = ""
    next_attempt: str = ""


@dataclass(frozen=True)
class NodeRow:
    """One node that should hold entries.

    Attributes:
        name: of the node.
        agent: whether its agent reports and its heartbeat moves; Unknown where Leases may not be read.
        root, free_bytes: its cache root.
        entries: the wanted ones.
    """

    name: str
    agent: AgentState
    root: str = ""
    free_bytes: int | None = None
    entries: tuple[EntryRow, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every wanted entry is there."""
        return bool(self.entries) and all(entry.phase == "Ready" for entry in self.entries)


@dataclass(frozen=True)
class ListedTaint:
    """A taint of a Node object."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True)
class ListedNode:
    """A Node object, as far as placement looks at it."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[ListedTaint, ...]
    allocatable: Mapping[str, str]


def listed_node(obj: Json) -> ListedNode:
    """What placement looks at in a Node object."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    return ListedNode(
        name=obj["metadata"]["name"],
        labels=obj["metadata"].get("labels") or {},
        taints=tuple(
            ListedTaint(str(t.get("key") or ""), str(t.get("value") or ""), str(t.get("effect") or ""))
            for t in spec.get("taints") or ()
        ),
        allocatable={key: str(value) for key, value in (status.get("allocatable") or {}).items()},
    )


def read_spec(obj: Json) -> DiffusionDeploymentSpec | None:
    """The spec of an object, patient with fields of a later version; None when it cannot be read."""
    try:
        return DiffusionDeploymentSpec.model_validate_json(json.dumps(obj.get("spec") or {}), extra="ignore")
    except ValidationError:
        return None


def cluster_time(seen: Seen) -> datetime:
    """The time by the cluster's clocks, where some are seen: the newest heartbeat of a kubelet.

    This machine's own clock may be off; then every heartbeat would look late, or none.
    """
    kubelets = [
        moment
        for lease in seen.leases or ()
        if lease["metadata"].get("namespace") == _KUBELETS and (moment := renewed(lease)) is not None
    ]
    if kubelets:
        # One node whose clock is ahead would make all others look late: the newest that another one bears out.
        newest = sorted(kubelets, reverse=True)
        borne_out = (one for one, other in pairwise(newest) if one - other <= _TOGETHER)
        return next(borne_out, newest[0]) if len(newest) > _ENOUGH else newest[0]
    ours = [moment for lease in seen.leases or () if (moment := renewed(lease)) is not None]
    return max([seen.now, *ours])


def renewed(lease: Json) -> datetime | None:
    """When a Lease was renewed; None before the first time."""
    try:
        return datetime.fromisoformat((lease.get("spec") or {})["renewTime"])
    except (KeyError, TypeError, ValueError):
        return None


def node_rows(seen: Seen) -> tuple[NodeRow, ...]:
    """The nodes that are told to hold entries of the deployment, by name."""
    wanted = wanted_ids(seen)
    now = cluster_time(seen)
    rows = [_row(seen, cache, wanted, now) for cache in seen.caches or ()]
    return tuple(sorted((row for row in rows if row is not None), key=lambda row: row.name))


def wanted_ids(seen: Seen) -> dict[str, Literal["Both", "Running", "Updating"]]:
    """Ids of the entries of the running revision and of the one that the spec asks for."""
    spec = read_spec(seen.deployment)
    updating: set[str] = set()
    if spec is not None:
        updating = {entry.id for entry in entries_for(spec, id_of_source(spec, seen.namespace))}
    running = _recorded(seen.workload)
    marks: dict[str, Literal["Both", "Running", "Updating"]] = {}
    for each in sorted(updating | running):
        if each in updating:
            marks[each] = "Both" if each in running else "Updating"
        else:
            marks[each] = "Running"
    return marks


def _recorded(workload: Json | None) -> set[str]:
    """Ids of the entries that the child Deployment's template stands on."""
    template = ((workload or {}).get("spec") or {}).get("template") or {}
    try:
        record = json.loads(
            ((template.get("metadata") or {}).get("annotations") or {})[label("cache-record")]
        )
        return {str(entry["id"]) for entry in record["entries"]}
    except (KeyError, TypeError, ValueError):
        return set()


def _row(
    seen: Seen, cache: Json, wanted: Mapping[str, Literal["Both", "Running", "Updating"]], now: datetime
) -> NodeRow | None:
    listed = [e for e in (cache.get("spec") or {}).get("entries") or () if e.get("id") in wanted]
    if not listed:
        return None
    status = cache.get("status") or {}
    states = {state.get("id"): state for state in status.get("entries") or ()}
    root = status.get("root") or {}
    name = cache["metadata"]["name"]
    return NodeRow(
        name=name,
        agent=_agent(seen, name, status, now),
        root=root.get("path") or "",
        free_bytes=root.get("freeBytes"),
        entries=tuple(
            _entry(entry, states.get(entry["id"]) or {}, wanted[entry["id"]])
            for entry in sorted(listed, key=_order)
        ),
    )


def _order(entry: Json) -> tuple[bool, str, int, int]:
    return (
        entry.get("kind") != "Layout",
        entry.get("component") or "",
        entry.get("tensorSize", 1),
        entry.get("tensorRank", 0),
    )


def _entry(entry: Json, state: Json, revision: Literal["Both", "Running", "Updating"]) -> EntryRow:
    layout = entry.get("kind") == "Layout"
    place = coordinate(entry.get("tensorRank", 0), entry.get("tensorSize", 1))
    return EntryRow(
        id=entry["id"],
        what=f"{entry.get('component')} {place}"
        if layout
        else _FILES.get(entry.get("select") or "", "files"),
        revision=revision,
        phase=state.get("phase") or "Unreported",
        bytes=state.get("bytes"),
        done_bytes=state.get("doneBytes"),
        reason=state.get("reason") or "",
        message=state.get("message") or "",
        next_attempt=state.get("nextAttempt") or "",
    )


def _agent(seen: Seen, name: str, status: Json, now: datetime) -> AgentState:
    if not status:
        return "Silent"
    if seen.leases is None or seen.leader is None:
        # Without the operator's own Lease in sight, its nodes' ones are not where was looked.
        return "Unknown"
    lease = next((lease for lease in seen.leases if _is_heartbeat(lease, name)), None)
    moved = renewed(lease) if lease is not None else None
    if moved is None:
        return "Silent"
    return "Late" if now - moved >= HEARTBEAT_LATE else "Alive"


def _is_heartbeat(lease: Json, node: str) -> bool:
    meta = lease["metadata"]
    ours = (meta.get("labels") or {}).get("app.kubernetes.io/managed-by") == OPERATOR_FIELD_MANAGER
    return bool(meta["name"] == node and ours)


def node_causes(seen: Seen, rows: tuple[NodeRow, ...]) -> list[Cause]:
    """Why nodes do not hold the entries: the first cause of each, and the entries that fail by themselves."""
    found: list[Cause] = []
    for row in rows:
        if not row.whole or row.agent in ("Late", "Silent"):
            found += _of_node(seen, row)
    if seen.caches is None:
        found += _reported(seen.deployment)
    return grouped(found)


def _of_node(seen: Seen, row: NodeRow) -> list[Cause]:
    node = next((o for o in seen.nodes or () if o["metadata"]["name"] == row.name), None)
    cache = next(o for o in seen.caches or () if o["metadata"]["name"] == row.name)
    broken = _machine(seen, row, node) or _storage(row, cache)
    if broken is not None:
        return [broken]
    sources = {source.get("id") for source in (cache.get("spec") or {}).get("sources") or ()}
    found = [
        cause("Node", row.name, state["reason"], state.get("message") or "the source cannot be read")
        for state in (cache.get("status") or {}).get("sources") or ()
        if state.get("reason") and state["reason"] != "Hashing" and state.get("id") in sources & _source(seen)
    ]
    return [*found, *_entries(row)]


def _entries(row: NodeRow) -> list[Cause]:
    """Entries that failed, or wait for a reason; those with the same trouble together."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for entry in row.entries:
        if entry.phase in _STOPPED or (entry.phase != "Ready" and entry.reason):
            alike.setdefault((entry.reason, entry.phase, entry.message, entry.next_attempt), []).append(
                entry.what
            )
    found = []
    for (reason, phase, message, later), names in alike.items():
        what, dash, do = (message or reason).partition(" — ")
        again = f", next try {later}" if later else ""
        words = f"{', '.join(names)}: {phase}: {what}{again}{dash}{do}"
        found.append(cause("Node", row.name, reason or phase, words))
    return found


def _source(seen: Seen) -> set[str]:
    spec = read_spec(seen.deployment)
    return {id_of_source(spec, seen.namespace)} if spec is not None else set()


def _machine(seen: Seen, row: NodeRow, node: Json | None) -> Cause | None:
    """The node itself, or its agent, is not there."""
    if seen.nodes is not None and node is None:
        return cause("Node", row.name, "NodeLost", "there is no Node of that name any more")
    ready = conditions(node or {}).get("Ready", {})
    if ready and ready.get("status") != "True":
        words = str(ready.get("message") or "the kubelet is silent").rstrip(".")
        return cause("Node", row.name, "NodeLost", f"not Ready: {words}")
    if row.agent == "Silent":
        return cause("Node", row.name, "AgentNotReady", "no agent has reported")
    if row.agent == "Late":
        return cause("Node", row.name, "NodeLost", "the agent's heartbeat stopped")
    return None


def _storage(row: NodeRow, cache: Json) -> Cause | None:
    known = conditions(cache)
    for kind in ("StorageHealthy", "SpaceAvailable"):
        found = known.get(kind, {})
        if found.get("status") == "False":
            words = str(found.get("message") or "")
            if found.get("reason") == "RootNotMounted":
                words = f"the cache root is not mounted: {words}"
            return cause("Node", row.name, str(found.get("reason")), words)
    return None


def _reported(deployment: Json) -> list[Cause]:
    """The operator's own list of problems, where the nodes' caches may not be read."""
    return [
        cause("Node", str(p.get("node")), str(p.get("reason")), str(p.get("message") or p.get("reason")))
        for p in (deployment.get("status") or {}).get("problems") or ()
    ]


def placement_causes(seen: Seen) -> list[Cause]:
    """Which rule keeps the engines off each node, nodes with the same rule together."""
    spec = read_spec(seen.deployment)
    if spec is None or seen.nodes is None:
        return []
    return grouped(cause for obj in seen.nodes for cause in _kept_off(spec, listed_node(obj)))


def _kept_off(spec: DiffusionDeploymentSpec, node: ListedNode) -> Iterator[Cause]:
    for refusal in refusals(spec.placement, node):
        yield cause("Node", node.name, "NotEligible", f"{refusal.message} — {refusal.hint}")
    if engines_that_fit(spec, node) == 0:
        words = (
            f"{gpus(spec, node)} {spec.placement.gpu_resource} may be used, an engine needs"
            f" {world_size(spec.parallelism)}"
        )
        yield cause("Node", node.name, "TooFewGpus", f"{words} — lower the degrees of spec.parallelism")
