"""Explanations of a cluster in memory in which the real operator acted; heartbeats as the real writers leave them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from dlo_cli.cluster import read_around, read_deployment
from dlo_cli.explain_text import lines
from dlo_cli.explanation import Explanation, explain
from dlo_kube.errors import Denied
from dlo_kube.gateway import Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, LEASE, POD
from dlo_operator.leader import Leader
from fakes.kube import Call
from unit.operator.world import NAMESPACE, SETTINGS, World

SYSTEM = SETTINGS.plan.namespace


class Engines:
    """Engines that answer with the document of `/v1/engine/status`, as the world's engines report."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[str] = []
        self.refused = False

    def status(self, namespace: str, pod: str, port: int) -> Mapping[str, Any]:
        """What the engine in a pod says of itself."""
        self.asked.append(pod)
        if self.refused:
            raise Denied(f'ask pod {pod}: pods "{pod}" is forbidden: cannot get resource "pods/proxy"')
        said = self.world.reports.said
        if said is None:
            return {}
        backing = {"kind": said.backing, "fallbackCode": said.fallback_code or None, "verified": True}
        return {"backing": backing, "offload": {"mode": said.mode, "transfer": said.transfer}}


def beat(world: World) -> None:
    """Operator and living agents renew their Leases now; the simulated agents write times of their own."""
    moved = world.time.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    leader = Leader(world.cluster, SYSTEM, "operator-0", monotonic=world.time.monotonic, now=world.time.now)
    assert leader.attempt()

    def renew(lease: Object) -> None:
        lease.setdefault("spec", {}).update(renewTime=moved)

    for name, agent in world.agents.items():
        if agent.alive and world.cluster.get(LEASE, name, SYSTEM) is not None:
            world.cluster.edit(LEASE, name, renew, SYSTEM)


def explained(
    world: World, *, ahead: float = 0.0, engines: Engines | None = None, named: str | None = None
) -> Explanation:
    """The explanation of `digits`, read by a machine whose clock is so many seconds ahead."""
    deployment = read_deployment(world.cluster, "digits", NAMESPACE)
    now = world.time.now() + timedelta(seconds=ahead)
    seen = read_around(world.cluster, engines or Engines(world), deployment, now, named)
    return explain(seen, operator_namespace=named)


def text(found: Explanation, width: int = 80) -> str:
    """What is printed, without colours."""
    return "\n".join(line.plain for line in lines(found, width)) + "\n"


def roots(found: Explanation) -> list[tuple[str, str]]:
    """Subject and reason of every cause that has something to do, in order."""
    return [(cause.subject, cause.reason) for cause in found.causes if not cause.follows]


def follows(found: Explanation) -> list[str]:
    """Reasons of the causes that follow from others, in order."""
    return [cause.reason for cause in found.causes if cause.follows]


def deny(world: World, *kinds: str) -> None:
    """The person may not read these kinds."""

    def hook(call: Call) -> None:
        if call.kind in kinds and not world.operating:
            raise Denied(f'{call.verb} {call.kind}: forbidden: User "jane" cannot {call.verb} it')

    world.cluster.before.append(hook)


def pod_status(world: World, pods: Iterable[str], status: dict[str, Any]) -> None:
    """The kubelet reports this of these pods."""
    for name in pods:
        world.cluster.edit(POD, name, lambda o: o.update(status=status), NAMESPACE)


def edit(world: World, change: Any) -> None:
    """Somebody changes the deployment object."""
    world.cluster.edit(DIFFUSION_DEPLOYMENT, "digits", change, NAMESPACE)
