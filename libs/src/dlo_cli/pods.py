"""What engine pods say: why one does not serve, and what the others run on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dlo_api.names import label

from dlo_cli.causes import Cause, cause, conditions, following, grouped
from dlo_cli.cluster import Seen, is_ready
from dlo_cli.remedies import REMEDIES

GATE: Final = "cache-gate"
GATE_DEADLINE: Final = 75
"""The gate's exit status when its deadline has passed."""
_KILLED: Final = 137
_LONGEST_WORD: Final = 60
Json = Mapping[str, Any]


@dataclass(frozen=True)
class EngineRow:
    """One engine pod.

    Attributes:
        pod, node, revision: where it is and of what; the node is empty while it has none.
        state: Ready, Starting, Held (its gate waits), Failing, Unscheduled or Ending.
        backing, fallback_code, verified: what the engine said of itself; None or empty where it was not asked.
    """

    pod: str
    node: str
    revision: str
    state: str
    backing: str = ""
    fallback_code: str = ""
    verified: bool | None = None


def engine_rows(seen: Seen) -> tuple[EngineRow, ...]:
    """Every engine pod, by name."""
    return tuple(_row(seen, pod) for pod in sorted(seen.pods or (), key=lambda pod: pod["metadata"]["name"]))


def _row(seen: Seen, pod: Json) -> EngineRow:
    meta = pod["metadata"]
    backing = seen.said.get(meta["name"], {}).get("backing")
    backing = backing if isinstance(backing, Mapping) else {}
    return EngineRow(
        pod=meta["name"],
        node=(pod.get("spec") or {}).get("nodeName") or "",
        revision=(meta.get("labels") or {}).get(label("revision"), ""),
        state=_state(pod),
        backing=_word(backing.get("kind")),
        fallback_code=_word(backing.get("fallbackCode")),
        verified=backing.get("verified") if isinstance(backing.get("verified"), bool) else None,
    )


def _word(stated: Any) -> str:
    """A word of an engine's own: text of a sensible length, or nothing."""
    return stated[:_LONGEST_WORD] if isinstance(stated, str) else ""


def _state(pod: Json) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "Ending"
    if is_ready(pod):
        return "Ready"
    trouble = pod_cause(pod)
    if trouble is None:
        return "Starting"
    return {"Unschedulable": "Unscheduled", "GateWaits": "Held"}.get(trouble.reason, "Failing")


def workload_causes(seen: Seen) -> list[Cause]:
    """Why the Deployment's controller makes no pods: a quota, a policy, a webhook."""
    failure = conditions(seen.workload or {}).get("ReplicaFailure", {})
    if failure.get("status") != "True":
        return []
    return [
        cause("Deployment", seen.name, "ReplicaFailure", str(failure.get("message") or "it cannot make pods"))
    ]


def pod_causes(seen: Seen) -> list[Cause]:
    """Why pods do not serve, alike ones together; those that end are left out."""
    return grouped(
        found
        for pod in seen.pods or ()
        if "deletionTimestamp" not in pod["metadata"] and (found := pod_cause(pod)) is not None
    )


def pod_cause(pod: Json) -> Cause | None:
    """Why one pod does not serve; None when it does, or simply starts."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if is_ready(pod):
        return None
    scheduled = conditions(pod).get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return cause(
            "Pod",
            name,
            "Unschedulable",
            f"no node takes it: {scheduled.get('message') or 'no reason is given'}",
        )
    if status.get("phase") == "Failed" and status.get("reason"):
        return cause("Pod", name, str(status["reason"]), str(status.get("message") or status["reason"]))
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        found = _container(name, container)
        if found is not None:
            return found
    return None


def _container(pod: str, container: Json) -> Cause | None:
    if container.get("ready"):
        return None
    state, gate = container.get("state") or {}, container.get("name") == GATE
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    waiting = state.get("waiting") or {}
    status = ended.get("exitCode", 0)
    who = "gate" if gate else f"container {container.get('name')}"
    if gate and status == GATE_DEADLINE:
        # The gate knows no more than its node; where to look is in this explanation.
        said = _last_line(ended).partition(" — ")[0] or "the entries were not ready in time"
        return cause("Pod", pod, "GateDeadline", f"the gate's deadline passed: {_uncoded(said)}")
    if status:
        return _ended(pod, container, who, ended)
    if gate and "running" in state:
        return following(cause("Pod", pod, "GateWaits", "held: the gate waits for the entries of the node"))
    reason = waiting.get("reason") or ""
    if reason and reason not in ("PodInitializing", "ContainerCreating"):
        return cause(
            "Pod", pod, reason, f"{who} waits: {reason}: {waiting.get('message') or 'no more is said'}"
        )
    return None


def _ended(pod: str, container: Json, who: str, ended: Json) -> Cause:
    """A container that ended in failure: its own last words, with the code that they begin with."""
    status, said = ended.get("exitCode", 0), _last_line(ended)
    tries = container.get("restartCount", 0)
    again = f", {tries} restart{'s' if tries != 1 else ''}" if tries else ""
    if ended.get("reason") == "OOMKilled" or (status == _KILLED and not said):
        return cause(
            "Pod", pod, "OOMKilled", f"{who} was ended for want of memory (exit status {status}{again})"
        )
    code, colon, _ = said.partition(": ")
    reason = code if colon and code.isidentifier() and code[:1].isupper() else "PodsCrashing"
    words = f"{who} ended with status {status}{again}: {said or 'without a word'}"
    if " — " not in said and reason not in REMEDIES:
        words += f" — kubectl logs POD -c {container.get('name')} --previous says more"
    return cause("Pod", pod, reason, words)


def _last_line(ended: Json) -> str:
    lines = str(ended.get("message") or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _uncoded(said: str) -> str:
    """The message without the gate's own code before it."""
    code, colon, rest = said.partition(": ")
    return rest if colon and code.isidentifier() else said
