"""Reads what explains one DiffusionDeployment, as far as the person's rights allow. Decides nothing.

A read that is denied or fails is noted and the rest goes on; only the deployment itself must be readable.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from dlo_api.names import label
from dlo_kube.errors import Denied, KubeError
from dlo_kube.gateway import Gateway, Listing, Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    LEASE,
    NAMESPACE,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    Kind,
)

from dlo_cli.errors import CliError

LEADER_LEASE = "dlo-operator-leader"
#: The engines that are asked at most; a deployment may have a thousand.
MOST_ASKED = 16
_DEFAULT_PORT = 8000


class Engines(Protocol):
    """Asks engines for their status documents."""

    def status(self, namespace: str, pod: str, port: int) -> Mapping[str, Any]:
        """What the engine in a pod says of itself. Raises KubeError."""


@dataclass(frozen=True)
class Unread:
    """Something that could not be looked at: what, and why."""

    what: str
    why: str


@dataclass
class Seen:
    """What was read, as JSON values. None: it could not be looked at.

    Attributes:
        name, namespace: of the deployment.
        deployment: the DiffusionDeployment.
        workload: its child Deployment; None also where there is none.
        pods: its engine pods.
        nodes, caches: all Nodes and NodeWeightCaches.
        leases: every Lease that was asked for.
        said: status documents of engines by the name of their pod.
        unread: what could not be looked at.
        now: when it was read, by this machine's clock.
    """

    name: str
    namespace: str
    deployment: Object
    now: datetime
    workload: Object | None = None
    pods: tuple[Object, ...] | None = None
    nodes: tuple[Object, ...] | None = None
    caches: tuple[Object, ...] | None = None
    leases: tuple[Object, ...] | None = None
    said: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)

    @property
    def leader(self) -> Object | None:
        """The operator's own Lease."""
        return next((o for o in self.leases or () if o["metadata"]["name"] == LEADER_LEASE), None)


def read_deployment(gateway: Gateway, name: str, namespace: str) -> Object:
    """The DiffusionDeployment. Raises CliError that names the nearest where there is none, and KubeError."""
    try:
        found = gateway.get(DIFFUSION_DEPLOYMENT, name, namespace)
    except Denied as error:
        if error.code != "Forbidden" or "system:anonymous" in error.message:
            raise
        raise CliError(
            f"you may not read DiffusionDeployments in namespace {namespace}: {error.message}",
            hint="name another namespace with -n, or ask for the role that may read them",
            code="Forbidden",
        ) from error
    if found is None:
        raise _absent(gateway, name, namespace)
    return found


def read_around(
    gateway: Gateway,
    engines: Engines,
    deployment: Object,
    now: datetime,
    operator_namespace: str | None = None,
) -> Seen:
    """Everything else that explains it."""
    meta = deployment["metadata"]
    seen = Seen(meta["name"], meta["namespace"], deployment, now)
    seen.workload = _looked(
        seen, "its Deployment", lambda: gateway.get(DEPLOYMENT, seen.name, seen.namespace)
    )
    seen.pods = _items(
        seen,
        "its pods",
        lambda: gateway.list(POD, seen.namespace, labels={label("deployment"): seen.name}),
    )
    seen.nodes = _items(seen, "nodes", lambda: gateway.list(NODE))
    seen.caches = _items(seen, "node weight caches", lambda: gateway.list(NODE_WEIGHT_CACHE))
    seen.leases = _leases(seen, gateway, operator_namespace)
    _ask(seen, engines)
    return seen


def _absent(gateway: Gateway, name: str, namespace: str) -> CliError:
    """Why there is no such object, as far as can be found: the namespace, another namespace, another name."""
    what = f"there is no DiffusionDeployment {name} in namespace {namespace}"
    namespaces = _names(gateway, NAMESPACE, None)
    if namespaces and namespace not in namespaces:
        return CliError(
            f"there is no namespace {namespace}", hint=_nearest(namespace, namespaces, "-n "), code="NotFound"
        )
    known = _listed(gateway, None) or _listed(gateway, namespace)
    elsewhere = sorted(o["metadata"]["namespace"] for o in known if o["metadata"]["name"] == name)
    if elsewhere:
        where = ", ".join(elsewhere[:3])
        return CliError(what, hint=f"there is one in {where}: add -n {elsewhere[0]}", code="NotFound")
    here = [o["metadata"]["name"] for o in known if o["metadata"]["namespace"] == namespace]
    none = "none is there: apply a manifest with kubectl apply -f FILE"
    return CliError(what, hint=_nearest(name, here, "") if here else none, code="NotFound")


def _nearest(name: str, known: list[str], flag: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {flag}{near[0]}?" if near else f"there are: {', '.join(sorted(known)[:8])}"


def _listed(gateway: Gateway, namespace: str | None) -> tuple[Object, ...]:
    try:
        return gateway.list(DIFFUSION_DEPLOYMENT, namespace).items
    except Denied:
        return ()


def _names(gateway: Gateway, kind: Kind, namespace: str | None) -> list[str]:
    try:
        return [o["metadata"]["name"] for o in gateway.list(kind, namespace).items]
    except Denied:
        return []


def _leases(seen: Seen, gateway: Gateway, namespace: str | None) -> tuple[Object, ...] | None:
    """The Leases of the operator's namespace, which is where its own one is; all that there are if it is not named."""
    if namespace is not None:
        return _items(seen, f"leases in {namespace}", lambda: gateway.list(LEASE, namespace))
    found = _items(seen, "leases", lambda: gateway.list(LEASE))
    if found is None:
        last = seen.unread.pop()
        seen.unread.append(
            Unread("heartbeats (Leases)", f"{last.why}; --operator-namespace NS reads those of one namespace")
        )
    return found


def _ask(seen: Seen, engines: Engines) -> None:
    """The engines of pods that are ready; the first refusal ends it, since the others would be refused alike."""
    port = ((seen.deployment.get("spec") or {}).get("serving") or {}).get("port", _DEFAULT_PORT)
    for pod in [pod for pod in seen.pods or () if is_ready(pod)][:MOST_ASKED]:
        name = pod["metadata"]["name"]
        try:
            seen.said[name] = engines.status(seen.namespace, name, port)
        except Denied as error:
            seen.unread.append(Unread("engines (pods/proxy)", error.message))
            return
        except KubeError as error:
            seen.unread.append(Unread(f"the engine in {name}", error.message))


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod takes requests and is not on its way out."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return "deletionTimestamp" not in pod["metadata"] and any(
        condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions
    )


def _items(seen: Seen, what: str, call: Any) -> tuple[Object, ...] | None:
    listing: Listing | None = _looked(seen, what, call)
    return None if listing is None else listing.items


def _looked(seen: Seen, what: str, call: Any) -> Any:
    """What a call returns; None, and a note, where it is denied or fails."""
    try:
        return call()
    except KubeError as error:
        if isinstance(error, Denied) and error.code == "Unauthorized":
            raise
        seen.unread.append(Unread(what, error.message))
        return None
