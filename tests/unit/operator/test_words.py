"""What messages say: grammar, and the one thing that helps."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE
from dlo_operator.reconcile.words import counted, of, of_eligible
from unit.operator.world import World

#: One of something in the plural, or several in the singular.
_WRONG = re.compile(r"\b1 (nodes|engines|GPUs|entries)\b|\b([02-9]|[1-9][0-9]+) (node|engine|GPU|entry)\b")


def messages(world: World) -> list[str]:
    """Of every condition."""
    status = world.object(DIFFUSION_DEPLOYMENT)["status"]
    return [condition["message"] for condition in status["conditions"]]


@pytest.mark.parametrize(
    ("number", "whole", "said"),
    [
        (0, 1, "0 of 1 node hold"),
        (1, 1, "1 of 1 node holds"),
        (1, 2, "1 of 2 nodes holds"),
        (2, 2, "2 of 2 nodes hold"),
    ],
)
def test_numbers_agree(number: int, whole: int, said: str) -> None:
    """Noun and verb, each with its own number."""
    assert of(number, whole, "node", "hold") == said
    assert of(1, 1, "engine", "are") == "1 of 1 engine is"
    assert (counted(0, "GPU"), counted(1, "GPU"), counted(2, "GPU")) == ("0 GPUs", "1 GPU", "2 GPUs")
    assert (of_eligible(1), of_eligible(3)) == ("1 node is eligible", "3 nodes are eligible")


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("minimum", [1, 2, 3])
def test_every_message_has_the_right_number(nodes: int, replicas: int, minimum: int) -> None:
    """On the way and at the end, whatever the counts."""
    world = World(nodes)
    changes: dict[str, Any] = {"spec.replicas": replicas, "spec.cache.prewarm": {"minReadyNodes": minimum}}
    world.create(changes=changes)
    for _ in range(12):
        world.turn()
        assert not any(_WRONG.search(message) for message in messages(world)), messages(world)


def test_too_few_nodes_are_no_silent_agent() -> None:
    """All that are there have reported: what lacks is nodes, and no name is left out of a sentence."""
    world = World(1)
    world.create(changes={"spec.cache.prewarm": {"minReadyNodes": 2}})
    world.settle()
    assert world.condition("CacheReady") == ("False", "Warming")
    said = world.message("CacheReady")
    assert said.startswith("prewarm.minReadyNodes is 2 and 1 node is eligible: 1 of 1 node holds every entry")
    assert world.condition("Ready") == ("False", "NoEligibleNodes")


def relabel(world: World, node: str, labels: dict[str, str]) -> None:
    """The node gets these labels."""
    world.cluster.edit(NODE, node, lambda obj: obj["metadata"].update(labels=labels))


def test_two_classes_name_a_selector() -> None:
    """A label that all nodes of one class have and no node of another; the largest class's."""
    world = World(3)
    for name, pool in (("node-1", "small"), ("node-2", "big"), ("node-3", "big")):
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "pool": pool}
        relabel(world, name, labels)
        world.agents[name].root = f"/mnt/{pool}"
    world.create()
    world.settle()
    assert world.condition("Accepted") == ("False", "UnsupportedCombination")
    assert "set placement.nodeSelector to one class, such as {pool: big} for /mnt/big" in world.message(
        "Accepted"
    )
    world.change("spec.placement.nodeSelector", {"pool": "big"})
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


def test_two_classes_without_a_label_of_their_own() -> None:
    """Then one has to be given; our own labels of warm nodes are none that a person should use."""
    world = World(4)
    for name in ("node-1", "node-2", "node-3", "node-4"):
        world.agents[name].root = "/mnt/a" if name < "node-3" else "/mnt/b"
        labels = {"kubernetes.io/hostname": name, "dlo.dev/warm-0": str(name < "node-3")}
        relabel(world, name, labels)
    world.create()
    world.operate()
    for agent in world.agents.values():
        agent.step()
    world.operate()
    assert "label the nodes of one class and set placement.nodeSelector" in world.message("Accepted")


def test_a_correction_is_not_stalled_from_its_first_moment() -> None:
    """Tools that wait for a new generation give up on `Stalled`: what was overdue before it has begun anew."""
    world = World()
    for agent in world.agents.values():
        agent.idle = True
    world.create(changes={"spec.cache.prewarm": {"progressDeadlineSeconds": 30}})
    world.settle()
    world.time.seconds += 31
    world.settle()
    assert world.condition("Stalled") == ("True", "DeadlineExceeded")
    since = world.time.seconds
    world.change("spec.model.dtype", "bfloat16")
    while world.time.seconds < since + 29:
        world.operate()
        assert world.condition("Stalled") == ("False", "NotStalled")
        assert world.condition("Ready") == ("False", "Warming")
        for agent in world.agents.values():
            agent.beats += 1
        world.time.seconds += 7
    world.time.seconds = since + 31
    world.settle()
    assert world.condition("Stalled") == ("True", "DeadlineExceeded")
    world.time.seconds += 60
    world.settle()
    assert world.condition("Stalled") == ("True", "DeadlineExceeded")
