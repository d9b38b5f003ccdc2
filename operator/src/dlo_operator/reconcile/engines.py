"""What the engine pods show: whether they serve, are of the newest revision, and use what was asked for. Pure."""

from __future__ import annotations

from typing import Final

from dlo_operator.reconcile.inputs import PodFacts
from dlo_operator.reconcile.revision import NO_REVISION
from dlo_operator.reconcile.view import Verdict, View
from dlo_operator.reconcile.words import counted, of

#: Backings that are fallbacks where host registration is `Auto` or `Off`.
_FALLBACKS: Final = frozenset({"MappedCheckpoint", "PrivateLoad"})
#: Codes with which an engine ends, or a gate refuses, because it did not get what was asked for.
_FALLBACK_CODES: Final = frozenset({"FallbackRefused", "NoLayoutEntry"})
_UNREPORTED: Final = frozenset({"", "Unreported"})


def rolled_out(view: View) -> bool:
    """Whether the newest revision reached all engines, and its Deployment has seen the newest spec."""
    spec, workload = view.inputs.spec, view.inputs.workload
    if spec is None or workload is None or workload.revision != view.revision or not workload.settled:
        return False
    if workload.replicas != spec.replicas or workload.updated < spec.replicas:
        return False
    if spec.replicas == 0:
        return workload.existing == 0
    return workload.rolled_out and workload.existing == workload.updated


def engine_available(view: View) -> Verdict:
    """Whether enough engines serve."""
    return _unasked(view) or _serving(view) or _failing(view) or _pending(view)


def _unasked(view: View) -> Verdict | None:
    spec = view.inputs.spec
    if spec is None:
        return Verdict("Unknown", "PodsPending", "the spec cannot be read")
    if spec.suspend:
        return Verdict("False", "Suspended", "spec.suspend is true")
    return Verdict("True", "ScaledToZero", "no engine was asked for") if spec.replicas == 0 else None


def _serving(view: View) -> Verdict | None:
    spec, workload = view.inputs.spec, view.inputs.workload
    if spec is None or workload is None:
        return None
    enough = max(1, spec.replicas - spec.rollout.max_unavailable)
    if workload.ready < enough:
        return None
    return Verdict("True", "Available", of(workload.ready, spec.replicas, "engine", "serve"))


def _failing(view: View) -> Verdict | None:
    for pod in view.inputs.pods:
        if pod.trouble is not None and pod.trouble.restarts:
            return Verdict("False", "PodsCrashing", f"{pod.name}: {pod.trouble.message}")
    workload = view.inputs.workload
    if workload is not None and workload.deadline_exceeded and workload.revision != NO_REVISION:
        return Verdict(
            "False", "StartupTimeout", "no engine became ready within rollout.progressDeadlineSeconds"
        )
    return None


def _pending(view: View) -> Verdict:
    workload = view.inputs.workload
    if workload is None:
        return Verdict(
            "False", "PodsPending", "engines start once the cache is ready — see condition CacheReady"
        )
    for pod in view.inputs.pods:
        if pod.trouble is not None:
            return Verdict("False", "PodsPending", f"{pod.name}: {pod.trouble.message}")
    return Verdict("False", "PodsPending", of(workload.ready, workload.replicas, "engine", "serve"))


def using_cache(view: View) -> Verdict:
    """Whether engines report the backing that was asked for; silence is Unknown and blocks nothing."""
    spec = view.inputs.spec
    if spec is not None and spec.cache.policy == "Disabled":
        return Verdict("True", "CacheDisabled", "cache.policy is Disabled")
    for pod in view.new_pods:
        if pod.trouble is not None and pod.trouble.code in _FALLBACK_CODES:
            return Verdict("False", "FellBack", f"{pod.name}: {pod.trouble.message}")
    reports = [(pod, pod.report) for pod in view.new_pods if pod.report is not None]
    for pod, report in reports:
        if fell_back(view, report.backing):
            code = f" [{report.fallback_code}]" if report.fallback_code else ""
            return Verdict("False", "FellBack", f"{pod.name} runs on {report.backing}{code}")
    told = [report for _, report in reports if report.backing not in _UNREPORTED]
    if not told:
        return Verdict("Unknown", "Unreported", "no engine has said yet what it runs on")
    runs = "runs" if len(told) == 1 else "run"
    return Verdict("True", "AsAsked", f"{counted(len(told), 'engine')} {runs} on {told[0].backing}")


def fell_back(view: View, backing: str) -> bool:
    """Whether a backing is less than what was asked for."""
    spec = view.inputs.spec
    if spec is None or backing in _UNREPORTED:
        return False
    if spec.offload.mode == "None":
        return backing != "Resident"
    if spec.cache.policy == "Disabled":
        return False
    if spec.offload.host_registration.policy == "Required":
        return backing != "RegisteredCache"
    return backing in _FALLBACKS


def worst_report(pods: tuple[PodFacts, ...]) -> PodFacts | None:
    """The pod whose report the status shows: one with a fallback code before any other."""
    told = sorted((not pod.report.fallback_code, pod.name) for pod in pods if pod.report is not None)
    return next((pod for pod in pods if told and pod.name == told[0][1]), None)
