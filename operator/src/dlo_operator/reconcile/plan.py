"""Inputs to intent: the children to apply, what each node shall hold for this deployment, the status. Pure.

*Prewarm, then roll*: the child Deployment gets a revision's template only once enough nodes hold its entries;
the entries of a revision that still has pods, or that the Deployment still carries, stay claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntry, SourceStatus
from dlo_api.wanted import entries_for, id_of_source

from dlo_operator.reconcile import workload as children
from dlo_operator.reconcile.acceptance import refused, refused_in_view
from dlo_operator.reconcile.attractor import attracts
from dlo_operator.reconcile.attractor import template as attractor_template
from dlo_operator.reconcile.entries import reported, wanted_entries, without_layouts
from dlo_operator.reconcile.inputs import DeploymentInputs, Object, PodFacts
from dlo_operator.reconcile.memory import needs_of
from dlo_operator.reconcile.placement import Placed, choose
from dlo_operator.reconcile.record import Claim, ModelSizes, Record, merge_claims
from dlo_operator.reconcile.revision import revision_of, serving_revision
from dlo_operator.reconcile.shortlist import shortlist_of
from dlo_operator.reconcile.sources import Resolution, resolve
from dlo_operator.reconcile.status import status_of
from dlo_operator.reconcile.trust import root_known, trusted
from dlo_operator.reconcile.view import View
from dlo_operator.reconcile.volumes import claims_in_use, pair
from dlo_operator.reconcile.warming import given_up, warm_deadline

#: Refusals of the pod template: the entries are good, and stay for the corrected one.
_BUILT: Final = frozenset({"PodTemplateInvalid", "PodSecurityDenied", "EngineTooOld"})
#: Codes with which an engine ends that found an entry's bytes wrong.
_WRONG_BYTES: Final = frozenset({"Corrupt", "BadEntry"})
#: How soon a Secret is looked at again: one that is missing or may not be read, and one that may be rotated.
_SECRET_SECONDS: Final[Mapping[str, float]] = {"Missing": 30.0, "Denied": 30.0, "Copied": 300.0}
_NAMESPACE_SECONDS: Final = 60.0
_VOLUME_SECONDS: Final = 5.0


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
        recheck_seconds: when to look again though nothing that is watched changes; None when there is no need.
        volume_claims: PersistentVolumeClaims for cache roots that its pods mount.
    """

    children: tuple[Object, ...]
    drop_budget: bool
    claims: Mapping[str, NodeClaim]
    status: dict[str, Any]
    recheck_seconds: float | None = None
    volume_claims: frozenset[str] = frozenset()


def plan(inputs: DeploymentInputs) -> Desired:
    """What there should be."""
    view = survey(inputs)
    return Desired(
        children=_children(view),
        drop_budget=inputs.has_budget
        and inputs.spec is not None
        and view.refused is None
        and not children.budget_wanted(inputs.spec),
        claims=_claims(view),
        status=status_of(view),
        recheck_seconds=_recheck(view),
        volume_claims=claims_in_use(view),
    )


def _recheck(view: View) -> float | None:
    """Deadlines, and what nobody watches: Secrets, labels of namespaces, quotas, volumes that are going."""
    inputs, deadline = view.inputs, warm_deadline(view)
    times = [deadline] if deadline is not None and deadline > 0 else []
    if inputs.secret in _SECRET_SECONDS:
        times.append(_SECRET_SECONDS[inputs.secret])
    if view.refused is not None and view.refused.reason in ("PodSecurityDenied", "PodTemplateInvalid"):
        times.append(_NAMESPACE_SECONDS)
    if inputs.leaving or any(facts.going for facts in inputs.volumes.values()):
        times.append(_VOLUME_SECONDS)
    return min(times, default=None)


def survey(inputs: DeploymentInputs) -> View:
    """Everything worked out once."""
    shortlist = inputs.shortlist or shortlist_of(inputs)
    inputs = trusted(replace(inputs, shortlist=shortlist))
    view = View(inputs, refused=refused(inputs))
    spec, workload = inputs.spec, inputs.workload
    current, _ = serving_revision(None, None, workload, inputs.pods)
    if spec is None:
        return replace(view, current=current)
    matched, eligible = shortlist.matching, shortlist.eligible
    view = replace(view, shortlist=shortlist)
    if view.refused is not None:
        return replace(view, matching=matched, eligible=eligible, current=current)
    identity = id_of_source(spec, inputs.namespace)
    entries = entries_for(spec, identity)
    bound = frozenset(pod.node for pod in inputs.pods if pod.node and not pod.finished)
    view = replace(view, matching=matched, eligible=eligible)

    def candidates() -> Iterator[str]:
        # Not worked out where there is a pin already: with a thousand nodes it is half of all the work.
        yield from choose(
            spec, inputs.uid, shortlist.by_name, inputs.caches, entries, near=shortlist.near, bound=bound
        ).desired

    resolution = resolve(
        spec,
        identity,
        candidates(),
        inputs.caches,
        inputs.records,
        near=view.near,
        secret_name=f"dlo-source-{identity}" if inputs.secret == "Copied" else "",  # noqa: S105
    )
    view = replace(view, resolution=resolution)
    if not resolution.pinned:
        view = replace(view, placed=Placed(desired=tuple(candidates())), current=current)
        return replace(view, refused=refused_in_view(view))
    needs = needs_of(spec, resolution.facts)
    placed = choose(
        spec,
        inputs.uid,
        shortlist.by_name,
        inputs.caches,
        entries,
        near=shortlist.near,
        bound=bound,
        needs=needs,
    )
    view = replace(view, entries=entries, needed=entries, needs=needs, placed=placed)
    view = replace(view, needed=_needed(view, resolution))
    view = replace(view, revision=_revision(view, resolution, view.needed))
    view = replace(view, record=_record(view, resolution))
    previous = (inputs.status.get("revision") or {}).get("current")
    current, updating = serving_revision(view.revision, previous, workload, inputs.pods)
    view = replace(view, current=current, updating=updating)
    return replace(view, refused=refused_in_view(view))


def _record(view: View, resolution: Resolution) -> Record | None:
    """The record of the wanted revision: the one in its template, else made of what warm nodes report."""
    workload = view.inputs.workload
    standing = [workload.record] if workload is not None and workload.revision == view.revision else []
    standing += [pod.record for pod in view.inputs.pods if pod.revision == view.revision]
    for record in standing:
        if record is not None and root_known(record, view.shortlist.roots):
            return record
    caches = [view.inputs.caches[name] for name in view.holders]
    wanted = wanted_entries(view.needed, caches)
    roots = [
        cache.status.root for cache in caches if cache.status is not None and cache.status.root is not None
    ]
    root = next((root for root in roots if root.path is not None and root.gid is not None), None)
    if wanted is None or root is None:
        return None
    facts = resolution.facts or SourceStatus(id=resolution.source.id)
    return Record(
        claim=Claim((resolution.source,), view.needed),
        wanted=wanted,
        sizes=ModelSizes.of(facts),
        root=root.path or "",
        gid=root.gid or 0,
    )


def _revision(view: View, resolution: Resolution, entries: tuple[NodeEntry, ...]) -> str:
    spec, settings = view.inputs.spec, view.inputs.settings
    assert spec is not None  # noqa: S101 - a source is resolved for a spec that was read
    return revision_of(spec, resolution.source.pin.digest, (entry.id for entry in entries), settings.images)


def _needed(view: View, resolution: Resolution) -> tuple[NodeEntry, ...]:
    """What engines may not start without: everything, or the checkpoint alone once the rest is given up.

    Only under `Opportunistic` with `onFallback: Continue`: engines of `Fail` would end at once. As soon as enough
    nodes hold everything, engines are rolled to it; they stay on it when a node loses some.
    """
    spec, workload = view.inputs.spec, view.inputs.workload
    if spec is None or (spec.cache.policy, spec.cache.on_fallback) != ("Opportunistic", "Continue"):
        return view.entries
    standing = workload.revision if workload is not None else ""
    if view.warm or standing == _revision(view, resolution, view.entries):
        return view.entries
    bare = without_layouts(view.entries)
    if standing == _revision(view, resolution, bare):
        return bare
    return bare if given_up(view) is not None and replace(view, needed=bare).startable else view.entries


def _children(view: View) -> tuple[Object, ...]:
    inputs, spec, workload = view.inputs, view.inputs.spec, view.inputs.workload
    if spec is None:
        return ()
    if view.refused is not None:
        return _held(view, spec)
    place = (inputs.name, inputs.namespace, inputs.uid)
    if workload is None or workload.revision != view.revision:
        if view.record is None or view.revision is None or not view.startable:
            waiting = _attractor(view, spec) if attracts(view) else _held(view, spec)
            return (children.service(*place, spec), *waiting)
    elif view.record is None or view.revision is None:
        return ()
    made = [
        children.service(*place, spec),
        *_volumes(view, spec, view.record.root),
        children.deployment(*place, spec, view.revision, view.record, inputs.settings),
    ]
    if children.budget_wanted(spec):
        made.append(children.budget(*place, spec))
    return tuple(made)


def _volumes(view: View, spec: DiffusionDeploymentSpec, root: str) -> tuple[Object, ...]:
    """Claim and volume of the root, where pods mount it that way; before the pods that wait for them."""
    # A root that no node has reported is nobody's cache: volumes are made of no other folder.
    if spec.cache.mount != "PersistentVolume" or root not in view.inputs.volumes:
        return ()
    return pair(view.inputs.namespace, root, view.inputs.volumes[root])


def _attractor(view: View, spec: DiffusionDeploymentSpec) -> tuple[Object, ...]:
    """Pods that make a cluster add a node, and hold it until engines can start there."""
    inputs = view.inputs
    facts = view.resolution.facts if view.resolution is not None else None
    sizes = ModelSizes.of(facts) if facts is not None else ModelSizes()
    made = attractor_template(children.labels(inputs.name), spec, sizes, inputs.settings)
    return (children.held(inputs.name, inputs.namespace, inputs.uid, spec, made),)


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
        bare = replace(fresh, entries=view.needed)
        both = (fresh,) if view.needed == view.entries else (fresh, bare)
        found += [(name, claim) for name in view.placed.claimed for claim in both]
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
            for name, cache in view.near.items()
            if resolution.source.id in cache.sources
        ]
        return [(min(listing)[1], claim)] if listing else []
    missing = view.inputs.secret == "Missing"  # noqa: S105 - a state, not a secret
    return [(resolution.resolver, claim)] if resolution.resolver and not missing else []


def _of_pods(view: View, fresh: Claim | None) -> list[tuple[str, Claim]]:
    """Claims of pods on their nodes, eligible or not; those of the wanted revision as the spec has it now."""
    return [
        (
            pod.node,
            _doubted(pod, fresh if fresh is not None and pod.revision == view.revision else pod.record.claim),
        )
        for pod in view.inputs.pods
        if pod.record is not None and pod.node and not pod.finished
    ]


def _doubted(pod: PodFacts, claim: Claim) -> Claim:
    """The claim; when the pod's engine ended because of wrong bytes, they count only once checked after that."""
    if pod.trouble is None or pod.trouble.code not in _WRONG_BYTES or not pod.trouble.ended:
        return claim
    since = {"verified_after": pod.trouble.ended}
    return replace(claim, entries=tuple(entry.model_copy(update=since) for entry in claim.entries))


def _of_old_template(view: View) -> list[tuple[str, Claim]]:
    """While the Deployment carries another revision, its entries stay where they lie."""
    workload = view.inputs.workload
    if workload is None or workload.record is None:
        return []
    if workload.revision == view.revision and view.refused is None:
        return []
    claim = workload.record.claim
    caches = view.near if claim.entry_ids else view.inputs.caches
    return [(name, claim) for name, cache in sorted(caches.items()) if claim.entry_ids <= cache.listed]


def _warm(view: View, name: str, claim: Claim) -> bool:
    cache = view.cache(name)
    if cache is None or not claim.entries:
        return False
    states = reported(cache, claim.entry_ids)
    return len(states) == len(claim.entry_ids) and all(state.phase == "Ready" for state in states.values())
