"""Inputs to intent: the children to apply, what each node shall hold for this deployment, the status. Pure.

*Prewarm, then roll*: the child Deployment gets a revision's template only once enough nodes hold its entries;
the entries of a revision that still has pods, or that the Deployment still carries, stay claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.v1alpha1.node_weight_cache import SourceStatus

from dlo_operator.reconcile import workload as children
from dlo_operator.reconcile.acceptance import refused, refused_in_view
from dlo_operator.reconcile.entries import entries_for, id_of_source, reported, wanted_entries
from dlo_operator.reconcile.inputs import DeploymentInputs, Object
from dlo_operator.reconcile.placement import choose
from dlo_operator.reconcile.readiness import warm_deadline
from dlo_operator.reconcile.record import Claim, ModelSizes, Record, merge_claims
from dlo_operator.reconcile.revision import revision_of, serving_revision
from dlo_operator.reconcile.scheduling import engines_that_fit, matching
from dlo_operator.reconcile.sources import Resolution, resolve
from dlo_operator.reconcile.status import status_of
from dlo_operator.reconcile.view import View

#: Refusals of the pod template: the entries are good, and stay for the corrected one.
_BUILT: Final = frozenset({"PodTemplateInvalid", "PodSecurityDenied"})


@dataclass(frozen=True)
class NodeClaim:
    """What a deployment needs on one node.

    Attributes:
        claim: sources and entries.
        labels: keys of the labels that say the node is warm.
    """

    claim: Claim = field(default_factory=Claim)
    labels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Desired:
    """The intent for one DiffusionDeployment.

    Attributes:
        children: objects to apply, in order.
        drop_budget: whether its PodDisruptionBudget has to go.
        claims: by node name.
        status: as it should stand.
        recheck_seconds: when time alone changes the answer; None when it does not.
    """

    children: tuple[Object, ...]
    drop_budget: bool
    claims: Mapping[str, NodeClaim]
    status: dict[str, Any]
    recheck_seconds: float | None = None


def plan(inputs: DeploymentInputs) -> Desired:
    """What there should be."""
    view = survey(inputs)
    made = _children(view)
    deadline = warm_deadline(view)
    return Desired(
        children=made,
        drop_budget=inputs.has_budget
        and inputs.spec is not None
        and view.refused is None
        and not children.budget_wanted(inputs.spec),
        claims=_claims(view),
        status=status_of(view),
        recheck_seconds=deadline if deadline is not None and deadline > 0 else None,
    )


def survey(inputs: DeploymentInputs) -> View:
    """Everything worked out once."""
    view = View(inputs, refused=refused(inputs))
    spec, workload = inputs.spec, inputs.workload
    current, _ = serving_revision(None, None, workload, inputs.pods)
    if spec is None or view.refused is not None:
        return replace(view, current=current)
    matched = matching(spec, inputs.nodes)
    eligible = tuple(node for node in matched if engines_that_fit(spec, node) > 0)
    identity = id_of_source(spec, inputs.namespace)
    entries = entries_for(spec, identity)
    bound = frozenset(pod.node for pod in inputs.pods if pod.node and not pod.finished)
    view = replace(view, matching=matched, eligible=eligible)
    first = choose(spec, inputs.uid, eligible, inputs.caches, entries, bound=bound)
    resolution = resolve(
        spec,
        identity,
        first.desired,
        inputs.caches,
        _records(inputs),
        secret_name=f"dlo-source-{identity}" if inputs.secret == "Copied" else "",  # noqa: S105
    )
    view = replace(view, resolution=resolution)
    if not resolution.pinned:
        view = replace(
            view, placed=replace(first, claimed=(), ready=(), warming=(), failed=()), current=current
        )
        return replace(view, refused=refused_in_view(view))
    needed = _needed_bytes(inputs, resolution)
    placed = choose(spec, inputs.uid, eligible, inputs.caches, entries, bound=bound, needed_bytes=needed)
    revision = revision_of(
        spec, resolution.source.pin.digest, (entry.id for entry in entries), inputs.settings.images
    )
    view = replace(view, entries=entries, needed_bytes=needed, placed=placed, revision=revision, record=None)
    view = replace(view, record=_record(view, resolution))
    previous = (inputs.status.get("revision") or {}).get("current")
    current, updating = serving_revision(revision, previous, workload, inputs.pods)
    view = replace(view, current=current, updating=updating)
    return replace(view, refused=refused_in_view(view))


def _records(inputs: DeploymentInputs) -> tuple[Record, ...]:
    """What running revisions stand on; the newest template's first."""
    found = [inputs.workload.record] if inputs.workload is not None else []
    found += [pod.record for pod in inputs.pods]
    return tuple(record for record in found if record is not None)


def _record(view: View, resolution: Resolution) -> Record | None:
    """The record of the wanted revision: the one in its template, else made of what warm nodes report."""
    workload = view.inputs.workload
    if workload is not None and workload.revision == view.revision and workload.record is not None:
        return workload.record
    for pod in view.inputs.pods:
        if pod.revision == view.revision and pod.record is not None:
            return pod.record
    caches = [view.inputs.caches[name] for name in view.placed.ready]
    wanted = wanted_entries(view.entries, caches)
    roots = [
        cache.status.root for cache in caches if cache.status is not None and cache.status.root is not None
    ]
    root = next((root for root in roots if root.path is not None and root.gid is not None), None)
    if wanted is None or root is None:
        return None
    facts = resolution.facts or SourceStatus(id=resolution.source.id)
    return Record(
        claim=Claim((resolution.source,), view.entries),
        wanted=wanted,
        sizes=ModelSizes.of(facts),
        root=root.path or "",
        gid=root.gid or 0,
    )


def _needed_bytes(inputs: DeploymentInputs, resolution: Resolution) -> int | None:
    """Bytes of all entries of a node, as far as headers tell; cuts of one component add up to about itself."""
    facts, spec = resolution.facts, inputs.spec
    if facts is None or spec is None or facts.rest_bytes is None:
        return None
    streamed = [part.bytes for part in facts.components if part.name in spec.model.components]
    if not streamed or None in streamed:
        return None
    return sum(size for size in streamed if size is not None) + facts.rest_bytes


def _children(view: View) -> tuple[Object, ...]:
    inputs, spec, workload = view.inputs, view.inputs.spec, view.inputs.workload
    if spec is None:
        return ()
    if view.refused is not None:
        return _held(view, spec)
    place = (inputs.name, inputs.namespace, inputs.uid)
    if workload is None or workload.revision != view.revision:
        if view.record is None or view.revision is None or not view.warm:
            return (children.service(*place, spec), *_held(view, spec))
    elif view.record is None or view.revision is None:
        return ()
    made = [
        children.service(*place, spec),
        children.deployment(*place, spec, view.revision, view.record, inputs.settings),
    ]
    if children.budget_wanted(spec):
        made.append(children.budget(*place, spec))
    return tuple(made)


def _held(view: View, spec: DiffusionDeploymentSpec) -> tuple[Object, ...]:
    """While the wanted revision may not start: the old one's template, at the size that is asked for now."""
    inputs = view.inputs
    if inputs.workload is None or inputs.foreign:
        return ()
    place = (inputs.name, inputs.namespace, inputs.uid)
    held = (children.held(*place, spec, inputs.workload.template),)
    return (*held, children.budget(*place, spec)) if children.budget_wanted(spec) else held


def _claims(view: View) -> dict[str, NodeClaim]:
    """What each node shall hold: the wanted revision where it is placed, older ones where they are used."""
    resolution = view.resolution
    fresh = None
    if (
        resolution is not None
        and resolution.pinned
        and (view.refused is None or view.refused.reason in _BUILT)
    ):
        fresh = Claim((resolution.source,), view.entries)
    found = [*_of_pods(view, fresh), *_of_old_template(view)]
    if fresh is not None:
        found += [(name, fresh) for name in view.placed.claimed]
    elif resolution is not None:
        found += _of_source(view, resolution)
    parts: dict[str, list[Claim]] = {}
    for name, claim in found:
        parts.setdefault(name, []).append(claim)
    return {
        name: NodeClaim(
            merge_claims(claims), frozenset(claim.warm_label for claim in claims if _warm(view, name, claim))
        )
        for name, claims in parts.items()
    }


def _of_source(view: View, resolution: Resolution) -> list[tuple[str, Claim]]:
    """The source alone, on one node: to resolve it, or to remember what made the spec impossible."""
    claim = Claim((resolution.source,))
    if resolution.pinned:
        listing = [
            (not cache.alive, name)
            for name, cache in view.inputs.caches.items()
            if any(source.id == resolution.source.id for source in cache.spec.sources)
        ]
        return [(min(listing)[1], claim)] if listing else []
    missing = view.inputs.secret == "Missing"  # noqa: S105 - a state, not a secret
    return [(resolution.resolver, claim)] if resolution.resolver and not missing else []


def _of_pods(view: View, fresh: Claim | None) -> list[tuple[str, Claim]]:
    """Claims of pods on their nodes, eligible or not; those of the wanted revision as the spec has it now."""
    return [
        (pod.node, fresh if fresh is not None and pod.revision == view.revision else pod.record.claim)
        for pod in view.inputs.pods
        if pod.record is not None and pod.node and not pod.finished
    ]


def _of_old_template(view: View) -> list[tuple[str, Claim]]:
    """While the Deployment carries another revision, its entries stay where they lie."""
    workload = view.inputs.workload
    if workload is None or workload.record is None:
        return []
    if workload.revision == view.revision and view.refused is None:
        return []
    claim = workload.record.claim
    return [
        (name, claim)
        for name, cache in sorted(view.inputs.caches.items())
        if claim.entry_ids <= {entry.id for entry in cache.spec.entries}
    ]


def _warm(view: View, name: str, claim: Claim) -> bool:
    cache = view.cache(name)
    if cache is None or not claim.entries:
        return False
    states = reported(cache, claim.entry_ids)
    return len(states) == len(claim.entry_ids) and all(state.phase == "Ready" for state in states.values())
