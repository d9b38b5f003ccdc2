"""Every condition of a DiffusionDeployment: ordered policies over one view, the first that holds decides. Pure.

Reasons are constants of `dlo_api.conditions`; messages are for people. True is never said of a generation that
was not looked at, and an unknown number never counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from dlo_api import conditions as names
from dlo_api.advice import advised

from dlo_operator.reconcile import reports
from dlo_operator.reconcile.capacity import capacity
from dlo_operator.reconcile.engines import engine_available, rolled_out, using_cache
from dlo_operator.reconcile.placement import shortage
from dlo_operator.reconcile.sources import Resolution, complaints
from dlo_operator.reconcile.view import Verdict, View
from dlo_operator.reconcile.warming import cache_ready
from dlo_operator.reconcile.words import counted, of

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
        "MapCountTooLow",
        "RootNotMounted",
        "DeadlineExceeded",
        "StartupTimeout",
        "FellBack",
    }
)


#: States that are as they should be, though a condition is not True.
_GOOD: Final = frozenset({(names.PROGRESSING, "Complete"), (names.STALLED, "NotStalled")})


def judge(view: View) -> dict[str, Verdict]:
    """Every condition's verdict, by type; whatever fails says what a person can do."""
    found = {kind: _advised(policy(view)) for kind, policy in _POLICIES.items()}
    found[names.PROGRESSING] = progressing(view, found)
    found[names.READY] = ready(view, found)
    found[names.STALLED] = stalled(found)
    return {
        kind: found[kind] if (kind, found[kind].reason) in _GOOD else _advised(found[kind])
        for kind in names.DEPLOYMENT_CONDITIONS
    }


def _advised(verdict: Verdict) -> Verdict:
    if verdict.status == "True":
        return verdict
    return replace(verdict, message=advised(verdict.reason, verdict.message))


def accepted(view: View) -> Verdict:
    """Whether the spec can be acted on."""
    return view.refused or Verdict("True", "Accepted", "the spec can be acted on")


def source_resolved(view: View) -> Verdict:
    """Whether the source stands for known bytes."""
    resolution = view.resolution
    if resolution is None:
        return Verdict("Unknown", "NotAccepted", "the source is not read before the spec can be acted on")
    return _pinned(view, resolution) if resolution.pinned else _resolving(view, resolution)


def _pinned(view: View, resolution: Resolution) -> Verdict:
    """Pinned, and yet of no use where too few nodes can read what was pinned."""
    told = complaints(resolution.source.id, view.placed.desired, view.inputs.caches, view.entries)
    going_on = [name for name in view.placed.warming if name not in told]
    if told and len(view.placed.ready) + len(going_on) < view.minimum:
        node = min(told)
        word, message = told[node]
        reason = reports.of_source(word)
        return Verdict(
            "False", reason, f"{', '.join(sorted(told)[:3])}: {reports.spoken(word, reason, message)}"
        )
    pin = resolution.source.pin
    return Verdict("True", "Resolved", f"pinned to {pin.revision or pin.digest[:12]}")


def _resolving(view: View, resolution: Resolution) -> Verdict:
    if view.inputs.secret == "Missing":  # noqa: S105 - a state, not a secret
        words = "the Secret of the source, or its key, is not there — create it"
        return Verdict("False", "SourceUnauthorized", words)
    name = resolution.resolver
    facts, cache = resolution.facts, view.cache(name)
    if cache is None or not cache.alive:
        return Verdict("Unknown", "AgentNotReady", f"no agent answers on {name or 'any node'}")
    if facts is None or facts.reason is None:
        short = shortage(cache, view.needs, ())
        if short is not None:
            return Verdict("Unknown", "AgentNotReady", f"{name} cannot read it yet: {short[0]}: {short[1]}")
        return Verdict("Unknown", "Hashing", f"{name} reads the source")
    if facts.reason == "Hashing":
        return Verdict("Unknown", "Hashing", f"{name} reads the source")
    reason = reports.of_source(facts.reason)
    return Verdict("False", reason, f"{name}: {reports.spoken(facts.reason, reason, facts.message)}")


def progressing(view: View, found: dict[str, Verdict]) -> Verdict:
    """Whether a warm-up or a rollout is moving."""
    spec = view.inputs.spec
    if found[names.ACCEPTED].status != "True":
        return Verdict("False", "Deferred", "waits for a spec that can be acted on")
    if spec is not None and spec.suspend:
        return Verdict("False", "Suspended", "spec.suspend is true")
    return (
        _warming_up(view, found) or _rolling_out(view) or Verdict("False", "Complete", "nothing is under way")
    )


def _warming_up(view: View, found: dict[str, Verdict]) -> Verdict | None:
    workload, cache = view.inputs.workload, found[names.CACHE_READY]
    if view.startable or (workload is not None and workload.revision == view.revision):
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
    return Verdict(
        "True", "RollingOut", f"{of(updated, spec.replicas, 'engine', 'are')} of the newest revision"
    )


def ready(view: View, found: dict[str, Verdict]) -> Verdict:
    """The summary: the first failing reason, copied up."""
    spec = view.inputs.spec
    cause = _first_failing(view, found)
    if cause is not None:
        return replace(cause, status="False")
    replicas = spec.replicas if spec is not None else 0
    words = f"{counted(replicas, 'engine')} of the newest revision" if replicas else "scaled to zero"
    return Verdict("True", "Ready", words)


def _first_failing(view: View, found: dict[str, Verdict]) -> Verdict | None:
    spec = view.inputs.spec
    if found[names.ACCEPTED].status != "True":
        return found[names.ACCEPTED]
    if spec is not None and spec.suspend:
        return Verdict("False", "Suspended", "spec.suspend is true")
    causes: list[Verdict] = []
    # Other policies than `Required` go on without the cache: it is told, and an engine that serves is ready.
    if spec is None or spec.cache.policy == "Required" or not _served(view, found):
        if found[names.CACHE_READY].status != "True":
            kinds = (names.SOURCE_RESOLVED, names.CAPACITY_SUFFICIENT, names.CACHE_READY)
            causes += [found[kind] for kind in kinds if found[kind].status != "True"]
            # What is known to fail comes before what is not known, which may only follow from it.
            causes.sort(key=lambda cause: cause.status == "Unknown")
        causes += [found[names.USING_CACHE]] if found[names.USING_CACHE].status == "False" else []
    causes += [found[names.ENGINE_AVAILABLE]] if found[names.ENGINE_AVAILABLE].status == "False" else []
    causes += [] if rolled_out(view) else [found[names.PROGRESSING]]
    return causes[0] if causes else None


def _served(view: View, found: dict[str, Verdict]) -> bool:
    """Whether engines of the wanted revision serve."""
    workload = view.inputs.workload
    current = workload is not None and workload.revision == view.revision
    return current and found[names.ENGINE_AVAILABLE].status == "True"


def stalled(found: dict[str, Verdict]) -> Verdict:
    """Whether only a change by a person helps."""
    summary = found[names.READY]
    # What cannot be told yet is no refusal.
    if found[names.ACCEPTED].status == "Unknown":
        return Verdict("False", "NotStalled", "")
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
