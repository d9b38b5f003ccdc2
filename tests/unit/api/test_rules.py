"""Each admission rule by name: what breaks it, what it says, and that the server's CEL says the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dlo_api.crdgen import KINDS, custom_resource_definition
from dlo_api.rules import RULES, Rule, rule, violations
from unit.api.manifests import deployment, manifest
from unit.api.schema_server import SchemaServer

_SERVER = SchemaServer(custom_resource_definition(KINDS[0]))
_VLLM = {"spec.engine.kind": "VllmOmni"}

# rule -> changes that break it and nothing else.
BREAKS: dict[str, list[dict[str, Any]]] = {
    "NameLength": [{"metadata.name": "n" * 41}],
    "NameOfService": [{"metadata.name": name} for name in ("2nd", "a.b", "0")],
    "OneSource": [
        {"spec.model.source": {}},
        {"spec.model.source.huggingFace": {"repo": "org/name"}},
        {"spec.model.source": {"huggingFace": {"repo": "org/name"}, "s3": {"bucket": "models"}}},
    ],
    "DirectoryInsideRoot": [
        {"spec.model.source.directory.path": path}
        for path in ("/etc", "..", "../x", "a/..", "a/../b", "a/b/../..")
    ],
    "DirectoryNamesRoot": [{"spec.model.source.directory": {"path": "digits"}}],
    "VllmOmniNeedsGpu": [_VLLM | {"spec.engine.device": "Cpu"}],
    "VllmOmniImageNeedsVersion": [_VLLM | {"spec.engine.image": "example.org/engine:1"}],
    "NativeExtraArgs": [
        {"spec.engine.extraArgs": args}
        for args in (
            ["--host=0.0.0.0"],
            ["--slots"],
            ["--slots="],
            ["slots=2"],
            ["--slots=3", "--handover=/x"],
            ["--slots=9"],
            ["--slots=3\n"],
            ["--default-size=0x32"],
            ["--default-steps=1001"],
            ["--default-guidance=nan"],
            ["--default-guidance=101"],
            ["--threads=0"],
            ["--max-sequence-length=-1"],
        )
    ],
    "DegreesAtLeastOne": [
        {f"spec.parallelism.{degree}": below}
        for degree in ("tensor", "data", "ulysses", "ring", "cfg", "pipeline", "expert")
        for below in (0, -1)
    ],
    "NativeParallelism": [
        {"spec.parallelism.ring": 2},
        {"spec.parallelism.expert": 2},
        {"spec.parallelism.pipeline": 2, "spec.offload.mode": "None"},
    ],
    "PipelineExcludesStreaming": [_VLLM | {"spec.parallelism.pipeline": 2}],
    "NoneExcludesAllGather": [
        {"spec.offload.mode": "None", "spec.offload.transfer": "AllGather", "spec.parallelism.data": 2}
    ],
    "NoneExcludesResidents": [
        {"spec.offload.mode": "None", "spec.offload.residentLayers": 1},
        {
            "spec.offload.mode": "None",
            "spec.offload.residentLayers": "Auto",
            "spec.offload.deviceMemoryBudget": "20Gi",
        },
    ],
    "NoneExcludesRegistration": [
        {"spec.offload.mode": "None", "spec.offload.hostRegistration.policy": "Required"}
    ],
    "AllGatherNeedsGroup": [{"spec.offload.transfer": "AllGather"}],
    "ResidentLayersValue": [{"spec.offload.residentLayers": -1}, {"spec.offload.residentLayers": 10_001}],
    "AutoResidentsNeedBudget": [{"spec.offload.residentLayers": "Auto"}],
    "BudgetAboveZero": [{"spec.offload.deviceMemoryBudget": "0.0Gi"}],
    "RegistrationLimitAboveZero": [{"spec.offload.hostRegistration": {"policy": "Auto", "limit": "0"}}],
    "RegistrationNeedsGpu": [
        {"spec.offload.hostRegistration.policy": "Required", "spec.engine.device": "Cpu"}
    ],
    "RegistrationNeedsCache": [
        {"spec.offload.hostRegistration.policy": "Required", "spec.cache.policy": "Disabled"}
    ],
    "RolloutCanMove": [{"spec.rollout.maxUnavailable": 0}],
}
ADMITTED: list[dict[str, Any]] = [
    {},
    {"metadata.name": "n" * 40},
    {"spec.model.source.directory.path": "a..b/.c/...d"},
    {"spec.model.source": {"s3": {"bucket": "models"}}},
    _VLLM | {"spec.engine.image": "example.org/engine:1", "spec.engine.version": "0.30.0"},
    _VLLM | {"spec.parallelism.ring": 2, "spec.parallelism.expert": 2},
    _VLLM | {"spec.parallelism.pipeline": 2, "spec.offload.mode": "None"},
    {"spec.engine.image": "example.org/native:1"},
    {"spec.offload.transfer": "AllGather", "spec.parallelism.data": 2, "spec.offload.residentLayers": 4},
    {"spec.offload.transfer": "AllGather", "spec.parallelism.ulysses": 2},
    {"spec.offload.residentLayers": "Auto", "spec.offload.deviceMemoryBudget": "0.5Gi"},
    {"spec.offload.hostRegistration": {"policy": "Required", "limit": "64Gi"}},
    {"spec.rollout.maxUnavailable": 0, "spec.rollout.maxSurge": 1},
    {"spec.engine.device": "Cpu", "spec.offload.mode": "None"},
]


def _cases() -> list[Any]:
    return [
        pytest.param(name, changes, id=f"{name}-{number}")
        for name, variants in BREAKS.items()
        for number, changes in enumerate(variants)
    ]


@pytest.mark.parametrize(("name", "changes"), _cases())
def test_rule_refuses_alone_and_alike(name: str, changes: dict[str, Any]) -> None:
    """Python and CEL refuse for this one reason, with the same words."""
    wanted = rule(name)
    (problem,) = violations(deployment(changes))
    assert (problem.rule, problem.path) == (name, wanted.field_path)
    assert f"{problem.message}: {problem.hint}" == wanted.message
    assert _SERVER.admit(manifest(changes))[1] == [wanted.message]


@pytest.mark.parametrize("changes", ADMITTED)
def test_what_can_work_is_admitted(changes: dict[str, Any]) -> None:
    """Neighbours of what is refused pass both sides."""
    assert violations(deployment(changes)) == ()
    assert _SERVER.admit(manifest(changes))[1] == []


def test_engine_kind_cannot_change() -> None:
    """The transition rule: judged on updates only."""
    before, after = deployment(), deployment(_VLLM)
    (problem,) = violations(after, old=before.spec)
    assert problem.rule == "EngineKindFixed"
    assert violations(before, old=before.spec) == ()
    assert violations(after) == ()
    wanted = [rule("EngineKindFixed").message]
    assert _SERVER.admit(manifest(_VLLM), before.to_json())[1] == wanted
    assert _SERVER.admit(manifest(), before.to_json())[1] == []


def test_every_rule_has_a_breaking_case() -> None:
    """No rule goes untested."""
    assert {*BREAKS, "EngineKindFixed"} == {r.name for r in RULES}
    assert len({r.name for r in RULES}) == len(RULES)


def test_a_directory_without_root_is_for_one_machine() -> None:
    """`dlo run` takes paths relative to the manifest, the cluster does not."""
    local = deployment({"spec.model.source.directory": {"path": "../models/digits"}})
    assert violations(local, cluster=False) == ()
    assert [problem.rule for problem in violations(local)] == ["DirectoryNamesRoot"]


@pytest.mark.parametrize("r", RULES, ids=lambda r: r.name)
def test_message_says_what_to_change(r: Rule) -> None:
    """Every message ends in an imperative, names no value, and stays short."""
    assert re.match(r"(set|give|make|remove|choose)\b", r.change)
    assert len(r.message) <= 200
    assert r.transition == ("oldSelf" in r.cel)
