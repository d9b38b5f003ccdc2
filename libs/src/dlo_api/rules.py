"""The admission rules, in one table: what can never work is refused before anything is started.

Each rule is written twice, side by side: as CEL for the API server (the CRD generator puts it into
`x-kubernetes-validations`) and as a Python check for `dlo run`, `dlo plan` and the operator. A test holds
the two verdicts equal. Pure.

Rules speak only of the object itself. What needs the model or the cluster is the operator's to refuse; what
is admitted but not built yet is in `unbuilt`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dlo_api.errors import Problem
from dlo_api.names import NAME_MAX_LENGTH
from dlo_api.v1alpha1.diffusion_deployment import DiffusionDeployment, DiffusionDeploymentSpec


@dataclass(frozen=True)
class Subject:
    """What a rule judges: the object's name, its spec, and on an update the spec it had before."""

    name: str
    spec: DiffusionDeploymentSpec
    old: DiffusionDeploymentSpec | None = None


@dataclass(frozen=True)
class Rule:
    """One admission rule.

    Attributes:
        name: stable CamelCase name.
        cel: the rule for the API server; `self` is the spec, or the whole object for paths outside the spec.
        what: what is wrong.
        change: what to change.
        field_path: dotted path of the field to change.
        check: True when the subject is admitted.
        transition: judged on updates only (the rule names `oldSelf`).
        cluster_only: holds for objects in a cluster and not for `dlo run`.
    """

    name: str
    cel: str
    what: str
    change: str
    field_path: str
    check: Callable[[Subject], bool]
    transition: bool = False
    cluster_only: bool = False

    @property
    def message(self) -> str:
        """What is wrong and what to change: the text the API server shows."""
        return f"{self.what}: {self.change}"

    @property
    def on_spec(self) -> bool:
        """Whether `self` is the spec."""
        return self.field_path.startswith("spec.")


# A path that leaves its root: absolute, or with a `..` segment.
_LEAVES_ROOT: Final = r"^/|(^|/)\.\.(/|$)"

#: The Service in front of the engines has the deployment's name.
_SERVICE_NAME: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

_MAX_RESIDENT: Final = 10_000

_NATIVE_EXTRA_VALUES: Final = {
    "--default-guidance": "[0-9]{1,2}(\\.[0-9]{1,6})?|100",
    "--default-size": "[1-9][0-9]{0,4}x[1-9][0-9]{0,4}",
    "--default-steps": "[1-9][0-9]{0,2}|1000",
    "--max-sequence-length": "[1-9][0-9]{0,5}",
    "--slots": "[2-4]",
    "--threads": "[1-9][0-9]{0,3}",
}
NATIVE_EXTRA_FLAGS: Final = tuple(_NATIVE_EXTRA_VALUES)
"""What `engine.extraArgs` may set on the Native engine; none of them chooses a path, a port or a program."""

_NATIVE_EXTRA: Final = "|".join(f"{flag}=({value})" for flag, value in _NATIVE_EXTRA_VALUES.items())


def _one_source(s: Subject) -> bool:
    source = s.spec.model.source
    return sum(member is not None for member in (source.directory, source.hugging_face, source.s3)) == 1


def _degrees(s: Subject) -> bool:
    p = s.spec.parallelism
    return min(p.tensor, p.data, p.ulysses, p.ring, p.cfg, p.pipeline, p.expert) >= 1


def _directory_inside_root(s: Subject) -> bool:
    directory = s.spec.model.source.directory
    return directory is None or directory.root == "" or re.search(_LEAVES_ROOT, directory.path) is None


def _directory_names_root(s: Subject) -> bool:
    directory = s.spec.model.source.directory
    return directory is None or directory.root != ""


def _resident_count(s: Subject) -> bool:
    layers = s.spec.offload.resident_layers
    return layers == "Auto" or 0 <= layers <= _MAX_RESIDENT


def _above_zero(size: str | None) -> bool:
    return size is None or re.search("[1-9]", size) is not None


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        name="NameLength",
        cel=f"size(self.metadata.name) <= {NAME_MAX_LENGTH}",
        what=f"the name is longer than {NAME_MAX_LENGTH} characters",
        change="choose a shorter metadata.name",
        field_path="metadata.name",
        check=lambda s: len(s.name) <= NAME_MAX_LENGTH,
    ),
    Rule(
        name="NameOfService",
        cel=f"self.metadata.name.matches('{_SERVICE_NAME}')",
        what="the name is none that a Service can have",
        change="choose a metadata.name of lower-case letters, digits and '-' that begins with a letter",
        field_path="metadata.name",
        check=lambda s: re.search(_SERVICE_NAME, s.name) is not None,
        cluster_only=True,
    ),
    Rule(
        name="OneSource",
        cel="[has(self.model.source.directory), has(self.model.source.huggingFace), "
        "has(self.model.source.s3)].filter(given, given).size() == 1",
        what="exactly one source is needed",
        change="give one of directory, huggingFace and s3, and remove the others",
        field_path="spec.model.source",
        check=_one_source,
    ),
    Rule(
        name="DirectoryInsideRoot",
        cel="!has(self.model.source.directory) || self.model.source.directory.root == '' || "
        f"!self.model.source.directory.path.matches(r'{_LEAVES_ROOT}')",
        what="the path leaves its source root",
        change="make it relative and remove every '..' from it",
        field_path="spec.model.source.directory.path",
        check=_directory_inside_root,
    ),
    Rule(
        name="DirectoryNamesRoot",
        cel="!has(self.model.source.directory) || self.model.source.directory.root != ''",
        what="a directory needs a named root in a cluster",
        change="set root to one of the agent's source roots",
        field_path="spec.model.source.directory.root",
        check=_directory_names_root,
        cluster_only=True,
    ),
    Rule(
        name="EngineKindFixed",
        cel="self.engine.kind == oldSelf.engine.kind",
        what="engine.kind cannot be changed",
        change="make a new DiffusionDeployment with the other kind",
        field_path="spec.engine.kind",
        check=lambda s: s.old is None or s.spec.engine.kind == s.old.engine.kind,
        transition=True,
    ),
    Rule(
        name="VllmOmniNeedsGpu",
        cel="self.engine.kind != 'VllmOmni' || self.engine.device != 'Cpu'",
        what="VllmOmni does not run on the CPU",
        change="set engine.device to Cuda, or engine.kind to Native",
        field_path="spec.engine.device",
        check=lambda s: s.spec.engine.kind != "VllmOmni" or s.spec.engine.device != "Cpu",
    ),
    Rule(
        name="VllmOmniImageNeedsVersion",
        cel="self.engine.kind != 'VllmOmni' || self.engine.image == '' || self.engine.version != ''",
        what="a VllmOmni image of one's own needs its version",
        change="set engine.version, or leave engine.image empty",
        field_path="spec.engine.version",
        check=lambda s: (
            s.spec.engine.kind != "VllmOmni" or s.spec.engine.image == "" or s.spec.engine.version != ""
        ),
    ),
    Rule(
        name="NativeExtraArgs",
        cel="self.engine.kind != 'Native' || "
        f"self.engine.extraArgs.all(arg, arg.matches(r'^({_NATIVE_EXTRA})$'))",
        what="an extra argument or its value is none that Native takes",
        change=f"give FLAG=VALUE, such as --slots=3, with {', '.join(NATIVE_EXTRA_FLAGS)}",
        field_path="spec.engine.extraArgs",
        check=lambda s: (
            s.spec.engine.kind != "Native"
            or all(re.fullmatch(_NATIVE_EXTRA, a) for a in s.spec.engine.extra_args)
        ),
    ),
    Rule(
        name="DegreesAtLeastOne",
        cel="self.parallelism.tensor >= 1 && self.parallelism.data >= 1 && self.parallelism.ulysses >= 1 && "
        "self.parallelism.ring >= 1 && self.parallelism.cfg >= 1 && self.parallelism.pipeline >= 1 && "
        "self.parallelism.expert >= 1",
        what="a degree of parallelism is below 1",
        change="set every degree to 1 or more",
        field_path="spec.parallelism",
        check=_degrees,
    ),
    Rule(
        name="NativeParallelism",
        cel="self.engine.kind != 'Native' || "
        "(self.parallelism.pipeline <= 1 && self.parallelism.expert <= 1 && self.parallelism.ring <= 1)",
        what="the Native engine has no pipeline, expert or ring parallelism",
        change="set these degrees to 1, or engine.kind to VllmOmni",
        field_path="spec.parallelism",
        check=lambda s: (
            s.spec.engine.kind != "Native"
            or max(s.spec.parallelism.pipeline, s.spec.parallelism.expert, s.spec.parallelism.ring) <= 1
        ),
    ),
    Rule(
        name="PipelineExcludesStreaming",
        cel="self.parallelism.pipeline <= 1 || self.offload.mode != 'DistributedLayerwise'",
        what="pipeline parallelism does not go with DistributedLayerwise",
        change="set parallelism.pipeline to 1, or offload.mode to None",
        field_path="spec.parallelism.pipeline",
        check=lambda s: s.spec.parallelism.pipeline <= 1 or s.spec.offload.mode != "DistributedLayerwise",
    ),
    Rule(
        name="NoneExcludesAllGather",
        cel="self.offload.mode != 'None' || self.offload.transfer != 'AllGather'",
        what="AllGather needs streaming",
        change="set offload.mode to DistributedLayerwise, or offload.transfer to RankLocal",
        field_path="spec.offload.transfer",
        check=lambda s: s.spec.offload.mode != "None" or s.spec.offload.transfer != "AllGather",
    ),
    Rule(
        name="NoneExcludesResidents",
        cel="self.offload.mode != 'None' || "
        "(type(self.offload.residentLayers) == int && self.offload.residentLayers == 0)",
        what="without streaming all blocks are resident",
        change="set offload.mode to DistributedLayerwise, or offload.residentLayers to 0",
        field_path="spec.offload.residentLayers",
        check=lambda s: s.spec.offload.mode != "None" or s.spec.offload.resident_layers == 0,
    ),
    Rule(
        name="NoneExcludesRegistration",
        cel="self.offload.mode != 'None' || self.offload.hostRegistration.policy != 'Required'",
        what="without streaming nothing is registered",
        change="set offload.mode to DistributedLayerwise, or hostRegistration.policy to Auto",
        field_path="spec.offload.hostRegistration.policy",
        check=lambda s: (
            s.spec.offload.mode != "None" or s.spec.offload.host_registration.policy != "Required"
        ),
    ),
    Rule(
        name="AllGatherNeedsGroup",
        cel="self.offload.transfer != 'AllGather' || self.parallelism.data > 1 || "
        "self.parallelism.ulysses * self.parallelism.ring > 1",
        what="AllGather needs several replicas",
        change="set parallelism.data or parallelism.ulysses above 1, or offload.transfer to RankLocal",
        field_path="spec.offload.transfer",
        check=lambda s: (
            s.spec.offload.transfer != "AllGather"
            or s.spec.parallelism.data > 1
            or s.spec.parallelism.ulysses * s.spec.parallelism.ring > 1
        ),
    ),
    Rule(
        name="ResidentLayersValue",
        cel="type(self.offload.residentLayers) == int ? self.offload.residentLayers >= 0 && "
        f"self.offload.residentLayers <= {_MAX_RESIDENT} : self.offload.residentLayers == 'Auto'",
        what=f"residentLayers is neither a number from 0 to {_MAX_RESIDENT} nor Auto",
        change="set it to one of these",
        field_path="spec.offload.residentLayers",
        check=_resident_count,
    ),
    Rule(
        name="AutoResidentsNeedBudget",
        cel="type(self.offload.residentLayers) == int || self.offload.residentLayers != 'Auto' || "
        "has(self.offload.deviceMemoryBudget)",
        what="residentLayers: Auto needs a budget",
        change="set offload.deviceMemoryBudget, or give a number of layers",
        field_path="spec.offload.residentLayers",
        check=lambda s: (
            s.spec.offload.resident_layers != "Auto" or s.spec.offload.device_memory_budget is not None
        ),
    ),
    Rule(
        name="BudgetAboveZero",
        cel="!has(self.offload.deviceMemoryBudget) || self.offload.deviceMemoryBudget.matches('[1-9]')",
        what="deviceMemoryBudget is zero",
        change="give a size above zero, or remove it",
        field_path="spec.offload.deviceMemoryBudget",
        check=lambda s: _above_zero(s.spec.offload.device_memory_budget),
    ),
    Rule(
        name="RegistrationLimitAboveZero",
        cel="!has(self.offload.hostRegistration.limit) || "
        "self.offload.hostRegistration.limit.matches('[1-9]')",
        what="the registration limit is zero",
        change='give a size above zero, or set hostRegistration.policy to "Off"',
        field_path="spec.offload.hostRegistration.limit",
        check=lambda s: _above_zero(s.spec.offload.host_registration.limit),
    ),
    Rule(
        name="RegistrationNeedsGpu",
        cel="self.offload.hostRegistration.policy != 'Required' || self.engine.device != 'Cpu'",
        what="there is nothing to register with on the CPU",
        change="set hostRegistration.policy to Auto, or engine.device to Cuda",
        field_path="spec.offload.hostRegistration.policy",
        check=lambda s: (
            s.spec.offload.host_registration.policy != "Required" or s.spec.engine.device != "Cpu"
        ),
    ),
    Rule(
        name="RegistrationNeedsCache",
        cel="self.offload.hostRegistration.policy != 'Required' || self.cache.policy != 'Disabled'",
        what="without a cache there are no entries to register",
        change="set hostRegistration.policy to Auto, or cache.policy to Required",
        field_path="spec.offload.hostRegistration.policy",
        check=lambda s: (
            s.spec.offload.host_registration.policy != "Required" or s.spec.cache.policy != "Disabled"
        ),
    ),
    Rule(
        name="RolloutCanMove",
        cel="self.rollout.maxUnavailable + self.rollout.maxSurge > 0",
        what="a rollout could never begin",
        change="set rollout.maxUnavailable or rollout.maxSurge above 0",
        field_path="spec.rollout",
        check=lambda s: s.spec.rollout.max_unavailable + s.spec.rollout.max_surge > 0,
    ),
)


def rule(name: str) -> Rule:
    """The rule of this name; KeyError when there is none."""
    return {rule.name: rule for rule in RULES}[name]


def violations(
    deployment: DiffusionDeployment, *, old: DiffusionDeploymentSpec | None = None, cluster: bool = True
) -> tuple[Problem, ...]:
    """Every rule that `deployment` breaks, in table order; empty when it is admitted.

    Args:
        deployment: the object to judge.
        old: its spec before an update, for the transition rules; None on creation.
        cluster: whether the rules that hold only in a cluster count.
    """
    subject = Subject(deployment.metadata.name, deployment.spec, old)
    return tuple(
        _problem(rule) for rule in RULES if (cluster or not rule.cluster_only) and not rule.check(subject)
    )


def _problem(rule: Rule) -> Problem:
    return Problem(path=rule.field_path, message=rule.what, hint=rule.change, rule=rule.name)
