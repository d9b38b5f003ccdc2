"""Credentials of sources: nobody watches Secrets, so their states are looked at again and recover by themselves."""

from __future__ import annotations

from typing import Any

from dlo_kube.errors import Denied
from dlo_kube.kinds import SECRET
from dlo_operator.keys import deployment_key
from fakes.kube import Call
from unit.operator.world import NAMESPACE, SETTINGS, World

HUB: dict[str, Any] = {"repo": "org/name", "tokenSecretRef": {"name": "hub", "key": "token"}}
S3: dict[str, Any] = {"bucket": "models", "secretRef": {"name": "hub"}}


def put_secret(world: World, **data: str) -> None:
    """The user makes the Secret."""
    meta = {"name": "hub", "namespace": NAMESPACE}
    world.cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})


def copies(world: World) -> list[dict[str, str]]:
    """What the copies in the agents' namespace hold."""
    namespace = SETTINGS.plan.agent_namespace
    return [s["data"] for s in world.cluster.objects(SECRET) if s["metadata"]["namespace"] == namespace]


def again_after(world: World) -> float | None:
    """When the operator looks at the deployment again by itself."""
    return world.operator.controller.reconcile(deployment_key(NAMESPACE, "digits"))


def test_a_missing_secret_is_found_when_it_comes() -> None:
    """First the Secret, then its key."""
    world = World()
    world.create(changes={"spec.model.source": {"huggingFace": HUB}})
    world.settle()
    assert world.condition("Ready") == ("False", "SourceUnauthorized")
    assert again_after(world) == 30
    put_secret(world, other="bm8=")
    world.settle()
    assert world.condition("SourceResolved") == ("False", "SourceUnauthorized")
    world.cluster.edit(SECRET, "hub", lambda obj: obj["data"].update(token="eWVz"), NAMESPACE)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert copies(world) == [{"token": "eWVz"}]


def test_a_role_that_is_bound_later_is_noticed() -> None:
    """Until then the message names the ClusterRole and the namespace, and nothing is listed on nodes."""
    world = World()
    put_secret(world, token="eWVz")
    bound: list[bool] = []

    def deny(call: Call) -> None:
        if (call.kind, call.namespace) == ("Secret", NAMESPACE) and not bound:
            raise Denied("secrets is forbidden")

    world.cluster.before.append(deny)
    world.create(changes={"spec.model.source": {"huggingFace": HUB}})
    world.settle()
    assert world.condition("Ready") == ("False", "SecretNotPermitted")
    assert "dlo-secret-reader" in world.message("Accepted")
    assert NAMESPACE in world.message("Accepted")
    assert world.claimed() == set()
    assert again_after(world) == 30
    bound.append(True)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


def test_a_rotated_secret_is_copied_again() -> None:
    """At the next look, which comes by itself; an equal one is not written."""
    world = World()
    put_secret(world, accessKeyId="YQ==", secretAccessKey="Yg==", other="Yw==")
    world.create(changes={"spec.model.source": {"s3": S3}})
    world.settle()
    assert copies(world) == [{"accessKeyId": "YQ==", "secretAccessKey": "Yg=="}]
    assert world.writes(world.operate) == 0
    world.cluster.edit(SECRET, "hub", lambda obj: obj["data"].update(secretAccessKey="eg=="), NAMESPACE)
    assert again_after(world) == 300
    assert copies(world) == [{"accessKeyId": "YQ==", "secretAccessKey": "eg=="}]


def test_a_copy_goes_when_its_source_is_no_longer_asked_for() -> None:
    """Also while the deployment lives on, with another source."""
    world = World()
    put_secret(world, token="eWVz")
    world.create(changes={"spec.model.source": {"huggingFace": HUB}})
    world.settle()
    assert world.operator.controller.sweep_secrets() == 0
    world.change("spec.model.source", {"directory": {"root": "samples", "path": "digits"}})
    world.settle()
    assert world.operator.controller.sweep_secrets() == 1
    assert copies(world) == []
