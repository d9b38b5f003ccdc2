"""Why a DiffusionDeployment is not ready, root first, or what backs it: one value from what was seen. Pure.

The chain goes from who should act (operator, agents) over the spec, the source, the nodes and their entries to
the pods; a condition that only repeats what a node or a pod said stands as what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from dlo_api import conditions as names
from pydantic.alias_generators import to_camel

from dlo_cli.causes import Cause, cause, conditions, following
from dlo_cli.cluster import Seen, Unread
from dlo_cli.control import control_causes
from dlo_cli.nodes import NodeRow, node_causes, node_rows, placement_causes
from dlo_cli.pods import EngineRow, engine_rows, pod_causes, workload_causes
from dlo_cli.remedies import UNDER_WAY

SCHEMA: Final = "dlo.dev/explain/v1"
#: Conditions from the first that can fail to the last; Ready and Stalled only repeat them.
_ORDER: Final = (
    names.ACCEPTED,
    names.SOURCE_RESOLVED,
    names.CAPACITY_SUFFICIENT,
    names.CACHE_READY,
    names.ENGINE_AVAILABLE,
    names.USING_CACHE,
    names.PROGRESSING,
)
#: Reasons of Progressing that say something of their own.
_STUCK: Final = frozenset({"DeadlineExceeded", "RollingOut"})
#: Conditions that only wait for others.
_WAITING: Final = frozenset({names.CACHE_READY, names.ENGINE_AVAILABLE, names.PROGRESSING})
_PLACEMENT: Final = frozenset({"NoEligibleNodes", "WorldTooLarge"})
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Backing:
    """What backs a deployment whose engines serve; what is not known is None.

    Attributes:
        kind, fallback_code: where blocks are copied from.
        entries: the entries by name.
        bytes_per_node, saved_bytes_per_node: shared bytes, and what private copies would take beyond them.
        nodes: nodes that hold all entries.
        engines: nodes on which engines serve.
    """

    kind: str | None
    fallback_code: str | None
    entries: tuple[str, ...]
    bytes_per_node: int | None
    saved_bytes_per_node: int | None
    nodes: tuple[str, ...]
    engines: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Everything that is printed of one deployment."""

    name: str
    namespace: str
    ready: bool
    summary: str
    generation: int
    observed_generation: int | None
    current: str
    updating: str
    replicas: int | None
    ready_replicas: int | None
    causes: tuple[Cause, ...]
    nodes: tuple[NodeRow, ...]
    engines: tuple[EngineRow, ...]
    backing: Backing | None
    unread: tuple[Unread, ...]

    def to_json(self) -> dict[str, Any]:
        """One document; what is not known is absent."""
        written: dict[str, Any] = _bare(
            {
                "schema": SCHEMA,
                "name": self.name,
                "namespace": self.namespace,
                "ready": self.ready,
                "summary": self.summary,
                "generation": self.generation,
                "observedGeneration": self.observed_generation,
                "revision": {"current": self.current, "updating": self.updating},
                "replicas": self.replicas,
                "readyReplicas": self.ready_replicas,
                "nodes": [asdict(row) for row in self.nodes],
                "engines": [asdict(row) for row in self.engines],
                "backing": asdict(self.backing) if self.backing is not None else None,
                "unread": [asdict(each) for each in self.unread],
            }
        )
        return written | {"causes": [each.to_json() for each in self.causes]}


def explain(seen: Seen, *, operator_namespace: str | None = None) -> Explanation:
    """The explanation of what was seen."""
    obj, status = seen.deployment, seen.deployment.get("status") or {}
    rows, engines = node_rows(seen), engine_rows(seen)
    control = control_causes(seen, operator_namespace)
    known = conditions(obj)
    generation = obj["metadata"].get("generation", 0)
    summary = known.get(names.READY, {})
    observed = status.get("observedGeneration")
    ready = summary.get("status") == "True" and observed == generation
    causes = [*control, *_own(obj)]
    if summary.get("reason") != "Suspended":
        causes += _chain(seen, known, rows, engines, bool(control))
    revision = status.get("revision") or {}
    return Explanation(
        name=seen.name,
        namespace=seen.namespace,
        ready=ready,
        summary=_summary(seen, summary, ready=ready, causes=causes),
        generation=generation,
        observed_generation=observed,
        current=revision.get("current") or "",
        updating=revision.get("updating") or "",
        replicas=(obj.get("spec") or {}).get("replicas"),
        ready_replicas=status.get("readyReplicas"),
        causes=tuple(causes),
        nodes=rows,
        engines=engines,
        backing=_backing(obj, rows, engines) if ready else None,
        unread=tuple(seen.unread),
    )


def _own(obj: Json) -> list[Cause]:
    """What the object itself says of its end or its rest."""
    found: list[Cause] = []
    name = obj["metadata"]["name"]
    if "deletionTimestamp" in obj["metadata"]:
        words = f"it is being deleted since {obj['metadata']['deletionTimestamp']}"
        left = ", ".join(obj["metadata"].get("finalizers") or ()) or "its children to go"
        found.append(cause("DiffusionDeployment", name, "Deleting", f"{words} — it waits for {left}"))
    if (obj.get("spec") or {}).get("suspend"):
        found.append(cause("DiffusionDeployment", name, "Suspended", "spec.suspend is true"))
    return found


def _chain(
    seen: Seen,
    known: Mapping[str, Json],
    rows: tuple[NodeRow, ...],
    engines: tuple[EngineRow, ...],
    unattended: bool,
) -> list[Cause]:
    """Nodes, then pods, each before the conditions that they are the cause of."""
    accepted = known.get(names.ACCEPTED, {})
    found: list[Cause] = []
    if accepted.get("status") == "False":
        reason = str(accepted.get("reason"))
        if reason in _PLACEMENT:
            found += placement_causes(seen)
        return [*found, _said(seen, accepted, bool(found))]
    nodes = node_causes(seen, rows)
    if known.get(names.CAPACITY_SUFFICIENT, {}).get("reason") in _PLACEMENT:
        nodes = [*placement_causes(seen), *nodes]
    found += nodes
    for kind in (names.SOURCE_RESOLVED, names.CAPACITY_SUFFICIENT, names.CACHE_READY):
        condition = known.get(kind, {})
        if condition.get("status") in ("False", "Unknown"):
            found.append(_said(seen, condition, unattended or _explained(condition, found, kind)))
    found += workload_causes(seen)
    # What a gate waited for in vain is what stands above of its node.
    lacking = bool(nodes) or known.get(names.CACHE_READY, {}).get("status") in ("False", "Unknown")
    found += [following(pod) if lacking and pod.reason == "GateDeadline" else pod for pod in pod_causes(seen)]
    for kind in (names.ENGINE_AVAILABLE, names.USING_CACHE, names.PROGRESSING):
        condition = known.get(kind, {})
        if _matters(kind, condition, engines):
            found.append(_said(seen, condition, unattended or _explained(condition, found, kind)))
    return found


def _matters(kind: str, condition: Json, engines: tuple[EngineRow, ...]) -> bool:
    if kind == names.PROGRESSING:
        return condition.get("reason") in _STUCK
    if kind == names.USING_CACHE and condition.get("reason") == "Unreported":
        # Silence matters only where there is somebody to speak, and says nothing here either.
        return any(each.state == "Ready" for each in engines) and not any(each.backing for each in engines)
    return condition.get("status") == "False"


def _explained(condition: Json, found: list[Cause], kind: str) -> bool:
    """Whether what stands before already says why: any cause does for what waits, the same reason for the rest."""
    roots = [each for each in found if not each.follows]
    if kind in _WAITING or condition.get("status") == "Unknown":
        return bool(roots)
    if condition.get("reason") in _PLACEMENT:
        return any(each.reason in ("NotEligible", "TooFewGpus") for each in roots)
    said = str(condition.get("message") or "")
    return any(
        each.reason == condition.get("reason") or any(name in said for name in each.names)
        for each in roots
        if each.subject in ("Node", "Pod")
    )


def _said(seen: Seen, condition: Json, explained: bool) -> Cause:
    reason = str(condition.get("reason"))
    made = cause("DiffusionDeployment", seen.name, reason, f"{reason}: {condition.get('message') or ''}")
    return following(made) if explained else made


def _summary(seen: Seen, summary: Json, *, ready: bool, causes: list[Cause]) -> str:
    if "deletionTimestamp" in seen.deployment["metadata"]:
        return "is being deleted"
    if ready:
        return "is ready"
    if not summary:
        return "is not ready: nothing has acted on it yet"
    root = next((each.reason for each in causes if not each.follows), str(summary.get("reason")))
    if summary.get("status") == "True":
        return f"was ready, and its change has not been acted on: {root}"
    under_way = root in UNDER_WAY and not any(
        each.reason not in UNDER_WAY for each in causes if not each.follows
    )
    return f"is not ready yet: {root}" if under_way else f"is not ready: {root}"


def _backing(obj: Json, rows: tuple[NodeRow, ...], engines: tuple[EngineRow, ...]) -> Backing:
    status, policy = (
        obj.get("status") or {},
        ((obj.get("spec") or {}).get("cache") or {}).get("policy", "Required"),
    )
    cache, offload = status.get("cache") or {}, status.get("offload") or {}
    told = [each for each in engines if each.backing]
    worst = next((each for each in told if each.fallback_code), told[0] if told else None)
    return Backing(
        kind=(worst.backing if worst is not None else offload.get("backing")) or None,
        fallback_code=(worst.fallback_code if worst is not None else offload.get("fallbackCode")) or None,
        entries=tuple(
            f"{entry.get('component')} {entry.get('coordinate')}"
            if entry.get("kind") == "Layout"
            else ("rest of the pipeline" if policy == "Required" else "whole checkpoint")
            for entry in cache.get("entries") or ()
        ),
        bytes_per_node=cache.get("bytesPerNode"),
        saved_bytes_per_node=cache.get("savedBytesPerNode"),
        nodes=tuple(row.name for row in rows if row.whole),
        engines=tuple(dict.fromkeys(each.node for each in engines if each.state == "Ready" and each.node)),
    )


def _bare(value: Any) -> Any:
    """Without what is not known, names in camelCase."""
    if isinstance(value, dict):
        return {to_camel(key): _bare(item) for key, item in value.items() if item is not None and item != ""}
    if isinstance(value, list | tuple):
        return [_bare(item) for item in value]
    return value
