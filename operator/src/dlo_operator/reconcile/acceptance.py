"""Whether a deployment can be acted on, and if not why: an ordered chain, the first that objects decides. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from dlo_api.eligibility import gpus
from dlo_api.errors import Problem
from dlo_api.meta import ObjectMeta
from dlo_api.names import DIFFUSION_DEPLOYMENT, SECRET_READER_ROLE
from dlo_api.rules import violations
from dlo_api.topology import world_size
from dlo_api.unbuilt import Where, unbuilt
from dlo_api.v1alpha1 import DiffusionDeployment
from dlo_api.wanted import secret_of

from dlo_operator.reconcile.entries import MOST_ENTRIES
from dlo_operator.reconcile.inputs import DeploymentInputs, NodeFacts
from dlo_operator.reconcile.reports import REFUSED, spoken
from dlo_operator.reconcile.revision import NO_REVISION
from dlo_operator.reconcile.view import Verdict, View
from dlo_operator.reconcile.words import counted

#: Levels of Pod Security that refuse a path of the host, in the words of the namespace's label.
_NO_HOST_PATH: Final = frozenset({"baseline", "restricted"})
#: How an engine of an earlier release answers flags that it does not know.
_UNKNOWN_FLAG: Final = ("unrecognized arguments", "invalid choice")


def _no(reason: str, message: str) -> Verdict:
    return Verdict("False", reason, message)


def _readable(inputs: DeploymentInputs) -> Verdict | None:
    return _no("UnsupportedCombination", inputs.spec_error) if inputs.spec is None else None


def _rules(inputs: DeploymentInputs) -> Verdict | None:
    if inputs.spec is None:
        return None
    deployment = DiffusionDeployment(
        api_version="dlo.dev/v1alpha1",
        kind="DiffusionDeployment",
        metadata=ObjectMeta(name=inputs.name, namespace=inputs.namespace),
        spec=inputs.spec,
    )
    return _first(violations(deployment, cluster=True)) or _first(unbuilt(inputs.spec, where=Where.CLUSTER))


def _first(problems: Iterable[Problem]) -> Verdict | None:
    problem = next(iter(problems), None)
    if problem is None:
        return None
    topology = problem.path.startswith("spec.parallelism") and problem.rule != "UlyssesParallelism"
    return _no("InvalidTopology" if topology else "UnsupportedCombination", str(problem))


def _built(inputs: DeploymentInputs) -> Verdict | None:
    """What the control plane does not build yet."""
    spec = inputs.spec
    if spec is not None and spec.engine.kind != "Native":
        return _no(
            "UnsupportedCombination", "VllmOmni engines are not built yet — make one with engine.kind: Native"
        )
    return None


def _endpoints(inputs: DeploymentInputs) -> Verdict | None:
    if inputs.spec is None:
        return None
    source, settings = inputs.spec.model.source, inputs.settings
    for given, allowed in (
        (source.hugging_face and source.hugging_face.endpoint, settings.hub_endpoints),
        (source.s3 and source.s3.endpoint, settings.s3_endpoints),
    ):
        if given and given not in allowed:
            known = ", ".join(sorted(allowed)) or "none is"
            return _no(
                "EndpointNotAllowed",
                f"endpoint {given} is not named in the Helm values — use one of: {known}",
            )
    return None


def _secret(inputs: DeploymentInputs) -> Verdict | None:
    if inputs.spec is None or inputs.secret != "Denied":  # noqa: S105 - a state, not a secret
        return None
    name = secret_of(inputs.spec)
    return _no(
        "SecretNotPermitted",
        f"the operator may not read Secret {name[0] if name else ''} — bind ClusterRole {SECRET_READER_ROLE} to it"
        f" in namespace {inputs.namespace}",
    )


def _namespace(inputs: DeploymentInputs) -> Verdict | None:
    """Known before a pod is refused: the namespace says what it enforces."""
    spec, level = inputs.spec, inputs.pod_security
    if spec is None or spec.cache.mount != "HostPath" or level not in _NO_HOST_PATH:
        return None
    return _no(
        "PodSecurityDenied",
        f"namespace {inputs.namespace} enforces Pod Security level {level}, which admits no hostPath volumes — set"
        " cache.mount: PersistentVolume, or use a namespace that admits them",
    )


def _foreign(inputs: DeploymentInputs) -> Verdict | None:
    if inputs.foreign:
        held = " and ".join(inputs.foreign)
        words = "belongs to something else" if len(inputs.foreign) == 1 else "belong to something else"
        return _no(
            "UnsupportedCombination", f"{held} {words} — remove what is in the way, or use another name"
        )
    if inputs.leaving:
        held, are = " and ".join(inputs.leaving), "is" if len(inputs.leaving) == 1 else "are"
        words = f"{held} of the deleted {DIFFUSION_DEPLOYMENT} of this name {are} not gone yet — wait"
        return Verdict("Unknown", "UnsupportedCombination", words)
    return None


def _entry_count(inputs: DeploymentInputs) -> Verdict | None:
    if inputs.spec is None:
        return None
    count = len(inputs.spec.model.components) * inputs.spec.parallelism.tensor + 1
    if count <= MOST_ENTRIES:
        return None
    return _no(
        "TooManyEntries",
        f"{count} entries are needed, {MOST_ENTRIES} are the most — lower parallelism.tensor or list fewer"
        " components",
    )


_BY_ITSELF: Final[tuple[Callable[[DeploymentInputs], Verdict | None], ...]] = (
    _readable,
    _rules,
    _built,
    _entry_count,
    _endpoints,
    _secret,
    _namespace,
    _foreign,
)


def refused(inputs: DeploymentInputs) -> Verdict | None:
    """Why the spec cannot be acted on whatever model and nodes there are; None when it can."""
    return next((verdict for policy in _BY_ITSELF if (verdict := policy(inputs)) is not None), None)


def refused_in_view(view: View) -> Verdict | None:
    """Why model or cluster make it impossible; None when they do not."""
    return next((verdict for policy in _IN_VIEW if (verdict := policy(view)) is not None), None)


def _world(view: View) -> Verdict | None:
    spec = view.inputs.spec
    if spec is None or spec.engine.device == "Cpu" or view.eligible:
        return None
    most = max((gpus(spec, node) for node in view.matching), default=0)
    world = world_size(spec.parallelism)
    if most == 0:
        return None
    return _no(
        "WorldTooLarge",
        f"one engine needs {counted(world, 'GPU')} of one node, and the largest node has {most} — lower the degrees of"
        " parallelism",
    )


def _classes(view: View) -> Verdict | None:
    if len(view.shortlist.roots) < 2:
        return None
    roots: dict[str, list[NodeFacts]] = {}
    for node in view.eligible:
        cache = view.cache(node.name)
        if cache is not None and cache.root:
            roots.setdefault(cache.root, []).append(node)
    if len(roots) < 2:
        return None
    shown = ", ".join(f"{path} (as on {nodes[0].name})" for path, nodes in sorted(roots.items()))
    return _no(
        "UnsupportedCombination",
        f"eligible nodes keep their caches at different roots: {shown} — {_one_class(roots)}",
    )


def _one_class(roots: Mapping[str, Sequence[NodeFacts]]) -> str:
    """A nodeSelector for the nodes of one root, by a label that all of them have and no others."""
    for path, nodes in sorted(roots.items(), key=lambda item: (-len(item[1]), item[0])):
        common = set.intersection(*(set(node.labels.items()) for node in nodes))
        others = {
            label
            for other, rest in roots.items()
            if other != path
            for n in rest
            for label in n.labels.items()
        }
        own = sorted(
            (key.startswith("dlo.dev/"), key == "kubernetes.io/hostname", key, value)
            for key, value in common - others
        )
        if own and not own[0][0]:
            return f"set placement.nodeSelector to one class, such as {{{own[0][2]}: {own[0][3]}}} for {path}"
    return "label the nodes of one class and set placement.nodeSelector to that label"


def _model(view: View) -> Verdict | None:
    spec, facts = view.inputs.spec, view.resolution.facts if view.resolution is not None else None
    if spec is None or facts is None:
        return None
    if facts.reason in REFUSED:
        return _refusal(facts.reason, facts.message)
    ways = spec.parallelism.tensor * spec.parallelism.ulysses
    uneven = [count for count in facts.head_counts if count % ways]
    if uneven:
        return _no(
            "InvalidTopology",
            f"{facts.architecture or 'the model'} has {uneven[0]} attention heads, which tensor × ulysses = {ways}"
            " does not divide — choose a divisor",
        )
    return None


def _entry_refused(view: View) -> Verdict | None:
    """What only a build finds out: the agents' word on an entry."""
    for name in view.placed.failed:
        cache = view.cache(name)
        for state in cache.status.entries if cache is not None and cache.status is not None else ():
            if state.reason in REFUSED and any(entry.id == state.id for entry in view.entries):
                return _refusal(state.reason, state.message)
    return None


def _refusal(word: str, message: str | None) -> Verdict:
    reason = REFUSED[word]
    return _no(reason, spoken(word, reason, message))


def _too_old(view: View) -> Verdict | None:
    """An engine that does not know the flags of this release; they follow from the spec, so nothing else is wrong."""
    spec = view.inputs.spec
    if spec is None or not spec.engine.image:
        return None
    for pod in view.new_pods:
        trouble = pod.trouble
        if trouble is None or trouble.code != "InvalidConfiguration":
            continue
        if any(words in trouble.message for words in _UNKNOWN_FLAG):
            return _no(
                "EngineTooOld",
                f"the engine in {spec.engine.image} is of another release: {trouble.message.split(' — ')[0][:400]}"
                " — set engine.image to an engine of this release, or leave it empty",
            )
    return None


def _pod_security(view: View) -> Verdict | None:
    workload = view.inputs.workload
    if workload is None or not workload.refused or not workload.settled:
        return None
    if workload.revision not in (view.revision, NO_REVISION):
        return None
    if "violates PodSecurity" in workload.refused:
        return _no(
            "PodSecurityDenied",
            f"{workload.refused[:500]} — set cache.mount: PersistentVolume, or use a namespace that admits hostPath"
            " volumes",
        )
    return _no(
        "PodTemplateInvalid",
        f"{workload.refused[:800]} — correct what it names, or ask for a larger quota",
    )


def _template(view: View) -> Verdict | None:
    error = view.inputs.template_error
    if not error:
        return None
    forbidden = "is forbidden" in error or " denied" in error
    hint = (
        "a quota or a policy of the cluster forbids it: ask whoever set it"
        if forbidden
        else "correct engine.resources, extraEnv, placement or the names that they refer to"
    )
    return _no("PodTemplateInvalid", f"{error[:800]} — {hint}")


_IN_VIEW: Final[tuple[Callable[[View], Verdict | None], ...]] = (
    _world,
    _classes,
    _model,
    _entry_refused,
    _template,
    _pod_security,
    _too_old,
)
