"""What the API admits and no part of the product builds yet, in one table.

`dlo run` refuses these before it starts, the operator with `Accepted=False, UnsupportedCombination`, so that
nothing is half-supported. An entry leaves the table when the feature works. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dlo_api.errors import Problem, UnsupportedCombination, combine
from dlo_api.v1alpha1.diffusion_deployment import DiffusionDeploymentSpec


class Where(Enum):
    """Where a deployment is to run."""

    MACHINE = "Machine"
    CLUSTER = "Cluster"


BOTH: Final = frozenset(Where)


@dataclass(frozen=True)
class Unbuilt:
    """One thing that is admitted but not built.

    Attributes:
        name: stable CamelCase name.
        applies: True when the spec asks for it.
        what: the sentence: what is not built.
        change: what to set instead.
        field_path: dotted path of the field that asks for it.
        where: where it is not built.
    """

    name: str
    applies: Callable[[DiffusionDeploymentSpec], bool]
    what: str
    change: str
    field_path: str
    where: frozenset[Where] = BOTH


_ON_MACHINE: Final = frozenset({Where.MACHINE})


def _native(spec: DiffusionDeploymentSpec) -> bool:
    return spec.engine.kind == "Native"


UNBUILT: Final[tuple[Unbuilt, ...]] = (
    Unbuilt(
        name="VllmOmniOnOneMachine",
        applies=lambda spec: spec.engine.kind == "VllmOmni",
        what="VllmOmni engines run in a cluster only",
        change="set engine.kind to Native",
        field_path="spec.engine.kind",
        where=_ON_MACHINE,
    ),
    Unbuilt(
        name="HuggingFaceOnOneMachine",
        applies=lambda spec: spec.model.source.hugging_face is not None,
        what="a huggingFace source needs a cluster's agent",
        change="fetch the repository and name its folder in model.source.directory",
        field_path="spec.model.source.huggingFace",
        where=_ON_MACHINE,
    ),
    Unbuilt(
        name="S3OnOneMachine",
        applies=lambda spec: spec.model.source.s3 is not None,
        what="an s3 source needs a cluster's agent",
        change="fetch the prefix and name its folder in model.source.directory",
        field_path="spec.model.source.s3",
        where=_ON_MACHINE,
    ),
    Unbuilt(
        name="Quantization",
        applies=lambda spec: spec.model.quantization != "None",
        what="quantization of entries is not built yet",
        change="set model.quantization to None",
        field_path="spec.model.quantization",
    ),
    Unbuilt(
        name="CachePolicy",
        applies=lambda spec: _native(spec) and spec.cache.policy != "Required",
        what="on one machine the Native engine serves from Layout entries only",
        change="set cache.policy to Required, or use a cluster",
        field_path="spec.cache.policy",
        where=_ON_MACHINE,
    ),
    Unbuilt(
        name="CfgParallelism",
        applies=lambda spec: _native(spec) and spec.parallelism.cfg > 1,
        what="the Native engine has no guidance parallelism yet",
        change="set parallelism.cfg to 1",
        field_path="spec.parallelism.cfg",
    ),
    Unbuilt(
        name="UlyssesParallelism",
        applies=lambda spec: _native(spec) and spec.parallelism.ulysses > 1,
        what="the Native engine has no Ulysses parallelism yet",
        change="set parallelism.ulysses to 1",
        field_path="spec.parallelism.ulysses",
    ),
    Unbuilt(
        name="RegistrationRequired",
        applies=lambda spec: _native(spec) and spec.offload.host_registration.policy == "Required",
        what="the Native engine cannot yet insist on registered mappings",
        change="set offload.hostRegistration.policy to Auto",
        field_path="spec.offload.hostRegistration.policy",
    ),
    Unbuilt(
        name="ResidentLayersAuto",
        applies=lambda spec: _native(spec) and spec.offload.resident_layers == "Auto",
        what="residentLayers: Auto is not built yet",
        change="give a number of layers",
        field_path="spec.offload.residentLayers",
    ),
)


def unbuilt(spec: DiffusionDeploymentSpec, *, where: Where = Where.MACHINE) -> tuple[Problem, ...]:
    """Everything `spec` asks for that is not built at `where`, in table order; empty when all of it is."""
    return tuple(
        Problem(path=entry.field_path, message=entry.what, hint=entry.change, rule=entry.name)
        for entry in UNBUILT
        if where in entry.where and entry.applies(spec)
    )


def check_built(
    spec: DiffusionDeploymentSpec, *, file: str = "manifest", where: Where = Where.MACHINE
) -> None:
    """Does nothing when all that `spec` asks for is built.

    Raises:
        UnsupportedCombination: lists everything that is not.
    """
    problems = unbuilt(spec, where=where)
    if problems:
        raise combine(UnsupportedCombination, file, problems)
