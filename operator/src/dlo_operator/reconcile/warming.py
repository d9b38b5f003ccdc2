"""Condition `CacheReady`: whether enough nodes hold the entries, and what holds them up. Pure."""

from __future__ import annotations

from datetime import datetime

from dlo_api import conditions as names

from dlo_operator.reconcile import reports
from dlo_operator.reconcile.entries import reported
from dlo_operator.reconcile.view import Verdict, View
from dlo_operator.reconcile.words import of, of_eligible


def cache_ready(view: View) -> Verdict:
    """Whether enough nodes hold every entry of the wanted revision."""
    placed, spec = view.placed, view.inputs.spec
    if view.warm:
        words = _progress(view)
        if spec is not None and spec.cache.policy == "Disabled":
            return Verdict("True", "CacheDisabled", f"cache.policy is Disabled; {words}")
        return Verdict("True", "Warm", words)
    if view.refused is not None and not view.entries:
        return Verdict("Unknown", "NotAccepted", "no entry is looked for before the spec can be acted on")
    if not placed.desired or not view.entries:
        return Verdict("False", "Warming", "waits until the source is resolved and a node is chosen")
    return (
        _unheard(view)
        or given_up(view)
        or Verdict("False", "Warming", _short_of_nodes(view) + _progress(view))
    )


def _unheard(view: View) -> Verdict | None:
    """Nodes of which nothing is known, when they are too many."""
    desired = view.placed.desired
    lost = [name for name in desired if (cache := view.cache(name)) is not None and cache.late]
    if lost and len(desired) - len(lost) < view.minimum:
        return Verdict("Unknown", "NodeLost", f"no heartbeat from {', '.join(lost[:3])}")
    silent = [name for name in desired if (cache := view.cache(name)) is None or not cache.alive]
    if len(desired) - len(silent) < view.minimum and silent:
        return Verdict("False", "AgentNotReady", f"no agent has reported from {', '.join(silent[:3])}")
    return None


def _short_of_nodes(view: View) -> str:
    """That more nodes are asked for than pods may run on; empty when there are enough."""
    if len(view.placed.desired) >= view.minimum:
        return ""
    return f"prewarm.minReadyNodes is {view.minimum} and {of_eligible(len(view.eligible))}: "


def given_up(view: View) -> Verdict | None:
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
    """The first that a node says of an entry that failed."""
    for name in view.placed.failed:
        cache = view.cache(name)
        states = reported(cache, (entry.id for entry in view.entries)) if cache is not None else {}
        for state in states.values():
            if state.phase not in ("Failed", "Quarantined"):
                continue
            word = state.reason or ("IntegrityFailed" if state.phase == "Quarantined" else "BuildFailed")
            reason = "IntegrityFailed" if state.phase == "Quarantined" else reports.of_entry(word)
            return Verdict("False", reason, f"{name}: {reports.spoken(word, reason, state.message)}")
    return None


def _progress(view: View) -> str:
    """How far, in numbers that status carries anyway: bytes and entries move too often for a message."""
    return f"{of(len(view.placed.ready), len(view.placed.desired), 'node', 'hold')} every entry"


def warm_deadline(view: View) -> float | None:
    """Seconds until the warm-up counts as stuck, from its last sign of progress; None when none is going on."""
    spec = view.inputs.spec
    since = condition_since(view, names.CACHE_READY)
    if spec is None or view.warm or not view.entries or since is None:
        return None
    told = [
        cache.reported
        for name in view.placed.warming
        if (cache := view.cache(name)) is not None and cache.reported is not None
    ]
    latest = max([since, *told, *_begun(view)])
    return spec.cache.prewarm.progress_deadline_seconds - (view.inputs.now - latest).total_seconds()


def _begun(view: View) -> list[datetime]:
    """When the warm-up under way began, where the cache was not ready before that either: with a changed spec.

    The first look at a changed spec finds it; from then on condition Progressing tells, which is True since.
    """
    for condition in view.inputs.status.get("conditions", ()):
        if condition.get("type") != names.PROGRESSING:
            continue
        if condition.get("observedGeneration") != view.inputs.generation:
            return [view.inputs.now]
        if condition.get("status") == "True":
            return [datetime.fromisoformat(condition["lastTransitionTime"])]
    return []


def condition_since(view: View, kind: str) -> datetime | None:
    """When a condition last changed, if it was not True."""
    for condition in view.inputs.status.get("conditions", ()):
        if condition.get("type") == kind and condition.get("status") != "True":
            return datetime.fromisoformat(condition["lastTransitionTime"])
    return None
