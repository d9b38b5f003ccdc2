"""Fields that the CRD passes through, and refusals of children: one bad deployment, told, next to a good one."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_kube.errors import Denied, Unavailable
from dlo_kube.kinds import DEPLOYMENT
from dlo_operator.keys import deployment_key
from fakes.kube import Call
from unit.operator.test_render import digits, pod
from unit.operator.world import NAMESPACE, World

REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


def terms(value: Any) -> dict[str, Any]:
    """A required node affinity of these terms."""
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": value}}}


def expression(**item: Any) -> dict[str, Any]:
    """One of one expression."""
    return terms([{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", **item}]}])


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("placement.affinity", {"nodeAffinity": "x"}, "nodeAffinity must be an object"),
        ("placement.affinity", {"nodeAffinity": {PREFERRED: "x"}}, f"{PREFERRED} must be a list"),
        ("placement.affinity", {"nodeAffinity": {REQUIRED: [1]}}, f"{REQUIRED} must be an object"),
        ("placement.affinity", terms(5), "nodeSelectorTerms must be a list"),
        ("placement.affinity", terms(["x"]), "nodeSelectorTerms[0] must be an object"),
        (
            "placement.affinity",
            terms([{"matchFields": 1}]),
            "nodeSelectorTerms[0].matchFields must be a list",
        ),
        ("placement.affinity", terms([{"matchExpressions": ["x"]}]), "matchExpressions[0] must be an object"),
        ("placement.affinity", expression(key=["a"]), "key must be a string"),
        ("placement.affinity", expression(operator={}), "operator must be a string"),
        ("placement.affinity", expression(values=5), "values must be a list"),
        ("placement.affinity", expression(values=[{}]), "values[0] must be a string"),
        ("placement.tolerations", [{"operator": 5}], "tolerations[0].operator must be a string"),
        ("placement.tolerations", [{}, {"key": ["a"]}], "tolerations[1].key must be a string"),
        ("engine.resources", {"limits": "x"}, "resources.limits must be an object"),
    ],
)
def test_a_wrong_shape_is_told_and_hurts_nobody(path: str, value: Any, field: str) -> None:
    """Named by its path; no child is made; a good one beside it is ready."""
    world = World()
    world.create(changes={f"spec.{path}": value})
    world.create("good")
    world.settle()
    assert world.condition("Accepted") == ("False", "UnsupportedCombination")
    assert world.message("Accepted").startswith(f"spec.{path}")
    assert f"{field} — correct it" in world.message("Accepted")
    assert [obj["metadata"]["name"] for obj in world.cluster.objects(DEPLOYMENT)] == ["good"]
    assert world.condition("Ready", "good") == ("True", "Ready")


def test_a_running_deployment_keeps_its_engines_when_its_spec_goes_wrong() -> None:
    """Nothing is taken away from it, and it goes on when it is corrected."""
    world = World()
    world.create()
    world.settle()
    before = world.object(DEPLOYMENT)
    world.change("spec.placement.affinity", {"nodeAffinity": "x"})
    world.settle()
    assert world.condition("Ready") == ("False", "UnsupportedCombination")
    assert world.object(DEPLOYMENT) == before
    assert world.claimed() == {"node-1", "node-2"}
    world.change("spec.placement.affinity", {})
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.placement.affinity": {"nodeAffinity": None}},
        {"spec.placement.affinity": {"nodeAffinity": {REQUIRED: None, PREFERRED: None}}},
        {"spec.placement.affinity": terms(None)},
        {"spec.placement.tolerations": [{"key": "a", "operator": None, "value": "b", "effect": None}]},
        {"spec.engine.resources": {"limits": None, "requests": {"memory": None}}},
    ],
)
def test_null_is_as_if_it_were_not_there(changes: dict[str, Any]) -> None:
    """Templates leave such behind; limits that were planned stay."""
    world = World()
    world.create(changes=changes)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    engine = world.object(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]
    assert engine["resources"]["limits"]["memory"]
    assert engine["resources"]["requests"]["memory"]


def test_a_variable_is_there_once() -> None:
    """A user's HOME takes the place of ours: the server refuses a list with two of one name."""
    spec = digits()
    mine = ({"name": "HOME", "value": "/tmp/mine"}, {"name": "A", "value": "1"})
    spec = spec.model_copy(update={"engine": spec.engine.model_copy(update={"extra_env": mine})})
    assert pod(spec)["containers"][0]["env"] == list(mine)
    assert pod(digits())["containers"][0]["env"] == [{"name": "HOME", "value": "/tmp"}]


def test_a_child_that_a_quota_forbids_is_told() -> None:
    """And tried again after a while, since nobody tells when the quota has room."""
    world = World()

    def forbid(call: Call) -> None:
        if (call.verb, call.kind, call.name) == ("apply", "Deployment", "digits"):
            raise Denied('deployments.apps "digits" is forbidden: exceeded quota: compute')

    world.cluster.before.append(forbid)
    world.create()
    world.create("good")
    world.settle()
    assert world.condition("Accepted") == ("False", "PodTemplateInvalid")
    assert "exceeded quota: compute — a quota or a policy" in world.message("Accepted")
    assert world.condition("Ready", "good") == ("True", "Ready")
    assert world.operator.controller.reconcile(deployment_key(NAMESPACE, "digits")) == 60
    world.cluster.before.remove(forbid)
    world.time.seconds += 60
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


@pytest.mark.parametrize(
    "error",
    [
        Denied("the namespace goes", code="NamespaceTerminating"),
        Denied("who?", code="Unauthorized"),
        Unavailable("x"),
    ],
)
def test_what_passes_is_no_refusal(error: Exception) -> None:
    """The spec is not to blame."""
    world = World()

    def fail(call: Call) -> None:
        if (call.verb, call.kind) == ("apply", "Deployment"):
            raise error

    world.cluster.before.append(fail)
    world.create()
    world.settle()
    assert world.condition("Accepted") == ("True", "Accepted")
