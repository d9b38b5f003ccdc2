"""Condition `CapacitySufficient`: whether enough nodes can hold the entries, and what the others lack. Pure."""

from __future__ import annotations

from dlo_api.eligibility import gpus, refusals

from dlo_operator.reconcile.placement import shortage
from dlo_operator.reconcile.view import Verdict, View
from dlo_operator.reconcile.words import of_eligible

_SHOWN = 3


def capacity(view: View) -> Verdict:
    """Whether enough nodes can store the entries."""
    if view.inputs.spec is None:
        return Verdict("Unknown", "NotAccepted", "no node is looked for before the spec can be read")
    if len(view.eligible) < view.minimum:
        return Verdict("False", "NoEligibleNodes", _too_few(view))
    short: dict[str, tuple[str, str]] = {}
    enough = 0
    for node in view.eligible:
        cache = view.cache(node.name)
        problem = shortage(cache, view.needs, view.entries) if cache is not None else None
        if problem is not None:
            short[node.name] = problem
            continue
        enough += 1
        # Without counts: in a large fleet every node that joins would change the words of every deployment.
        if enough >= view.minimum:
            return Verdict("True", "Sufficient", "enough nodes can hold the entries")
    name = min(short)
    reason, words = short[name]
    return Verdict("False", reason, f"too few nodes can hold the entries; {name}: {words}")


def _too_few(view: View) -> str:
    """Why nodes are not eligible: the rules that keep pods off, each once, by the fields that decide."""
    spec, nodes = view.inputs.spec, view.inputs.nodes
    if spec is None or not nodes:
        return "the cluster has no nodes — add nodes"
    eligible = of_eligible(len(view.eligible))
    some = f"minReadyNodes is {view.minimum} and {eligible}; of the others: "
    found: dict[tuple[str, str], str] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        if node.deleting:
            found.setdefault(("metadata.deletionTimestamp", ""), f"{node.name} is being deleted")
            continue
        against = tuple(refusals(spec.placement, node))
        for refusal in against:
            words = f"{node.name}: {refusal.message} — {refusal.hint} ({refusal.field_path})"
            found.setdefault((refusal.field_path, refusal.hint), words)
        if not against and spec.engine.device == "Cuda" and node not in view.eligible:
            resource = spec.placement.gpu_resource
            words = f"{node.name}: it offers {gpus(spec, node)} of resource {resource}"
            hint = f"install the device plugin that offers {resource}, or set placement.gpuResource"
            found.setdefault(("spec.placement.gpuResource", ""), f"{words} — {hint}")
    shown = "; ".join(list(found.values())[:_SHOWN])
    if not shown:
        return f"minReadyNodes is {view.minimum} and {eligible} — lower it, or add nodes"
    return f"{some if view.eligible else 'no node is eligible: '}{shown}"
