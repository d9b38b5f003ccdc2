"""One reconcile: gather, plan, apply, status. Knows the order of effects and decides nothing itself.

Safe to be killed anywhere: every step starts from what is there, and none depends on an earlier one of the same
process. Nothing is made again for an object that is being deleted; children go by their owner references.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from dlo_api import conditions as names
from dlo_kube.errors import Invalid
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import (
    DIFFUSION_DEPLOYMENT,
    LEASE,
    NODE,
    NODE_WEIGHT_CACHE,
    POD_DISRUPTION_BUDGET,
    SECRET,
)

from dlo_operator import nodes, observe
from dlo_operator.claims import ClaimBook
from dlo_operator.events import Recorder, transitions
from dlo_operator.executor import Executor
from dlo_operator.gather import SOURCE_LABEL, Gathered, Gatherer
from dlo_operator.keys import Key, deployment_key, node_key
from dlo_operator.metrics import Metrics
from dlo_operator.reconcile.plan import Desired, plan
from dlo_operator.reconcile.record import Claim

#: While some deployment's needs are unknown, a node that would shrink is looked at again after this long.
_UNKNOWN_NEEDS_SECONDS = 5.0
#: An engine that serves and has not been asked yet, is asked again.
_UNREPORTED_SECONDS = 60.0


@dataclass(frozen=True)
class Parts:
    """What a controller works with."""

    gateway: Gateway
    gatherer: Gatherer
    executor: Executor
    recorder: Recorder
    metrics: Metrics
    now: Callable[[], datetime]
    namespace: str
    agent_namespace: str


class Controller:
    """Reconciles keys. One key is never worked on twice at the same time: the queue sees to that."""

    def __init__(self, parts: Parts, enqueue: Callable[[Key], None]) -> None:
        self._parts = parts
        self._enqueue = enqueue
        self._lock = threading.Lock()
        self._unsettled: set[Key] = set()
        self.claims = ClaimBook()

    def reconcile(self, key: Key) -> float | None:
        """Brings one key to where it should be; seconds after which to look again, or None.

        Raises KubeError and whatever a fault of this program raises; the queue decides about retries.
        """
        return self._deployment(key) if key.kind == "Deployment" else self._node(key)

    def interested(self, node: str) -> frozenset[Key]:
        """Deployments to look at when a node's cache changed: those that claim it, and those not settled."""
        with self._lock:
            return self.claims.claimants(node) | frozenset(self._unsettled)

    # -- a deployment ----------------------------------------------------------------------------------------

    def _deployment(self, key: Key) -> float | None:
        obj = self._parts.gateway.get(DIFFUSION_DEPLOYMENT, key.name, key.namespace)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            self._forget(key)
            return None
        gathered = self._parts.gatherer.deployment(obj)
        desired = plan(gathered.inputs)
        self._touch(self.claims.put(key, gathered.inputs.uid, desired.claims))
        if gathered.secret_copy is not None:
            self._copy_secret(gathered.secret_copy)
        error = self._apply_children(gathered, desired)
        if error:
            desired = plan(replace(gathered.inputs, template_error=error))
            self._touch(self.claims.put(key, gathered.inputs.uid, desired.claims))
        self._settle(key, obj, desired)
        return _soonest(desired)

    def _apply_children(self, gathered: Gathered, desired: Desired) -> str:
        """Applies the children; the server's words when it refuses one."""
        for intent in desired.children:
            try:
                self._parts.executor.apply(intent, gathered.live.get(intent["kind"]))
            except Invalid as refusal:
                return f"{intent['kind']} {intent['metadata']['name']}: {refusal.message}"
        if desired.drop_budget:
            uid = gathered.inputs.uid
            self._parts.executor.delete(
                POD_DISRUPTION_BUDGET,
                gathered.inputs.name,
                gathered.inputs.namespace,
                lambda found: _owned_by(found, uid),
            )
        return ""

    def _settle(self, key: Key, obj: Object, desired: Desired) -> None:
        before = (obj.get("status") or {}).get("conditions") or ()
        after = desired.status["conditions"]
        ready = any(c["type"] == names.READY and c["status"] == "True" for c in after)
        with self._lock:
            (self._unsettled.discard if ready else self._unsettled.add)(key)
        self._parts.metrics.conditions(key, after)
        if self._parts.executor.apply_status(obj, desired.status):
            self._parts.recorder.record(obj, transitions(before, after))

    def _copy_secret(self, copy: Object) -> None:
        meta = copy["metadata"]
        live = self._parts.gateway.get(SECRET, meta["name"], meta["namespace"])
        self._parts.executor.apply(copy, live)

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._unsettled.discard(key)
        self._parts.metrics.forget(key)
        self._touch(self.claims.drop(key))

    def _touch(self, names_of_nodes: Iterable[str]) -> None:
        for name in sorted(names_of_nodes):
            self._enqueue(node_key(name))

    # -- a node ----------------------------------------------------------------------------------------------

    def _node(self, key: Key) -> float | None:
        node = self._parts.gateway.get(NODE, key.name)
        if node is None or "deletionTimestamp" in node["metadata"]:
            return None
        live = self._parts.gateway.get(NODE_WEIGHT_CACHE, key.name)
        if live is not None and "deletionTimestamp" in live["metadata"]:
            return _UNKNOWN_NEEDS_SECONDS
        self._ensure_lease(node)
        standing, carried = _standing(live), nodes.warm_labels(node)
        wanted, labels = self._needs_of(key.name, standing, carried, shrink=True)
        kept = self._needs_of(key.name, standing, carried, shrink=False)
        known = (wanted, labels) == kept or self._needs_known()
        # Read again: a deployment planned since the first look counts as known now, and may need what is here.
        wanted, labels = self._needs_of(key.name, standing, carried, shrink=known)
        self._parts.executor.apply(nodes.cache_object(node, wanted), live)
        if carried != labels:
            self._parts.executor.label_node(nodes.label_object(node, labels))
        return None if known else _UNKNOWN_NEEDS_SECONDS

    def _needs_of(
        self, node: str, standing: Claim, carried: frozenset[str], *, shrink: bool
    ) -> tuple[Claim, frozenset[str]]:
        """What the node shall hold and carry as labels, by the claims of now."""
        claims = self.claims.of_node(node)
        labels = frozenset(label for claim in claims for label in claim.labels)
        return nodes.node_spec(claims, standing, shrink=shrink), labels if shrink else labels | carried

    def _needs_known(self) -> bool:
        """Whether every deployment that exists, by a fresh list, has been planned."""
        found = self._parts.gateway.list(DIFFUSION_DEPLOYMENT).items
        return self.claims.shrinkable(
            (deployment_key(obj["metadata"]["namespace"], obj["metadata"]["name"]), obj["metadata"]["uid"])
            for obj in found
            if "deletionTimestamp" not in obj["metadata"]
        )

    def _ensure_lease(self, node: Object) -> None:
        lease = nodes.lease_object(node, self._parts.namespace)
        if self._parts.gateway.get(LEASE, lease["metadata"]["name"], self._parts.namespace) is None:
            self._parts.executor.apply(lease, None)

    # -- leftovers -------------------------------------------------------------------------------------------

    def sweep_secrets(self) -> int:
        """Deletes copies of credentials that no source refers to any more; how many."""
        if not self._needs_known():
            return 0
        used, gone = self.claims.source_ids(), 0
        for secret in self._parts.gateway.list(SECRET, self._parts.agent_namespace).items:
            identity = (secret["metadata"].get("labels") or {}).get(SOURCE_LABEL)
            if identity is None or identity in used:
                continue
            gone += self._parts.executor.delete(
                SECRET,
                secret["metadata"]["name"],
                self._parts.agent_namespace,
                lambda found: (
                    (found["metadata"].get("labels") or {}).get(SOURCE_LABEL) not in self.claims.source_ids()
                ),
            )
        return gone


def _standing(live: Object | None) -> Claim:
    if live is None:
        return Claim()
    facts = observe.read_cache(live, None)
    return Claim(facts.spec.sources, facts.spec.entries)


def _owned_by(obj: Object, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or ())


def _soonest(desired: Desired) -> float | None:
    times = [desired.recheck_seconds] if desired.recheck_seconds is not None else []
    found = {condition["type"]: condition for condition in desired.status["conditions"]}
    if found[names.USING_CACHE]["reason"] == "Unreported" and desired.status.get("readyReplicas"):
        times.append(_UNREPORTED_SECONDS)
    return min(times, default=None)
