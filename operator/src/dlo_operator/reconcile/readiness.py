"""Every condition of a DiffusionDeployment: ordered policies over one view, the first that holds decides. Pure.

Reasons are constants of `dlo_api.conditions`; messages are for people. True is never said of a generation that
was not looked at, and an unknown number never counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final, Literal

from dlo_api import conditions as names

from dlo_operator.reconcile.engines import engine_available, rolled_out, using_cache
from dlo_operator.reconcile.entries import reported
from dlo_operator.reconcile.inputs import CacheFacts
from dlo_operator.reconcile.placement import shortage
from dlo_operator.reconcile.sources import Resolution, mismatched
from dlo_operator.reconcile.view import Verdict, View

#: Failing reasons that only a person can end.
STALLING: Final = frozenset(
    {
        *names.REASONS[names.ACCEPTED][1:],
        "SourceUnauthorized",
        "SourceNotFound",
        "SourceUntrusted",
        "SourceAmbiguous",
        "SourceInvalid",
        "SourceIncomplete",
        "SourceMismatch",
        "InsufficientDisk",
        "InsufficientHostMemory",
        "LockedMemoryTooLow",
        "MapCountTooLow",
        "HostRegistrationUnsupported",
        "RootNotMounted",
        "DeadlineExceeded",
        "StartupTimeout",
        "FellBack",
    }
)
_INTEGRITY: Final = frozenset({"IntegrityFailed", "Corrupt"})
_FULL: Final = frozenset({"DiskFull", "InsufficientDisk", "InodesExhausted"})


def judge(view: View) -> dict[str, Verdict]:
    """Every condition's verdict, by type."""
    found = {kind: policy(view) for kind, policy in _POLICIES.items()}
    found[names.PROGRESSING] = progressing(view, found)
    found[names.READY] = ready(view, found)
    found[names.STALLED] = stalled(found)
    return {kind: found[kind] for kind in names.DEPLOYMENT_CONDITIONS}


def accepted(view: View) -> Verdict:
    """Whether the spec can be acted on."""
    return view.refused or Verdict("True", "Accepted", "the spec can be acted on")


def source_resolved(view: View) -> Verdict:
    """Whether the source stands for known bytes."""
    resolution = view.resolution
    if resolution is None:
        return Verdict("Unknown", "AgentNotReady", "waits for an accepted spec and a node")
    return _pinned(view, resolution) if resolution.pinned else _resolving(view, resolution)


def _pinned(view: View, resolution: Resolution) -> Verdict:
    odd = mismatched(resolution.source.id, view.placed.desired, view.inputs.caches)
    if odd and not view.warm:
        return Verdict(
            "False",
            "SourceMismatch",
            f"{', '.join(odd[:3])}: the source has other bytes there than were pinned — give every node the"
            " same, or name another source",
        )
    pin = resolution.source.pin
    return Verdict("True", "Resolved", f"pinned to {pin.revision or pin.digest[:12]}")


def _resolving(view: View, resolution: Resolution) -> Verdict:
    if view.inputs.secret == "Missing":  # noqa: S105 - a state, not a secret
        return Verdict(
            "False", "SourceUnauthorized", "the Secret of the source, or its key, is not there — create it"
        )
    facts, cache = resolution.facts, view.cache(resolution.resolver)
    if cache is None or not cache.alive:
        return Verdict("Unknown", "AgentNotReady", f"no agent answers on {resolution.resolver or 'any node'}")
    if facts is None or facts.reason in (None, "Hashing"):
        return Verdict("Unknown", "Hashing", f"{resolution.resolver} reads the source")
    reason = facts.reason if facts.reason in names.REASONS[names.SOURCE_RESOLVED] else "SourceInvalid"
    return Verdict("False", reason, f"{resolution.resolver}: {facts.message or facts.reason}")


def capacity(view: View) -> Verdict:
    """Whether enough nodes can store the entries."""
    if not view.eligible:
        return Verdict(
            "False",
            "NoEligibleNodes",
            f"{len(view.inputs.nodes)} nodes, none of which selector, tolerations and GPUs admit — change"
            " spec.placement, or add nodes",
        )
    short: dict[str, tuple[str, str]] = {}
    for node in view.eligible:
        cache = view.cache(node.name)
        problem = _cannot(view, cache) if cache is not None else None
        if problem is not None:
            short[node.name] = problem
    if len(view.eligible) - len(short) >= view.minimum or not short:
        enough = len(view.eligible) >= view.minimum
        if enough:
            return Verdict(
                "True", "Sufficient", f"{len(view.eligible) - len(short)} nodes can hold the entries"
            )
        return Verdict(
            "False",
            "NoEligibleNodes",
            f"{len(view.eligible)} nodes are eligible, minReadyNodes is {view.minimum} — lower it, or add nodes",
        )
    name = min(short)
    reason, words = short[name]
    return Verdict("False", reason, f"{len(short)} of {len(view.eligible)} nodes; {name}: {words or reason}")


def _cannot(view: View, cache: CacheFacts) -> tuple[str, str] | None:
    spec, memory = view.inputs.spec, cache.status.memory if cache.status is not None else None
    if (
        spec is not None
        and spec.engine.device == "Cuda"
        and spec.offload.host_registration.policy == "Required"
    ):
        limit = memory.lock_limit_bytes if memory is not None else None
        if limit is not None and view.needed_bytes is not None and limit < view.needed_bytes:
            return (
                "LockedMemoryTooLow",
                f"{limit} bytes may be locked, {view.needed_bytes} would be registered",
            )
    return shortage(cache, view.needed_bytes, view.entries)


def cache_ready(view: View) -> Verdict:
    """Whether enough nodes hold every entry of the wanted revision."""
    placed = view.placed
    if view.warm:
        return Verdict("True", "Warm", f"{len(placed.ready)} of {len(placed.desired)} nodes hold every entry")
    if not placed.desired or not view.entries:
        status: Literal["Unknown", "False"] = "Unknown" if view.refused else "False"
        return Verdict(status, "Warming", "waits until the source is resolved and a node is chosen")
    return _unheard(view) or _given_up(view) or Verdict("False", "Warming", _progress(view))


def _unheard(view: View) -> Verdict | None:
    """Nodes of which nothing is known, when they are too many."""
    desired = view.placed.desired
    lost = [name for name in desired if (cache := view.cache(name)) is not None and cache.late]
    if lost and len(desired) - len(lost) < view.minimum:
        return Verdict("Unknown", "NodeLost", f"no heartbeat from {', '.join(lost[:3])}")
    silent = [name for name in desired if (cache := view.cache(name)) is None or not cache.alive]
    if len(desired) - len(silent) < view.minimum:
        return Verdict("False", "AgentNotReady", f"no agent has reported from {', '.join(silent[:3])}")
    return None


def _given_up(view: View) -> Verdict | None:
    """Failed builds, when too few others go on; or no progress for too long."""
    placed = view.placed
    stopped = _stopped(view)
    if stopped is not None and len(placed.ready) + len(placed.warming) < view.minimum:
        return stopped
    deadline = warm_deadline(view)
    if deadline is not None and deadline <= 0:
        words = f"no progress for prewarm.progressDeadlineSeconds: {_progress(view)}"
        return Verdict("False", "DeadlineExceeded", words)
    return None


def _stopped(view: View) -> Verdict | None:
    """The worst that a node says of an entry."""
    for name in view.placed.failed:
        cache = view.cache(name)
        states = reported(cache, (entry.id for entry in view.entries)) if cache is not None else {}
        for state in states.values():
            if state.phase not in ("Failed", "Quarantined"):
                continue
            words = f"{name}: {state.message or state.reason or state.phase}"
            if state.phase == "Quarantined" or state.reason in _INTEGRITY:
                return Verdict("False", "IntegrityFailed", words)
            if state.reason in _FULL:
                return Verdict("False", "DiskFull", words)
            return Verdict("False", "BuildFailed", words)
    return None


def _progress(view: View) -> str:
    done = 0
    for name in view.placed.warming:
        cache = view.cache(name)
        states = reported(cache, (entry.id for entry in view.entries)) if cache is not None else {}
        done += sum(1 for state in states.values() if state.phase == "Ready")
    total = len(view.entries) * len(view.placed.warming)
    nodes = f"{len(view.placed.ready)} of {len(view.placed.desired)} nodes warm"
    return f"{nodes}, {done} of {total} entries built on the others"


def warm_deadline(view: View) -> float | None:
    """Seconds until the warm-up counts as stuck, from its last sign of progress; None when none is going on."""
    spec = view.inputs.spec
    since = condition_since(view, names.CACHE_READY)
    if spec is None or view.warm or not view.entries or since is None:
        return None
    reports = [
        cache.reported
        for name in view.placed.warming
        if (cache := view.cache(name)) is not None and cache.reported is not None
    ]
    latest = max([since, *reports])
    return spec.cache.prewarm.progress_deadline_seconds - (view.inputs.now - latest).total_seconds()


def condition_since(view: View, kind: str) -> datetime | None:
    """When a condition last changed, if it was not True."""
    for condition in view.inputs.status.get("conditions", ()):
        if condition.get("type") == kind and condition.get("status") != "True":
            return datetime.fromisoformat(condition["lastTransitionTime"])
    return None


def progressing(view: View, found: dict[str, Verdict]) -> Verdict:
    """Whether a warm-up or a rollout is moving."""
    spec = view.inputs.spec
    if found[names.ACCEPTED].status == "False":
        return Verdict("False", "Deferred", "waits for a spec that can be acted on")
    if spec is not None and spec.suspend:
        return Verdict("False", "Suspended", "spec.suspend is true")
    return (
        _warming_up(view, found) or _rolling_out(view) or Verdict("False", "Complete", "nothing is under way")
    )


def _warming_up(view: View, found: dict[str, Verdict]) -> Verdict | None:
    workload, cache = view.inputs.workload, found[names.CACHE_READY]
    if cache.status == "True" or (workload is not None and workload.revision == view.revision):
        return None
    if cache.reason == "DeadlineExceeded":
        return Verdict("False", "DeadlineExceeded", cache.message)
    for kind in (names.SOURCE_RESOLVED, names.CAPACITY_SUFFICIENT):
        if found[kind].status == "False":
            return Verdict("False", "Deferred", found[kind].message)
    return Verdict("True", "Warming", cache.message)


def _rolling_out(view: View) -> Verdict | None:
    spec, workload = view.inputs.spec, view.inputs.workload
    if spec is None or rolled_out(view):
        return None
    if workload is not None and workload.deadline_exceeded:
        words = "the rollout made no progress for rollout.progressDeadlineSeconds"
        return Verdict("False", "DeadlineExceeded", words)
    updated = workload.updated if workload is not None and workload.revision == view.revision else 0
    return Verdict("True", "RollingOut", f"{updated} of {spec.replicas} engines are of the newest revision")


def ready(view: View, found: dict[str, Verdict]) -> Verdict:
    """The summary: the first failing reason, copied up."""
    spec = view.inputs.spec
    accepted_first = found[names.ACCEPTED]
    if accepted_first.status != "True":
        return Verdict("False", accepted_first.reason, accepted_first.message)
    if spec is not None and spec.suspend:
        return Verdict("False", "Suspended", "spec.suspend is true — set it to false to serve again")
    if found[names.CACHE_READY].status != "True":
        causes = [found[k] for k in (names.SOURCE_RESOLVED, names.CAPACITY_SUFFICIENT, names.CACHE_READY)]
        # What is known to fail comes before what is not known, which may only follow from it.
        for cause in sorted((c for c in causes if c.status != "True"), key=lambda c: c.status == "Unknown"):
            return Verdict("False", cause.reason, cause.message)
    for kind in (names.USING_CACHE, names.ENGINE_AVAILABLE):
        if found[kind].status == "False":
            return Verdict("False", found[kind].reason, found[kind].message)
    if not rolled_out(view):
        return Verdict("False", found[names.PROGRESSING].reason, found[names.PROGRESSING].message)
    replicas = spec.replicas if spec is not None else 0
    return Verdict(
        "True", "Ready", f"{replicas} engines of the newest revision" if replicas else "scaled to zero"
    )


def stalled(found: dict[str, Verdict]) -> Verdict:
    """Whether only a change by a person helps."""
    summary = found[names.READY]
    if summary.status != "True" and summary.reason in STALLING:
        return Verdict("True", summary.reason, summary.message)
    late = found[names.PROGRESSING]
    if summary.status != "True" and late.reason == "DeadlineExceeded":
        return Verdict("True", late.reason, late.message)
    return Verdict("False", "NotStalled", "")


_POLICIES: Final[dict[str, Callable[[View], Verdict]]] = {
    names.ACCEPTED: accepted,
    names.SOURCE_RESOLVED: source_resolved,
    names.CAPACITY_SUFFICIENT: capacity,
    names.CACHE_READY: cache_ready,
    names.ENGINE_AVAILABLE: engine_available,
    names.USING_CACHE: using_cache,
}
