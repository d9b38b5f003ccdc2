"""The status of a DiffusionDeployment, from one view. Pure.

An unchanged world gives an equal status, so that nothing is written; transition times move with the status of
their condition alone. What is not known is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from dlo_api import conditions as names
from dlo_api.advice import advised
from dlo_api.conditions import Condition
from dlo_api.quantity import format_quantity
from dlo_api.topology import coordinate, world_size
from dlo_api.v1alpha1.deployment_status import (
    CacheStatus,
    DiffusionDeploymentStatus,
    EntryStatus,
    NodeCounts,
    OffloadStatus,
    PlanStatus,
    ProblemStatus,
    RevisionStatus,
)

from dlo_operator.reconcile.engines import worst_report
from dlo_operator.reconcile.entries import reported
from dlo_operator.reconcile.memory import pod_memory
from dlo_operator.reconcile.placement import shortage
from dlo_operator.reconcile.pod import private_bytes
from dlo_operator.reconcile.readiness import judge
from dlo_operator.reconcile.sources import complaints
from dlo_operator.reconcile.view import Verdict, View
from dlo_operator.reconcile.workload import selector

_PROBLEMS: Final = 10
_MESSAGE: Final = 256
_CONDITION_MESSAGE: Final = 1024


def stamp(moment: datetime) -> str:
    """A time as the API writes it: RFC 3339, UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status_of(view: View) -> dict[str, Any]:
    """The whole status as JSON values."""
    inputs, spec, workload = view.inputs, view.inputs.spec, view.inputs.workload
    verdicts = judge(view)
    status = DiffusionDeploymentStatus(
        observed_generation=inputs.generation,
        phase=_phase(verdicts),
        revision=_revision(view),
        replicas=workload.existing if workload is not None else 0,
        updated_replicas=(workload.updated if workload.revision == view.revision else 0)
        if workload is not None
        else 0,
        ready_replicas=workload.ready if workload is not None else 0,
        selector=",".join(f"{key}={value}" for key, value in sorted(selector(inputs.name).items())),
        cache=_cache(view) if spec is not None else None,
        offload=_offload(view),
        plan=_plan(view),
        problems=_problems(view),
        conditions=_conditions(verdicts, inputs.status.get("conditions", ()), inputs.now, inputs.generation),
    )
    return status.to_json()


def _conditions(
    verdicts: Mapping[str, Verdict], before: Iterable[Mapping[str, Any]], now: datetime, generation: int
) -> tuple[Condition, ...]:
    known = {condition.get("type"): condition for condition in before}
    made: list[Condition] = []
    for kind, verdict in verdicts.items():
        old = known.get(kind)
        same = old is not None and old.get("status") == verdict.status
        made.append(
            Condition(
                type=kind,
                status=verdict.status,
                reason=verdict.reason,
                message=verdict.message[:_CONDITION_MESSAGE],
                last_transition_time=str(old["lastTransitionTime"])
                if old is not None and same
                else stamp(now),
                observed_generation=generation,
            )
        )
    return tuple(made)


def _phase(verdicts: Mapping[str, Verdict]) -> str:
    if verdicts[names.STALLED].status == "True":
        return "Stalled"
    if verdicts[names.READY].status == "True":
        return "Ready"
    progressing = verdicts[names.PROGRESSING]
    return progressing.reason if progressing.status == "True" else verdicts[names.READY].reason


def _revision(view: View) -> RevisionStatus:
    pin = view.resolution.source.pin.digest if view.resolution is not None else ""
    return RevisionStatus(current=view.current, updating=view.updating, source_digest=pin or None)


def _cache(view: View) -> CacheStatus:
    placed, record = view.placed, view.record
    wanted = {entry.id: entry for entry in record.wanted} if record is not None else {}
    entries = []
    for entry in view.entries:
        known = wanted.get(entry.id)
        entries.append(
            EntryStatus(
                kind=entry.kind,
                component=entry.component,
                coordinate=coordinate(entry.tensor_rank, entry.tensor_size)
                if entry.kind == "Layout"
                else None,
                input_key=known.input_key if known is not None else None,
                content_digest=(known.content_digest or None) if known is not None else None,
                bytes=known.bytes if known is not None else None,
            )
        )
    shared = record.entry_bytes if record is not None else None
    return CacheStatus(
        entries=tuple(entries),
        nodes=NodeCounts(
            desired=len(placed.desired),
            ready=len(placed.ready),
            warming=len(placed.warming),
            failed=len(placed.failed),
        )
        if view.entries
        else None,
        summary=f"{len(placed.ready)}/{len(placed.desired)}" if view.entries else None,
        bytes_per_node=shared,
        saved_bytes_per_node=_saved(view),
    )


def _saved(view: View) -> int | None:
    """Bytes that private copies of the layouts would take beyond the shared one, on the fullest node."""
    spec, record = view.inputs.spec, view.record
    if spec is None or record is None:
        return None
    layouts = sum(entry.bytes for entry in record.wanted if entry.kind == "Layout")
    on_node: dict[str, int] = {}
    for pod in view.new_pods:
        if pod.node and pod.ready:
            on_node[pod.node] = on_node.get(pod.node, 0) + 1
    if not on_node:
        return None
    # Ranks of one coordinate share: each engine has world / tensor of them.
    copies = max(on_node.values()) * (world_size(spec.parallelism) // spec.parallelism.tensor)
    return layouts * (copies - 1)


def _offload(view: View) -> OffloadStatus | None:
    pod = worst_report(view.new_pods)
    if pod is None or pod.report is None:
        return None
    report = pod.report
    return OffloadStatus(
        mode=report.mode or None,
        transfer=report.transfer or None,
        backing=report.backing,  # type: ignore[arg-type]  # checked when the report was read
        fallback_code=report.fallback_code or None,
    )


def _plan(view: View) -> PlanStatus | None:
    spec, record = view.inputs.spec, view.record
    if spec is None or view.refused is not None:
        return None
    gpus = 0 if spec.engine.device == "Cpu" else world_size(spec.parallelism)
    if record is None:
        return PlanStatus(gpus_per_pod=gpus)
    memory = pod_memory(spec, record.sizes)
    return PlanStatus(
        gpus_per_pod=gpus,
        disk_per_node=format_quantity(record.entry_bytes),
        host_memory_per_node=format_quantity(
            record.entry_bytes + private_bytes(spec, record) + memory.shared
        ),
        locked_memory_per_node=format_quantity(memory.locked),
    )


def _problems(view: View) -> tuple[ProblemStatus, ...]:
    """The first problems, node by node; those of entries under the agent's own word."""
    found: list[ProblemStatus] = []
    for name in view.placed.desired:
        found += _of_node(view, name)
    return tuple(found[:_PROBLEMS])


def _of_node(view: View, name: str) -> list[ProblemStatus]:
    cache = view.cache(name)
    if cache is None or cache.status is None:
        return [_problem(name, None, "AgentNotReady", "no agent has reported from this node")]
    if cache.late:
        return [_problem(name, None, "NodeLost", "its heartbeat stopped")]
    found: list[ProblemStatus] = []
    if view.resolution is not None:
        told = complaints(view.resolution.source.id, (name,), view.inputs.caches, ())
        found += [_problem(name, None, *told[name])] if told else []
    short = shortage(cache, view.needs, view.entries)
    if short is not None:
        found.append(_problem(name, None, *short))
    states = reported(cache, (entry.id for entry in view.entries))
    for state in states.values():
        if state.reason is not None and (state.phase in ("Failed", "Quarantined") or state.phase == "Ready"):
            found.append(_problem(name, state.input_key or state.id, state.reason, state.message or ""))
    return found


def _problem(node: str, entry: str | None, reason: str, message: str) -> ProblemStatus:
    return ProblemStatus(node=node, entry=entry, reason=reason, message=_short(advised(reason, message)))


def _short(words: str) -> str:
    return words if len(words) <= _MESSAGE else f"{words[: _MESSAGE - 1]}…"
