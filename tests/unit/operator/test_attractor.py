"""No eligible node yet: pods that only wait make the cluster add one, hold it, and give way to the engines."""

from __future__ import annotations

from typing import Any

from dlo_kube.kinds import DEPLOYMENT, DIFFUSION_DEPLOYMENT, POD
from unit.operator.pod_security import refused
from unit.operator.world import NAMESPACE, World

POOL: dict[str, Any] = {"spec.placement.nodeSelector": {"pool": "gpu"}, "spec.replicas": 1}


def template(world: World) -> dict[str, Any]:
    """The Deployment's pod template."""
    found: dict[str, Any] = world.object(DEPLOYMENT)["spec"]["template"]
    return found


def containers(world: World) -> list[str]:
    """Names of the containers of the template."""
    return [container["name"] for container in template(world)["spec"]["containers"]]


def join(world: World, name: str = "new") -> None:
    """A node of the pool joins, and the pod that waited is bound to it."""
    world.add_node(name, metadata={"name": name, "labels": {"pool": "gpu"}})
    for pod in world.cluster.objects(POD):
        world.cluster.remove(POD, pod["metadata"]["name"], NAMESPACE)


def test_from_no_node_to_ready() -> None:
    """Made before any node: told precisely, waiting pods, then a node, its cache, and engines in their place."""
    world = World(nodes=0)
    world.create(changes=POOL)
    world.settle()
    assert world.condition("Ready") == ("False", "NoEligibleNodes")
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert containers(world) == ["waits-for-node"]
    assert len(world.cluster.objects(POD)) == 1
    assert world.writes(world.operate) == 0
    join(world)
    seen: list[list[str]] = []
    for _ in range(40):
        world.turn()
        if world.condition("CacheReady")[0] != "True":
            seen.append(containers(world))
    assert seen
    assert all(names == ["waits-for-node"] for names in seen)
    assert world.condition("Ready") == ("True", "Ready")
    assert containers(world) == ["engine"]
    assert world.kubelets.started_cold == []
    revision = world.object(DIFFUSION_DEPLOYMENT)["status"]["revision"]
    assert revision["current"] == template(world)["metadata"]["labels"]["dlo.dev/revision"]
    assert "updating" not in revision


def test_what_waits_asks_for_what_an_engine_asks() -> None:
    """Selector, tolerations, GPUs; nothing of the cache, no right, never ready; it passes `restricted`."""
    world = World(nodes=0)
    changes = {
        "spec.engine.device": "Cuda",
        "spec.placement.tolerations": [{"operator": "Exists"}],
        "spec.placement.priorityClassName": "high",
    }
    world.create(changes={**POOL, **changes})
    world.settle()
    pod = template(world)["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["priorityClassName"] == "high"
    assert pod["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "2"
    assert pod["readinessGates"]
    assert "volumes" not in pod
    assert "initContainers" not in pod
    assert refused(pod, "restricted") == []
    assert world.object(DIFFUSION_DEPLOYMENT)["status"]["revision"].get("current") is None


def test_a_cluster_with_an_eligible_node_holds_back() -> None:
    """There the first engine waits for the cache, and no pod waits on a node."""
    world = World()
    world.create()
    for agent in world.agents.values():
        agent.idle = True
    world.settle()
    assert world.cluster.get(DEPLOYMENT, "digits", NAMESPACE) is None


def test_what_waits_follows_the_spec() -> None:
    """A changed selector, suspension and deletion, as with engines."""
    world = World(nodes=0)
    world.create(changes=POOL)
    world.settle()
    world.change("spec.placement.nodeSelector", {"pool": "other"})
    world.settle()
    assert template(world)["spec"]["nodeSelector"] == {"pool": "other"}
    world.change("spec.suspend", True)
    world.settle()
    assert world.cluster.objects(POD) == ()
    assert world.condition("Ready") == ("False", "Suspended")
    world.delete()
    world.settle()
    assert world.cluster.objects(DEPLOYMENT) == ()
