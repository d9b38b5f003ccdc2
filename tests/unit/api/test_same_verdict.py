"""One verdict: what the generated CRD lets a server admit, the product admits, for the same reasons."""

from __future__ import annotations

import json
from typing import Any

from dlo_api.crdgen import KINDS, custom_resource_definition
from dlo_api.errors import ApiError
from dlo_api.load import load_manifest
from dlo_api.rules import RULES, violations
from dlo_api.v1alpha1 import DiffusionDeployment
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.api.manifests import manifest
from unit.api.schema_server import SchemaServer

_SERVER = SchemaServer(custom_resource_definition(KINDS[0]))

_DEGREES = st.fixed_dictionaries(
    {},
    optional={
        degree: st.sampled_from([1, 1, 1, 2, 0])
        for degree in ("tensor", "data", "ulysses", "ring", "cfg", "pipeline", "expert")
    },
)
_SIZES = st.sampled_from(["20Gi", "0", "0.0Mi", "1.5G", "4096"])
_DIRECTORY = st.fixed_dictionaries(
    {"path": st.sampled_from(["digits", "a/b", "../x", "/abs", "a/..", "a..b", ".", "", "a\n"])},
    optional={"root": st.sampled_from(["samples", "", "Not A Label", "models"])},
)
_SOURCES = st.fixed_dictionaries(
    {},
    optional={
        "directory": _DIRECTORY,
        "huggingFace": st.sampled_from(
            [{"repo": "org/name"}, {"repo": "../name"}, {}, {"repo": "a", "endpoint": "x"}]
        ),
        "s3": st.sampled_from([{"bucket": "models"}, {"bucket": "models", "prefix": "a/b"}, {"bucket": "B"}]),
    },
)
_ENGINES = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["Native", "VllmOmni", "Other"]),
        "device": st.sampled_from(["Cuda", "Cpu"]),
        "image": st.sampled_from(["", "example.org/engine:1", "two words"]),
        "version": st.sampled_from(["", "0.30.0"]),
        "imagePullSecrets": st.sampled_from([[], [{"name": "a"}], [{"name": "a"}, {"name": "a"}], [{}]]),
        "extraEnv": st.sampled_from([[], [{"name": "A", "value": "b"}], ["A=b"]]),
        "extraArgs": st.sampled_from([[], ["--x"], [1], None]),
    },
)
_OFFLOADS = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(["None", "DistributedLayerwise"]),
        "transfer": st.sampled_from(["RankLocal", "AllGather"]),
        "residentLayers": st.sampled_from([0, 1, 8, "Auto", -1, 10_001, "8", "auto", True]),
        "deviceMemoryBudget": _SIZES | st.sampled_from([20, "20GB", "-1Gi"]),
        "hostRegistration": st.fixed_dictionaries(
            {},
            optional={"policy": st.sampled_from(["Auto", "Required", "Off", False]), "limit": _SIZES},
        ),
    },
)
_WILD_SPECS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"source": _SOURCES},
            optional={
                "components": st.sampled_from([["transformer"], ["a", "b"], ["a", "a"], [], "transformer"]),
                "dtype": st.sampled_from(["Source", "bfloat16", "bf16"]),
            },
        )
    },
    optional={
        "engine": _ENGINES,
        "parallelism": _DEGREES,
        "offload": _OFFLOADS,
        "cache": st.fixed_dictionaries(
            {}, optional={"policy": st.sampled_from(["Required", "Opportunistic", "Disabled"])}
        ),
        "rollout": st.fixed_dictionaries(
            {}, optional={"maxUnavailable": st.sampled_from([0, 1, -1]), "maxSurge": st.sampled_from([0, 1])}
        ),
        "replicas": st.sampled_from([0, 1, 1000, 1001, -1, 1.5, "1", None]),
        "serving": st.fixed_dictionaries({}, optional={"port": st.sampled_from([0, 1, 65_535, 65_536])}),
        "suspend": st.sampled_from([True, False, "yes"]),
    },
)
_WILD = st.builds(
    lambda name, spec: {**manifest(), "metadata": {"name": name}, "spec": spec},
    st.sampled_from(["digits", "n" * 40, "n" * 41]),
    _WILD_SPECS,
)


# Well-typed specs, so that rules and not types decide.
_TYPED_SPECS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {
                "source": st.sampled_from(
                    [
                        {"directory": {"root": "samples", "path": "digits"}},
                        {"directory": {"root": "samples", "path": "digits"}},
                        {"directory": {"root": "samples", "path": "a/../.."}},
                        {"directory": {"path": "digits"}},
                        {"huggingFace": {"repo": "org/name"}},
                        {"s3": {"bucket": "models"}, "huggingFace": {"repo": "org/name"}},
                    ]
                )
            }
        ),
        "engine": st.fixed_dictionaries(
            {
                "kind": st.sampled_from(["Native", "VllmOmni"]),
                "device": st.sampled_from(["Cuda", "Cuda", "Cpu"]),
            },
            optional={
                "image": st.just("example.org/engine:1"),
                "version": st.just("0.30.0"),
                "extraArgs": st.sampled_from(
                    [
                        *([], ["--slots=3"], ["--default-guidance=3.5", "--default-size=32x32"]),
                        *(["--slots=9"], ["--slots=3\n"], ["--default-guidance=1000"], ["--host=x"]),
                    ]
                ),
            },
        ),
        "parallelism": st.fixed_dictionaries(
            {},
            optional={
                "tensor": st.sampled_from([1, 2, 4]),
                "data": st.sampled_from([1, 2]),
                "ulysses": st.sampled_from([1, 2]),
                "cfg": st.sampled_from([1, 2, 0]),
                "pipeline": st.sampled_from([1, 1, 1, 2]),
                "ring": st.sampled_from([1, 1, 1, 2]),
                "expert": st.sampled_from([1, 1, 1, 2]),
            },
        ),
        "offload": st.fixed_dictionaries(
            {"mode": st.sampled_from(["None", "DistributedLayerwise", "DistributedLayerwise"])},
            optional={
                "transfer": st.sampled_from(["RankLocal", "AllGather"]),
                "residentLayers": st.sampled_from([0, 4, "Auto", -1]),
                "deviceMemoryBudget": st.sampled_from(["20Gi", "0"]),
                "hostRegistration": st.fixed_dictionaries(
                    {"policy": st.sampled_from(["Auto", "Required", "Off"])},
                    optional={"limit": st.sampled_from(["64Gi", "0.0"])},
                ),
            },
        ),
        "cache": st.fixed_dictionaries(
            {"policy": st.sampled_from(["Required", "Required", "Opportunistic", "Disabled"])}
        ),
    }
)
_TYPED = st.builds(lambda spec: {**manifest(), "spec": spec}, _TYPED_SPECS)


def _python_verdict(value: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether the product takes the manifest, and the messages of the rules it breaks."""
    try:
        load_manifest(json.dumps(value), "generated", cluster=True)
    except ApiError as error:
        return False, [f"{problem.message}: {problem.hint}" for problem in error.problems if problem.rule]
    return True, []


@settings(max_examples=1000, derandomize=True, deadline=None, database=None)
@given(_TYPED)
def test_rules_give_the_same_verdict_in_cel_and_python(value: dict[str, Any]) -> None:
    """The same rules are broken, in the same order, and named by the same messages."""
    admitted, messages = _python_verdict(value)
    assert _SERVER.admit(value)[1] == messages
    assert admitted == (messages == [])


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(_TYPED_SPECS, _TYPED_SPECS)
def test_updates_give_the_same_verdict(old_spec: dict[str, Any], new_spec: dict[str, Any]) -> None:
    """Transition rules see the same old object."""
    old, new = ({**manifest(), "spec": spec} for spec in (old_spec, new_spec))
    stored_old = _SERVER.admit(old)[0]
    stored_new, errors = _SERVER.admit(new, stored_old)
    before, after = (
        DiffusionDeployment.model_validate_json(json.dumps(o), by_name=False) for o in (old, new)
    )
    assert [f"{p.message}: {p.hint}" for p in violations(after, old=before.spec)] == errors
    assert after.spec.to_json() == stored_new["spec"]


@settings(max_examples=700, derandomize=True, deadline=None, database=None)
@given(_WILD)
def test_whole_objects_get_the_same_verdict(value: dict[str, Any]) -> None:
    """Wrong types, bounds, patterns and duplicates too: schema and CEL against the product's own loading."""
    admitted, messages = _python_verdict(value)
    stored, errors = _SERVER.admit(value)
    assert admitted == (errors == []), (errors, messages)
    if messages:
        assert errors == messages
    if admitted:
        assert load_manifest(json.dumps(value), "generated", cluster=True).spec.to_json() == stored["spec"]


def test_generated_specs_reach_every_rule_and_both_verdicts() -> None:
    """The strategy is worth its examples: rules are broken and specs are admitted, neither rarely."""
    seen: list[tuple[str, ...]] = []

    @settings(max_examples=400, derandomize=True, deadline=None, database=None)
    @given(_TYPED)
    def collect(value: dict[str, Any]) -> None:
        read = DiffusionDeployment.model_validate_json(json.dumps(value), by_name=False)
        seen.append(tuple(problem.rule for problem in violations(read)))

    collect()
    assert sum(rules == () for rules in seen) >= 15
    broken = {rule for rules in seen for rule in rules}
    assert {r.name for r in RULES} - broken <= {
        "NameLength",
        "NameOfService",
        "EngineKindFixed",
        "RolloutCanMove",
    }
