"""Cache policies: what nodes hold, what engines mount, and when they go on without Layout entries."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_api.v1alpha1.node_weight_cache import ComponentFacts
from dlo_engine.__main__ import split_extra
from dlo_engine.flags import add_flags, config_from, make_parser
from dlo_kube.kinds import DEPLOYMENT, DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE
from dlo_operator.reconcile.inputs import EngineReport
from dlo_operator.reconcile.memory import pod_memory
from dlo_operator.reconcile.record import ModelSizes
from unit.api.manifests import deployment
from unit.operator.world import NAMESPACE, World

OPTIONAL: dict[str, Any] = {"spec.cache.policy": "Opportunistic"}
GOING_ON: dict[str, Any] = {**OPTIONAL, "spec.cache.onFallback": "Continue"}
DISABLED: dict[str, Any] = {"spec.cache.policy": "Disabled"}


def pod(world: World) -> dict[str, Any]:
    """The pod in the Deployment's template."""
    found: dict[str, Any] = world.object(DEPLOYMENT)["spec"]["template"]["spec"]
    return found


def kinds_waited_for(world: World) -> list[str]:
    """Kinds of the entries that the gate is told of."""
    gate = pod(world)["initContainers"][0]["args"]
    text: str = gate[gate.index("--want-json") + 1]
    return [kind for kind in ("Layout", "Files") for _ in range(text.count(f'"kind":"{kind}"'))]


def cache_mounts(world: World) -> list[str]:
    """What the engine sees of the root."""
    return [m["subPath"] for m in pod(world)["containers"][0]["volumeMounts"] if m["name"] == "cache"]


def selections(world: World) -> set[tuple[str, str]]:
    """Kind and selection of what the first node is told to hold."""
    entries = world.object(NODE_WEIGHT_CACHE, "node-1")["spec"]["entries"]
    return {(entry["kind"], entry.get("select", "")) for entry in entries}


def without_layouts(world: World, **agents: Any) -> None:
    """Agents build files alone, and engines say what they have then."""
    world.reports.said = EngineReport(backing="PrivateLoad", fallback_code="NoLayoutEntry")
    for agent in world.agents.values():
        for name, value in agents.items():
            setattr(agent, name, value)


def with_layouts(world: World) -> None:
    """They build everything."""
    world.reports.said = EngineReport(backing="MappedCache")
    for agent in world.agents.values():
        agent.broken = agent.lazy = ""


@pytest.mark.parametrize(
    ("changes", "held", "waited", "flagged"),
    [
        ({}, {("Layout", ""), ("Files", "PipelineRest")}, ["Layout", "Layout", "Files"], False),
        (OPTIONAL, {("Layout", ""), ("Files", "All")}, ["Layout", "Layout", "Files"], True),
        (DISABLED, {("Files", "All")}, ["Files"], False),
    ],
    ids=["Required", "Opportunistic", "Disabled"],
)
def test_what_each_policy_holds_and_mounts(
    changes: dict[str, Any], held: set[tuple[str, str]], waited: list[str], flagged: bool
) -> None:
    """Own entries alone under `Required`; elsewhere all of them, read-only, since one may be missing."""
    world = World()
    world.create(changes=changes)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert selections(world) == held
    assert kinds_waited_for(world) == waited
    assert ("--optional-layout" in pod(world)["initContainers"][0]["args"]) is flagged
    mounts = cache_mounts(world)
    assert len(mounts) == 3 if changes == {} else mounts == ["v1/entries"]
    engine = pod(world)["containers"][0]
    assert all(m.get("readOnly") for m in engine["volumeMounts"] if m["name"] == "cache")
    parser = make_parser("engine", "")
    add_flags(parser)
    arguments, extra = split_extra(engine["args"])
    policy = changes.get("spec.cache.policy", "Required")
    assert config_from(vars(parser.parse_args(arguments)), extra).cache_policy == policy
    assert world.writes(world.operate) == 0


def test_going_on_without_layouts_and_back() -> None:
    """Failed layouts: engines start on the checkpoint and say so; built after all, engines are rolled to them."""
    world = World()
    without_layouts(world, broken="BuildFailed", breaks="Layout")
    world.create(changes=GOING_ON)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert world.condition("CacheReady") == ("False", "BuildFailed")
    assert world.condition("UsingCache") == ("False", "FellBack")
    assert "NoLayoutEntry" in world.message("UsingCache")
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert kinds_waited_for(world) == ["Files"]
    for agent in world.agents.values():
        agent.broken, agent.lazy = "", "Layout"
    world.settle()
    assert world.condition("CacheReady") == ("False", "Warming")
    assert world.condition("Ready") == ("True", "Ready"), "a build that is tried again must not end engines"
    offload = world.object(DIFFUSION_DEPLOYMENT)["status"]["offload"]
    assert (offload["backing"], offload["fallbackCode"]) == ("PrivateLoad", "NoLayoutEntry")
    with_layouts(world)
    world.settle()
    assert kinds_waited_for(world) == ["Layout", "Layout", "Files"]
    assert world.condition("CacheReady") == ("True", "Warm")
    assert world.condition("UsingCache") == ("True", "AsAsked")
    assert world.kubelets.started_cold == []


def test_layouts_under_way_are_waited_for_until_the_deadline() -> None:
    """A minute's wait is better than engines that are rolled at once; no progress for the deadline is enough."""
    world = World()
    without_layouts(world, lazy="Layout")
    world.create(changes={**GOING_ON, "spec.cache.prewarm": {"progressDeadlineSeconds": 60}})
    world.settle()
    assert world.cluster.get(DEPLOYMENT, "digits", NAMESPACE) is None
    assert world.condition("Ready") == ("False", "Warming")
    world.time.seconds += 61
    world.settle()
    assert kinds_waited_for(world) == ["Files"]
    assert world.condition("Ready") == ("True", "Ready")
    assert world.condition("CacheReady") == ("False", "DeadlineExceeded")


def test_under_fail_no_engine_is_made_only_to_end() -> None:
    """Without layouts an engine of `Fail` would end at once: the cache's own reason is told instead."""
    world = World()
    without_layouts(world, broken="BuildFailed", breaks="Layout")
    world.create(changes=OPTIONAL)
    world.settle()
    assert world.cluster.get(DEPLOYMENT, "digits", NAMESPACE) is None
    assert world.condition("Ready") == ("False", "BuildFailed")


def test_an_engine_that_fell_back_under_fail_ends_and_says_why() -> None:
    """Its own line is quoted, and only a person can end it."""
    world = World()
    world.kubelets.crash = "NoLayoutEntry: the weights are backed by PrivateLoad, which is a fallback here"
    world.kubelets.exit_status = 3
    world.create(changes=OPTIONAL)
    world.settle()
    assert world.condition("Ready") == ("False", "FellBack")
    assert world.condition("Stalled") == ("True", "FellBack")
    assert "exit status 3: NoLayoutEntry: the weights" in world.message("UsingCache")
    assert world.condition("EngineAvailable") == ("False", "PodsCrashing")


def test_a_node_that_loses_layouts_rolls_nothing() -> None:
    """The gate leaves them out there; the template stays."""
    world = World()
    world.create(changes=GOING_ON)
    world.settle()
    before = world.object(DEPLOYMENT)["spec"]["template"]
    for agent in world.agents.values():
        agent.broken, agent.breaks = "BuildFailed", "Layout"
        agent.disk = {key for key in agent.disk if agent.builds.index(key) == len(agent.builds) - 1}
    world.settle()
    assert world.condition("CacheReady")[0] == "False"
    assert world.object(DEPLOYMENT)["spec"]["template"] == before


def test_without_files_nothing_starts() -> None:
    """There is nothing to fall back on: the checkpoint is waited for under every policy."""
    for changes in (GOING_ON, DISABLED):
        world = World()
        without_layouts(world, broken="BuildFailed", breaks="Files")
        world.create(changes=changes)
        world.settle()
        assert world.cluster.get(DEPLOYMENT, "digits", NAMESPACE) is None
        assert world.condition("Ready") == ("False", "BuildFailed")


def test_private_copies_are_counted_where_they_may_be_made() -> None:
    """Beyond one tensor rank the checkpoint is cut privately; at one it is mapped as it is."""
    part = ComponentFacts(
        name="transformer", bytes=2**30, blocks=4, largest_block_bytes=2**28, resident_bytes=0
    )
    sizes = ModelSizes((part,), 0)

    def fallback(policy: str, tensor: int, data: int = 1) -> int:
        changes = {"spec.cache.policy": policy, "spec.parallelism": {"tensor": tensor, "data": data}}
        return pod_memory(deployment(changes).spec, sizes).fallback

    assert fallback("Required", 2) == fallback("Opportunistic", 1) == 0
    assert fallback("Opportunistic", 2) == 2**30
    assert fallback("Disabled", 2, data=2) == 2 * 2**30
