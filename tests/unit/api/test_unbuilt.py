"""The table of what is admitted and not built yet."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_api.errors import UnsupportedCombination
from dlo_api.rules import violations
from dlo_api.unbuilt import UNBUILT, Where, check_built, unbuilt
from unit.api.manifests import deployment

ASKS: dict[str, dict[str, Any]] = {
    "VllmOmniOnOneMachine": {"spec.engine.kind": "VllmOmni"},
    "HuggingFaceOnOneMachine": {"spec.model.source": {"huggingFace": {"repo": "org/name"}}},
    "S3OnOneMachine": {"spec.model.source": {"s3": {"bucket": "models"}}},
    "Quantization": {"spec.model.quantization": "Fp8PerTensor"},
    "CachePolicy": {"spec.cache.policy": "Opportunistic"},
    "CfgParallelism": {"spec.parallelism.cfg": 2},
    "UlyssesParallelism": {"spec.parallelism.ulysses": 2},
    "RegistrationRequired": {"spec.offload.hostRegistration.policy": "Required"},
    "ResidentLayersAuto": {"spec.offload.residentLayers": "Auto", "spec.offload.deviceMemoryBudget": "1Gi"},
}
BUILT: list[dict[str, Any]] = [
    {},
    {"spec.engine.device": "Cpu", "spec.parallelism": {"tensor": 2, "data": 2}},
    {"spec.parallelism.data": 2, "spec.offload.transfer": "AllGather", "spec.offload.residentLayers": 1},
    {"spec.offload.mode": "None"},
    {"spec.offload.hostRegistration.policy": "Off"},
    {"spec.cache.mount": "PersistentVolume"},
    {"spec.model.dtype": "float16"},
]


@pytest.mark.parametrize("entry", UNBUILT, ids=lambda entry: entry.name)
def test_entry_is_admitted_by_the_rules_and_refused_here(entry: Any) -> None:
    """Each entry is asked for by a valid spec, found alone, and refused with its sentence."""
    asked = deployment(ASKS[entry.name])
    assert violations(asked) == ()
    (problem,) = unbuilt(asked.spec)
    assert (problem.rule, problem.path) == (entry.name, entry.field_path)
    with pytest.raises(UnsupportedCombination) as caught:
        check_built(asked.spec, file="digits.yaml")
    assert caught.value.code == "UnsupportedCombination"
    assert str(caught.value) == f"digits.yaml: {entry.field_path}: {entry.what} — {entry.change}"


def test_every_entry_has_a_case() -> None:
    """The cases above cover the table."""
    assert set(ASKS) == {entry.name for entry in UNBUILT}


@pytest.mark.parametrize("changes", BUILT)
def test_what_is_built_passes(changes: dict[str, Any]) -> None:
    """The first milestone's combinations are not refused."""
    check_built(deployment(changes).spec)


@pytest.mark.parametrize(
    "name", ["VllmOmniOnOneMachine", "HuggingFaceOnOneMachine", "S3OnOneMachine", "CachePolicy"]
)
def test_a_cluster_takes_what_one_machine_cannot(name: str) -> None:
    """These entries hold for `dlo run` only."""
    assert unbuilt(deployment(ASKS[name]).spec, where=Where.CLUSTER) == ()


def test_all_gaps_are_listed_at_once() -> None:
    """One error names them all, one line each."""
    asked = deployment({"spec.parallelism": {"cfg": 2, "ulysses": 2}})
    with pytest.raises(UnsupportedCombination) as caught:
        check_built(asked.spec)
    assert [problem.rule for problem in caught.value.problems] == ["CfgParallelism", "UlyssesParallelism"]
    assert len(str(caught.value).splitlines()) == 3
