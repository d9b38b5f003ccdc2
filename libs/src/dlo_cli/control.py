"""Whether anybody acts on a deployment at all: the operator's Lease, the agents, the generation looked at. Pure."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from dlo_cli.causes import Cause, cause, following
from dlo_cli.cluster import LEADER_LEASE, Seen
from dlo_cli.nodes import cluster_time, renewed

#: The leader renews every few seconds and stops before this.
LEADER_LATE: Final = timedelta(seconds=60)
_START: Final = "start it: kubectl get pods -A -l app.kubernetes.io/component=operator"


def control_causes(seen: Seen, operator_namespace: str | None) -> list[Cause]:
    """What must be said first: the operator or the agents are not there, or the last change was not looked at."""
    found = [*_operator(seen, operator_namespace), *_agents(seen)]
    behind = _behind(seen)
    if behind is not None:
        found.append(following(behind) if found else behind)
    return found


def _operator(seen: Seen, namespace: str | None) -> list[Cause]:
    if seen.leases is None:
        return []
    leader = seen.leader
    if leader is None:
        where = f"namespace {namespace}" if namespace else "any namespace"
        return [
            cause(
                "Operator",
                "",
                "OperatorNotRunning",
                f"it never ran: there is no Lease {LEADER_LEASE} in {where}"
                " — install the chart charts/dlo-operator, or wait for its first pod",
            )
        ]
    moved = renewed(leader)
    if not (leader.get("spec") or {}).get("holderIdentity") or moved is None:
        return [
            cause(
                "Operator", "", "OperatorNotRunning", f"it is not running: nobody holds its Lease — {_START}"
            )
        ]
    late = cluster_time(seen) - moved
    if late < LEADER_LATE:
        return []
    words = f"it is not running: its Lease has not moved for {_for_people(late)}"
    return [cause("Operator", "", "OperatorNotRunning", f"{words} — {_START}")]


def _agents(seen: Seen) -> list[Cause]:
    """No agent anywhere; one that lacks on a node is that node's cause."""
    caches = seen.caches
    if not caches or any(cache.get("status") for cache in caches):
        return []
    words = f"none has ever reported, from {len(caches)} node{'s' if len(caches) > 1 else ''}"
    return [
        cause(
            "Agent",
            "",
            "AgentNotInstalled",
            f"{words} — see that the DaemonSet runs: kubectl get daemonset -A"
            " -l app.kubernetes.io/component=agent",
        )
    ]


def _behind(seen: Seen) -> Cause | None:
    meta, status = seen.deployment["metadata"], seen.deployment.get("status") or {}
    generation, observed = meta.get("generation", 0), status.get("observedGeneration")
    if observed == generation:
        return None
    words = (
        f"generation {generation} is the newest, the operator has looked at {observed}"
        if observed is not None
        else "the operator has not looked at it"
    )
    return cause(
        "DiffusionDeployment",
        seen.name,
        "NotObserved",
        f"{words} — wait a few seconds; if it stays, read the operator's log",
    )


def _for_people(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} seconds"
