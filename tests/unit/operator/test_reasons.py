"""Every reason of every condition, from the cause that it names; what stands for it is a node, a disk, a pod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from dlo_api import conditions as names
from dlo_kube.errors import Denied, Invalid
from dlo_kube.kinds import LEASE, NODE_WEIGHT_CACHE
from fakes.kube import Call
from unit.operator.world import NAMESPACE, World

Setup = Callable[[World], None]
CUDA: Final = {"spec.engine.device": "Cuda", "spec.parallelism.tensor": 2}
HUB: Final = {"repo": "org/name", "tokenSecretRef": {"name": "hub"}}


def with_(changes: dict[str, Any] | None = None, **agents: Any) -> Setup:
    """A deployment with these changes, and agents with these attributes."""

    def setup(world: World) -> None:
        for agent in world.agents.values():
            for name, value in agents.items():
                setattr(agent, name, value)
        world.create(changes=changes)

    return setup


def source(reason: str) -> Setup:
    """The source cannot be read, for this reason."""

    def setup(world: World) -> None:
        world.content.reasons["digits"] = reason
        world.create()

    return setup


def pods(**kubelets: Any) -> Setup:
    """Pods that behave like this."""

    def setup(world: World) -> None:
        for name, value in kubelets.items():
            setattr(world.kubelets, name, value)
        world.create()

    return setup


def gpu_nodes(world: World) -> None:
    """Nodes with one GPU, and engines that need two."""
    for number in (7, 8):
        world.add_node(f"node-{number}", status={"allocatable": {"nvidia.com/gpu": "1"}})
    world.create(changes=CUDA)


def uneven_heads(world: World) -> None:
    """Three heads on two ranks."""
    world.content.heads = (3,)
    world.create()


def secret_denied(world: World) -> None:
    """The operator may not read Secrets there."""

    def deny(call: Call) -> None:
        if call.kind == "Secret":
            raise Denied("secrets is forbidden")

    world.cluster.before.append(deny)
    world.create(changes={"spec.model.source": {"huggingFace": HUB}})


def secret_missing(world: World) -> None:
    """The Secret is not there."""
    world.create(changes={"spec.model.source": {"huggingFace": HUB}})


def template_refused(world: World) -> None:
    """The API server refuses the Deployment."""

    def refuse(call: Call) -> None:
        if (call.verb, call.kind) == ("apply", "Deployment"):
            raise Invalid("spec.template.spec.containers[0].resources: Invalid value")

    world.cluster.before.append(refuse)
    world.create()


def two_classes(world: World) -> None:
    """Nodes keep their caches at different roots."""
    world.agents["node-2"].root = "/mnt/other"
    world.create()


def foreign_service(world: World) -> None:
    """Somebody else's Service has the name."""
    meta = {"name": "digits", "namespace": NAMESPACE}
    world.cluster.put({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": []}})
    world.create()


def other_bytes(world: World) -> None:
    """One node sees other bytes than the one that resolved, and both are needed."""
    world.create(changes={"spec.cache.prewarm": {"minReadyNodes": 2}})
    asked: list[str] = []
    while not asked:
        world.turn()
        asked = [
            name for name in world.agents if world.object(NODE_WEIGHT_CACHE, name)["spec"].get("sources")
        ]
    (other,) = set(world.agents) - set(asked)
    world.agents[other].other_bytes = world.agents[other].idle = True


def lost(world: World) -> None:
    """Both nodes' heartbeats stop."""
    with_()(world)
    world.settle()
    world.silence("node-1", "node-2")


def overdue(world: World) -> None:
    """Nobody builds for longer than the deadline."""
    with_({"spec.cache.prewarm": {"progressDeadlineSeconds": 30}}, idle=True)(world)
    world.settle()
    world.time.seconds += 31


def suspended(world: World) -> None:
    """A running deployment is suspended."""
    world.create()
    world.settle()
    world.change("spec.suspend", True)


def fell_back(world: World) -> None:
    """Engines say that they have private copies."""
    said = world.reports.said
    assert said is not None
    world.reports.said = type(said)(backing="PrivateLoad", fallback_code="NoLayoutEntry")
    world.create()


def silent(world: World) -> None:
    """Engines cannot be asked."""
    world.reports.said = None
    world.create()


def hashing(world: World) -> None:
    """The source is being hashed."""
    source("Hashing")(world)


CASES: Final[tuple[tuple[str, str, str, Setup], ...]] = (
    (names.ACCEPTED, "True", "Accepted", with_()),
    (names.ACCEPTED, "False", "InvalidTopology", uneven_heads),
    (names.ACCEPTED, "False", "InvalidTopology", with_({"spec.parallelism.tensor": 0})),
    (names.ACCEPTED, "False", "UnsupportedCombination", with_({"spec.model.quantization": "Fp8PerTensor"})),
    (names.ACCEPTED, "False", "UnsupportedCombination", with_({"spec.engine": {"kind": "VllmOmni"}})),
    (names.ACCEPTED, "False", "UnsupportedCombination", with_({"spec.cache.mount": "PersistentVolume"})),
    (names.ACCEPTED, "False", "UnsupportedCombination", two_classes),
    (names.ACCEPTED, "False", "UnsupportedCombination", foreign_service),
    (names.ACCEPTED, "False", "UnknownArchitecture", source("UnknownArchitecture")),
    (names.ACCEPTED, "False", "WorldTooLarge", gpu_nodes),
    (
        names.ACCEPTED,
        "False",
        "EndpointNotAllowed",
        with_({"spec.model.source": {"huggingFace": {"repo": "org/name", "endpoint": "elsewhere"}}}),
    ),
    (names.ACCEPTED, "False", "SecretNotPermitted", secret_denied),
    (
        names.ACCEPTED,
        "False",
        "PodSecurityDenied",
        pods(refuse='violates PodSecurity "restricted": hostPath'),
    ),
    (names.ACCEPTED, "False", "PodTemplateInvalid", pods(refuse="exceeded quota: compute")),
    (names.ACCEPTED, "False", "PodTemplateInvalid", template_refused),
    (names.ACCEPTED, "False", "TooManyEntries", with_({"spec.parallelism.tensor": 64})),
    (names.SOURCE_RESOLVED, "True", "Resolved", with_()),
    (names.SOURCE_RESOLVED, "Unknown", "Hashing", hashing),
    (names.SOURCE_RESOLVED, "Unknown", "AgentNotReady", with_(alive=False)),
    (names.SOURCE_RESOLVED, "False", "SourceUnauthorized", secret_missing),
    *(
        (names.SOURCE_RESOLVED, "False", reason, source(reason))
        for reason in (
            "SourceUnauthorized",
            "SourceNotFound",
            "SourceUntrusted",
            "SourceUnreachable",
            "SourceAmbiguous",
            "SourceInvalid",
            "SourceIncomplete",
        )
    ),
    (names.SOURCE_RESOLVED, "False", "SourceInvalid", source("SourceUnsupported")),
    (names.SOURCE_RESOLVED, "False", "SourceMismatch", other_bytes),
    (names.CAPACITY_SUFFICIENT, "True", "Sufficient", with_()),
    (
        names.CAPACITY_SUFFICIENT,
        "False",
        "NoEligibleNodes",
        with_({"spec.placement.nodeSelector": {"a": "b"}}),
    ),
    (
        names.CAPACITY_SUFFICIENT,
        "False",
        "NoEligibleNodes",
        with_({"spec.cache.prewarm": {"minReadyNodes": 3}}),
    ),
    (names.CAPACITY_SUFFICIENT, "False", "InsufficientDisk", with_(refusal="InsufficientDisk")),
    (names.CAPACITY_SUFFICIENT, "False", "InsufficientHostMemory", with_(warm_budget=1, idle=True)),
    (names.CAPACITY_SUFFICIENT, "False", "MapCountTooLow", with_(refusal="MapCountTooLow")),
    (names.CAPACITY_SUFFICIENT, "False", "RootNotMounted", with_(storage="RootNotMounted")),
    (names.CACHE_READY, "True", "Warm", with_()),
    (names.CACHE_READY, "False", "Warming", with_(idle=True)),
    (names.CACHE_READY, "False", "BuildFailed", with_(broken="BuildFailed")),
    (names.CACHE_READY, "False", "IntegrityFailed", with_(broken="IntegrityFailed")),
    (names.CACHE_READY, "False", "DiskFull", with_(broken="DiskFull")),
    (names.CACHE_READY, "Unknown", "NodeLost", lost),
    (names.CACHE_READY, "False", "DeadlineExceeded", overdue),
    (names.ENGINE_AVAILABLE, "True", "Available", with_()),
    (names.ENGINE_AVAILABLE, "True", "ScaledToZero", with_({"spec.replicas": 0})),
    (names.ENGINE_AVAILABLE, "False", "PodsPending", pods(unschedulable=True)),
    (names.ENGINE_AVAILABLE, "False", "PodsCrashing", pods(crash="PortInUse: port 8000 is taken")),
    (names.ENGINE_AVAILABLE, "False", "StartupTimeout", pods(unschedulable=True, late=True)),
    (names.ENGINE_AVAILABLE, "False", "Suspended", suspended),
    (names.PROGRESSING, "False", "Complete", with_()),
    (names.PROGRESSING, "True", "Warming", with_(idle=True)),
    (names.PROGRESSING, "True", "RollingOut", pods(unschedulable=True)),
    (names.PROGRESSING, "False", "Deferred", with_({"spec.placement.nodeSelector": {"a": "b"}})),
    (names.PROGRESSING, "False", "DeadlineExceeded", overdue),
    (names.PROGRESSING, "False", "DeadlineExceeded", pods(unschedulable=True, late=True)),
    (names.PROGRESSING, "False", "Suspended", suspended),
    (names.USING_CACHE, "True", "AsAsked", with_()),
    (names.USING_CACHE, "False", "FellBack", fell_back),
    (names.USING_CACHE, "False", "FellBack", pods(crash="NoLayoutEntry: no entry is usable")),
    (names.USING_CACHE, "Unknown", "Unreported", silent),
    (names.READY, "True", "Ready", with_()),
    (names.READY, "True", "Ready", silent),
    (names.READY, "True", "Ready", with_({"spec.replicas": 0})),
    (names.READY, "False", "Suspended", suspended),
    (names.READY, "False", "FellBack", pods(crash="NoLayoutEntry: no entry is usable")),
    (names.READY, "False", "NoEligibleNodes", with_({"spec.placement.nodeSelector": {"a": "b"}})),
    (names.STALLED, "False", "NotStalled", with_()),
    (names.STALLED, "False", "NotStalled", source("SourceUnreachable")),
    (names.STALLED, "True", "SourceNotFound", source("SourceNotFound")),
    (names.STALLED, "True", "DeadlineExceeded", overdue),
    (names.STALLED, "True", "StartupTimeout", pods(unschedulable=True, late=True)),
)

#: Reasons without a cause yet: what they name is refused earlier, or is not built.
UNREACHABLE: Final = {
    (names.ACCEPTED, "EngineTooOld"): "VllmOmni engines are not built yet",
    (names.CAPACITY_SUFFICIENT, "LockedMemoryTooLow"): "hostRegistration: Required is not built yet",
    (names.CAPACITY_SUFFICIENT, "HostRegistrationUnsupported"): "hostRegistration: Required is not built yet",
    (names.CACHE_READY, "CacheDisabled"): "cache.policy: Disabled is not built yet",
    (names.USING_CACHE, "CacheDisabled"): "cache.policy: Disabled is not built yet",
    (names.CACHE_READY, "AgentNotReady"): "see test_an_agent_that_goes_is_told",
    (names.READY, "Pending"): "another reason is always known",
}


@pytest.mark.parametrize(
    ("kind", "status", "reason", "setup"),
    CASES,
    ids=[f"{number}-{case[0]}-{case[2]}" for number, case in enumerate(CASES)],
)
def test_reason(kind: str, status: str, reason: str, setup: Setup) -> None:
    """The cause is made, everybody acts, and the condition says so, with words for people."""
    world = World()
    setup(world)
    world.settle()
    assert world.condition(kind) == (status, reason)
    if (status, reason) != ("False", "NotStalled"):
        assert world.message(kind)
    assert world.kubelets.started_cold == []


def test_an_agent_that_goes_is_told() -> None:
    """A node whose agent reported and whose Lease was deleted: no heartbeat at all is not a late one."""
    world = World()
    world.create()
    world.settle()
    for agent in world.agents.values():
        agent.alive = False
        world.cluster.remove(LEASE, agent.node, agent.namespace)
    world.operate()
    assert world.condition(names.CACHE_READY) == ("False", "AgentNotReady")


def test_every_reason_has_a_cause() -> None:
    """The table and the list of what cannot happen yet hold every reason of the API, and no other."""
    made = {(kind, reason) for kind, _, reason, _ in CASES} | set(UNREACHABLE)
    known = {(kind, reason) for kind in names.DEPLOYMENT_CONDITIONS for reason in names.REASONS[kind]}
    copied = {names.READY, names.STALLED}
    assert known <= made
    assert {item for item in made if item[0] not in copied} <= known
