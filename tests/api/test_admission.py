"""What the real server admits, refuses, fills in, drops and keeps, against what dlo_api says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api.apiserver import ApiServer
from contract.gateway import named
from dlo_api.crdgen import KINDS, object_schema
from dlo_api.errors import ApiError
from dlo_api.load import load_manifest
from dlo_api.rules import RULES, rule
from dlo_api.v1alpha1 import DiffusionDeployment, NodeWeightCache
from dlo_kube.client import ClusterGateway
from dlo_kube.errors import Invalid, KubeError
from dlo_kube.gateway import Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from unit.api.manifests import deployment, manifest
from unit.api.test_rules import ADMITTED, BREAKS
from unit.api.test_same_verdict import _TYPED, _WILD

_HERE = Path(__file__).parent
_PREFIX = 'Invalid value: "object": '


def _in(namespace: str, changes: dict[str, Any] | None = None) -> Object:
    value = manifest(changes)
    value["metadata"]["namespace"] = namespace
    return value


def _rules_of(error: KubeError) -> list[tuple[str, str]]:
    """Path and words of each refusal."""
    assert isinstance(error, Invalid), error
    return [(cause.field, cause.message.removeprefix(_PREFIX)) for cause in error.causes]


def _cases() -> list[Any]:
    return [
        pytest.param(name, changes, id=f"{name}-{number}")
        for name, variants in BREAKS.items()
        for number, changes in enumerate(variants)
    ]


@pytest.mark.parametrize(("name", "changes"), _cases())
def test_rule_refuses_with_its_words(
    gateway: ClusterGateway, namespace: str, name: str, changes: dict[str, Any]
) -> None:
    """One reason, exactly the rule's message, at the rule's path; nothing is stored."""
    wanted = rule(name)
    with pytest.raises(Invalid) as refused:
        gateway.create(_in(namespace, changes))
    path = wanted.field_path if wanted.on_spec else ""
    assert _rules_of(refused.value) == [(path, wanted.message)]
    assert gateway.list(DIFFUSION_DEPLOYMENT, namespace).items == ()


@pytest.mark.parametrize("changes", ADMITTED)
def test_what_can_work_is_admitted(server: ApiServer, namespace: str, changes: dict[str, Any]) -> None:
    """Neighbours of what is refused."""
    assert server.admit(_in(namespace, changes), "diffusiondeployments")[1] is None


def test_engine_kind_cannot_change(gateway: ClusterGateway, namespace: str) -> None:
    """Neither by a new value nor by leaving it out, which means the default; everything else may change."""
    wanted = rule("EngineKindFixed")
    omni = _in(namespace, {"spec.engine.kind": "VllmOmni", "metadata.name": "omni"})
    gateway.apply(omni, manager="user")
    gateway.apply(_in(namespace), manager="user")
    left_out = {**_in(namespace), "metadata": omni["metadata"]}
    for refused in (_in(namespace, {"spec.engine.kind": "VllmOmni"}), left_out):
        with pytest.raises(Invalid) as failed:
            gateway.apply(refused, manager="user")
        assert _rules_of(failed.value) == [(wanted.field_path, wanted.message)]
    gateway.apply(_in(namespace, {"spec.engine.kind": "Native", "spec.engine.device": "Cpu"}), manager="user")
    assert {*BREAKS, "EngineKindFixed"} == {r.name for r in RULES}


def test_every_default(server: ApiServer, namespace: str) -> None:
    """The smallest manifest is stored as the models read it."""
    stored, _ = server.admit(_in(namespace), "diffusiondeployments")
    assert stored is not None
    assert stored["spec"] == deployment().spec.to_json()


@pytest.mark.parametrize(
    "part",
    [
        "engine", "parallelism", "offload", "offload.hostRegistration", "cache", "cache.prewarm", "placement",
        "rollout", "serving",
    ],
)  # fmt: skip
def test_defaults_inside_a_given_object(server: ApiServer, namespace: str, part: str) -> None:
    """An object that is there but empty is filled just the same."""
    stored, error = server.admit(_in(namespace, {f"spec.{part}": {}}), "diffusiondeployments")
    assert stored is not None, error
    assert stored["spec"] == deployment().spec.to_json()


def test_defaults_of_a_node(server: ApiServer) -> None:
    """Sources and entries of a node too; a spec need not be given."""
    meta = {"apiVersion": "dlo.dev/v1alpha1", "kind": "NodeWeightCache", "metadata": {"name": "n"}}
    spec = {
        "sources": [{"id": "3f2a", "source": {"s3": {"bucket": "models"}}}],
        "entries": [{"id": "a1", "sourceId": "3f2a", "kind": "Files", "select": "All"}],
    }
    for value in ({**meta, "spec": spec}, {**meta, "spec": {}}, meta):
        stored, error = server.admit(value, "nodeweightcaches")
        assert stored is not None, error
        assert stored["spec"] == NodeWeightCache.model_validate_json(json.dumps(value)).spec.to_json()


def test_unknown_fields_are_pruned(gateway: ClusterGateway, namespace: str) -> None:
    """On every level, except inside what is handed on to the pod."""
    changes: dict[str, Any] = {
        "spec.unknown": 1,
        "spec.engine.unknown": {"a": 1},
        "spec.model.source.directory.unknown": "x",
        "spec.engine.resources": {"unknown": {"deep": [1, "x", None]}},
        "spec.engine.extraEnv": [{"name": "A", "unknown": True}],
    }
    made = gateway.create(_in(namespace, changes))
    spec = made["spec"]
    assert "unknown" not in spec
    assert "unknown" not in spec["engine"]
    assert "unknown" not in spec["model"]["source"]["directory"]
    assert spec["engine"]["resources"]["unknown"]["deep"][:2] == [1, "x"]
    assert spec["engine"]["extraEnv"] == [{"name": "A", "unknown": True}]


def test_unknown_fields_are_named_by_kubectl(server: ApiServer, namespace: str) -> None:
    """`kubectl apply` refuses them; a typing mistake does not pass in silence."""
    told = server.kubectl(
        "apply", "-f", "-", text=json.dumps(_in(namespace, {"spec.replica": 2})), check=False
    )
    assert 'unknown field "spec.replica"' in told


def _paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _paths(item, f"{path}.{name}")
    elif isinstance(value, list) and value:
        for item in value:
            yield from _paths(item, path)
    else:
        yield path


def _schema_paths(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    inner = schema.get("items", schema)
    for name, field in inner.get("properties", {}).items():
        yield from _schema_paths(field, f"{path}.{name}")
    if not inner.get("properties"):
        yield path


@pytest.mark.parametrize(
    ("file", "kind", "model"),
    [
        (_HERE / "full_deployment.yaml", DIFFUSION_DEPLOYMENT, DiffusionDeployment),
        (_HERE.parent / "unit" / "api" / "node_weight_cache.yaml", NODE_WEIGHT_CACHE, NodeWeightCache),
    ],
)
def test_full_object_round_trip(
    gateway: ClusterGateway, namespace: str, file: Path, kind: Any, model: Any
) -> None:
    """Every field there is goes in and comes out as it was, through the server and through the models."""
    value = yaml.safe_load(file.read_text(encoding="utf-8"))
    if kind.namespaced:
        value["metadata"]["namespace"] = namespace
    gateway.apply(value, manager="user")
    stored = gateway.apply_status(value, manager="dlo-operator")
    assert stored["status"] == value["status"]
    read = model.model_validate_json(json.dumps(stored), by_name=False).to_json()
    assert (read["spec"], read["status"]) == (stored["spec"], stored["status"])
    assert gateway.apply(named(read), manager="user")["spec"] == stored["spec"]
    if kind is DIFFUSION_DEPLOYMENT:
        assert stored["spec"] == value["spec"]


def test_the_full_deployment_is_full() -> None:
    """A field that is added is added to the round trip; only the other two sources are not in it."""
    value = yaml.safe_load((_HERE / "full_deployment.yaml").read_text(encoding="utf-8"))
    (kind,) = [kind for kind in KINDS if kind.name == "DiffusionDeployment"]
    for part in ("spec", "status"):
        there = set(_paths(value[part]))
        for path in _schema_paths(object_schema(kind)["properties"][part]):
            if path.startswith((".model.source.directory", ".model.source.s3")):
                continue
            assert any(p == path or p.startswith(f"{path}.") for p in there), path


def test_a_large_object_is_refused_with_its_field(server: ApiServer, namespace: str) -> None:
    """Case 31: size is bounded by the schema, so no object grows beyond what can be stored and annotated."""
    many = {f"label-{number}": "x" * 4096 for number in range(64)}
    everything = {
        "spec.engine.podLabels": many,
        "spec.engine.podAnnotations": many,
        "spec.placement.nodeSelector": many,
        "spec.serving.serviceAnnotations": many,
    }
    assert server.admit(_in(namespace, everything), "diffusiondeployments")[1] is None
    _, error = server.admit(
        _in(namespace, {"spec.placement.nodeSelector": {f"n{n}": "x" for n in range(65)}}),
        "diffusiondeployments",
    )
    assert error is not None
    assert "spec.placement.nodeSelector" in [field for field, _ in _rules_of(error)]


# -- one verdict ---------------------------------------------------------------------------------------------


def _said_here(value: Object) -> tuple[Object | None, list[str]]:
    """The spec as the product reads it, or the messages of the rules that it breaks."""
    try:
        read = load_manifest(json.dumps(value), "generated", cluster=True)
    except ApiError as error:
        return None, [f"{problem.message}: {problem.hint}" for problem in error.problems if problem.rule]
    return read.spec.to_json(), []


def _generated(values: st.SearchStrategy[Object], count: int) -> list[Object]:
    """The same different objects each time."""
    found: dict[str, Object] = {}

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(values)
    def collect(value: Object) -> None:
        value["metadata"]["namespace"] = "default"
        found[json.dumps(value, sort_keys=True)] = value

    collect()
    return list(found.values())


@pytest.mark.parametrize(("values", "count"), [(_TYPED, 1200), (_WILD, 900)], ids=["typed", "wild"])
def test_same_verdict_as_the_server(server: ApiServer, values: st.SearchStrategy[Object], count: int) -> None:
    """H7. Typed: rules decide. Wild: wrong types, bounds, patterns, duplicates and nulls too.

    Admitted here means admitted there, and stored as we read it; what rules refuse is refused in their words.
    """
    objects = _generated(values, count)
    differing = []
    admitted = 0
    for value in objects:
        spec, messages = _said_here(value)
        stored, error = server.admit(value, "diffusiondeployments")
        admitted += stored is not None
        same = (stored or {}).get("spec") == spec
        if messages and error is not None:
            same = same and [said for _, said in _rules_of(error)] == messages
        if not same:
            differing.append((value, messages, str(error)))
    assert differing[:5] == []
    assert admitted >= 20
    assert len(objects) - admitted >= 50
    assert len(objects) >= 500
