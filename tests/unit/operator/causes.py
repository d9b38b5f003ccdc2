"""Causes of every reason of every condition: each makes a world, of nodes, disks, pods, Secrets and namespaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dlo_api import conditions as names
from dlo_kube.errors import Denied, Invalid
from dlo_kube.kinds import LEASE, NODE, NODE_WEIGHT_CACHE
from fakes.kube import Call
from unit.operator.world import NAMESPACE, World

Setup = Callable[[World], None]
CUDA: Final = {"spec.engine.device": "Cuda", "spec.parallelism.tensor": 2}
OPTIONAL: Final = {"spec.cache.policy": "Opportunistic"}
GOING_ON: Final = {**OPTIONAL, "spec.cache.onFallback": "Continue"}
DISABLED: Final = {"spec.cache.policy": "Disabled"}
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


def namespace(level: str, changes: dict[str, Any] | None = None) -> Setup:
    """The namespace enforces a level of Pod Security."""

    def setup(world: World) -> None:
        world.enforce(level)
        world.create(changes=changes)

    return setup


def old_engine(message: str) -> Setup:
    """An image of one's own, whose engine ends with this line at the end of its log."""

    def setup(world: World) -> None:
        world.kubelets.crash, world.kubelets.exit_status = message, 2
        world.create(changes={"spec.engine.image": "mine:0"})

    return setup


def no_layouts(changes: dict[str, Any], **agents: Any) -> Setup:
    """Layout entries cannot be built, files can; engines use what the policy leaves them."""

    def setup(world: World) -> None:
        said = world.reports.said
        assert said is not None
        world.reports.said = type(said)(backing="PrivateLoad", fallback_code="NoLayoutEntry")
        with_(changes, broken="BuildFailed", breaks="Layout", **agents)(world)

    return setup


def agents_gone(world: World) -> None:
    """Agents reported, and their Leases were deleted: no heartbeat at all is not a late one."""
    world.create()
    world.settle()
    for agent in world.agents.values():
        agent.alive = False
        world.cluster.remove(LEASE, agent.node, agent.namespace)


def tainted(world: World) -> None:
    """All nodes have a taint that nothing tolerates."""
    for name in tuple(world.agents):
        world.cluster.edit(
            NODE, name, lambda node: node["spec"].update(taints=[{"key": "gpu", "effect": "NoSchedule"}])
        )
    world.create()


def unreadable(world: World) -> None:
    """The object in the API is not one that this release understands."""
    world.create(changes={"spec.replicas": "many"})


CASES: Final[tuple[tuple[str, str, str, Setup], ...]] = (
    (names.ACCEPTED, "True", "Accepted", with_()),
    (names.ACCEPTED, "False", "InvalidTopology", uneven_heads),
    (names.ACCEPTED, "False", "InvalidTopology", with_({"spec.parallelism.tensor": 0})),
    (names.ACCEPTED, "False", "UnsupportedCombination", with_({"spec.model.quantization": "Fp8PerTensor"})),
    (names.ACCEPTED, "False", "UnsupportedCombination", with_({"spec.engine": {"kind": "VllmOmni"}})),
    (names.ACCEPTED, "False", "UnsupportedCombination", unreadable),
    (
        names.ACCEPTED,
        "False",
        "UnsupportedCombination",
        with_({**CUDA, "spec.offload.hostRegistration": {"policy": "Required"}}),
    ),
    (
        names.ACCEPTED,
        "False",
        "EngineTooOld",
        old_engine("error: InvalidConfiguration: unrecognized arguments: --x"),
    ),
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
    (names.ACCEPTED, "False", "PodSecurityDenied", namespace("restricted")),
    (names.ACCEPTED, "False", "PodSecurityDenied", namespace("baseline")),
    (names.ACCEPTED, "True", "Accepted", namespace("privileged")),
    (
        names.ACCEPTED,
        "True",
        "Accepted",
        namespace("restricted", {"spec.cache.mount": "PersistentVolume"}),
    ),
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
    (names.SOURCE_RESOLVED, "Unknown", "NotAccepted", namespace("restricted")),
    (names.SOURCE_RESOLVED, "Unknown", "Hashing", hashing),
    (names.SOURCE_RESOLVED, "Unknown", "AgentNotReady", with_(storage="RootNotMounted", blind=True)),
    (names.SOURCE_RESOLVED, "False", "SourceUnauthorized", with_(broken="SourceUnauthorized")),
    (names.SOURCE_RESOLVED, "False", "SourceUnreachable", source("BuildFailed")),
    (names.SOURCE_RESOLVED, "False", "AgentNotReady", source("NotUnderstood")),
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
    (names.CAPACITY_SUFFICIENT, "Unknown", "NotAccepted", unreadable),
    (names.CAPACITY_SUFFICIENT, "True", "Sufficient", namespace("restricted")),
    (names.CAPACITY_SUFFICIENT, "False", "NoEligibleNodes", with_(CUDA)),
    (names.CAPACITY_SUFFICIENT, "False", "NoEligibleNodes", tainted),
    (names.CAPACITY_SUFFICIENT, "False", "InsufficientDisk", with_(refusal="InsufficientDisk")),
    (names.CAPACITY_SUFFICIENT, "False", "InsufficientDisk", with_(free=1, idle=True, blank=True)),
    (names.CAPACITY_SUFFICIENT, "False", "InsufficientDisk", with_(storage="DiskFull")),
    (names.CAPACITY_SUFFICIENT, "False", "InsufficientHostMemory", with_(warm_budget=1, idle=True)),
    (names.CAPACITY_SUFFICIENT, "False", "MapCountTooLow", with_(max_map_count=1024)),
    *(
        (names.CAPACITY_SUFFICIENT, "False", "RootNotMounted", with_(storage=word))
        for word in ("RootNotMounted", "RootBroken", "Denied", "ReadOnly", "LocksUnsupported", "NewerFormat")
    ),
    (names.CACHE_READY, "True", "Warm", with_()),
    (names.CACHE_READY, "True", "CacheDisabled", with_(DISABLED)),
    (names.CACHE_READY, "Unknown", "NotAccepted", namespace("restricted")),
    (names.CACHE_READY, "False", "Warming", with_(idle=True)),
    (names.CACHE_READY, "False", "AgentNotReady", agents_gone),
    (names.CACHE_READY, "False", "AgentNotReady", with_(broken="NotUnderstood")),
    (names.CACHE_READY, "False", "BuildFailed", with_(broken="NewerFormat")),
    (names.CACHE_READY, "False", "BuildFailed", no_layouts(GOING_ON)),
    (names.CACHE_READY, "False", "BuildFailed", no_layouts(OPTIONAL)),
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
    (names.USING_CACHE, "True", "CacheDisabled", no_layouts(DISABLED)),
    (names.USING_CACHE, "False", "FellBack", no_layouts(GOING_ON)),
    (names.USING_CACHE, "False", "FellBack", fell_back),
    (names.USING_CACHE, "False", "FellBack", pods(crash="NoLayoutEntry: no entry is usable")),
    (names.USING_CACHE, "Unknown", "Unreported", silent),
    (names.READY, "True", "Ready", with_()),
    (names.READY, "True", "Ready", silent),
    (names.READY, "True", "Ready", with_({"spec.replicas": 0})),
    (names.READY, "True", "Ready", with_(DISABLED)),
    (names.READY, "True", "Ready", with_(OPTIONAL)),
    (names.READY, "True", "Ready", no_layouts(GOING_ON)),
    (names.READY, "False", "BuildFailed", no_layouts(OPTIONAL)),
    (names.READY, "False", "Suspended", suspended),
    (names.READY, "False", "FellBack", pods(crash="NoLayoutEntry: no entry is usable")),
    (names.READY, "False", "NoEligibleNodes", with_({"spec.placement.nodeSelector": {"a": "b"}})),
    (names.STALLED, "False", "NotStalled", with_()),
    (names.STALLED, "False", "NotStalled", source("SourceUnreachable")),
    (names.STALLED, "True", "SourceNotFound", source("SourceNotFound")),
    (names.STALLED, "True", "DeadlineExceeded", overdue),
    (names.STALLED, "True", "StartupTimeout", pods(unschedulable=True, late=True)),
)
