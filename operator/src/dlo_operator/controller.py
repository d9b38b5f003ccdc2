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
from dlo_api.identity import node_lease_name
from dlo_api.names import OPERATOR_FIELD_MANAGER
from dlo_kube.errors import Conflict, Denied, Invalid
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import (
    DIFFUSION_DEPLOYMENT,
    LEASE,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SECRET,
    kind_of,
)

from dlo_operator import nodes, observe
from dlo_operator.claims import ClaimBook, Version
from dlo_operator.events import Recorder, transitions, urgent
from dlo_operator.executor import Executor, status_differs
from dlo_operator.gather import SOURCE_LABEL, Gathered, Gatherer
from dlo_operator.heartbeats import Heartbeats
from dlo_operator.keys import Key, deployment_key, node_key
from dlo_operator.metrics import Metrics
from dlo_operator.mirror import OUR_LABELS, OURS, Mirror
from dlo_operator.mounts import MountBook
from dlo_operator.pace import CALMEST, PACE, Pace
from dlo_operator.reconcile.plan import Desired, NodeClaim, plan
from dlo_operator.reconcile.record import Claim

#: Refusals that are nobody's to correct: the namespace goes, or the operator's own token does.
_PASSING = frozenset({"NamespaceTerminating", "Unauthorized"})
#: While some deployment's needs are unknown, a node that would shrink is looked at again after this long.
_UNKNOWN_NEEDS_SECONDS = 5.0
#: An engine that serves and has not been asked yet, is asked again.
_UNREPORTED_SECONDS = 60.0


@dataclass(frozen=True)
class Parts:
    """What a controller works with."""

    gateway: Gateway
    mirror: Mirror
    heartbeats: Heartbeats
    gatherer: Gatherer
    executor: Executor
    recorder: Recorder
    metrics: Metrics
    now: Callable[[], datetime]
    namespace: str
    agent_namespace: str
    pace: Pace = PACE


class Controller:
    """Reconciles keys. One key is never worked on twice at the same time: the queue sees to that."""

    def __init__(self, parts: Parts, enqueue: Callable[[Key, float], None]) -> None:
        self._parts = parts
        self._enqueue = enqueue
        self._lock = threading.Lock()
        self._unsettled: dict[Key, bool] = {}
        self._told: dict[Key, tuple[datetime, float]] = {}
        self._written: dict[str, datetime] = {}
        self._asked: dict[Key, datetime] = {}
        self.claims = ClaimBook()
        self.mounts = MountBook(parts.gateway, parts.executor)

    def reconcile(self, key: Key) -> float | None:
        """Brings one key to where it should be; seconds after which to look again, or None.

        Raises KubeError and whatever a fault of this program raises; the queue decides about retries.
        """
        return self._deployment(key) if key.kind == "Deployment" else self._node(key)

    def interested(self, node: str, wide: bool) -> frozenset[Key]:
        """Deployments to look at when a node's cache changed: those that claim it, and those that look for room.

        With `wide`, when whether the node can be used at all may have changed: all that are not settled.
        """
        with self._lock:
            return self.claims.claimants(node) | {
                key for key, homeless in self._unsettled.items() if wide or homeless
            }

    # -- a deployment ----------------------------------------------------------------------------------------

    def _deployment(self, key: Key) -> float | None:
        obj = self._parts.mirror.get(DIFFUSION_DEPLOYMENT, key.name, key.namespace)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            self._forget(key)
            return None
        version = _version_of(obj)
        gathered = self._parts.gatherer.deployment(obj)
        desired = plan(gathered.inputs)
        unmounted = self.mounts.put(key, desired.volume_claims)
        self._touch(self.claims.put(key, version, desired.claims))
        if gathered.secret_copy is not None:
            self._copy_secret(gathered.secret_copy)
        error = self._apply_children(gathered, desired)
        if error:
            desired = plan(replace(gathered.inputs, template_error=error))
            self._touch(self.claims.put(key, version, desired.claims))
        later = self._settle(key, obj, desired, asking=gathered.asking)
        if unmounted:
            self.sweep_volumes()
        return _soonest(desired, later)

    def _apply_children(self, gathered: Gathered, desired: Desired) -> str:
        """Applies the children; the server's words when it refuses one."""
        for intent in desired.children:
            live = gathered.standing(intent)
            if live is None:
                self._check_free(intent)
            try:
                self._parts.executor.apply(intent, live)
            except (Invalid, Denied) as refusal:
                if refusal.code in _PASSING:
                    raise
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

    def _check_free(self, intent: Object) -> None:
        """Raises Conflict when a name that a child is about to take belongs to something else by now."""
        kind, meta = kind_of(intent), intent["metadata"]
        if kind not in OURS:
            return
        found = self._parts.mirror.doubt(kind, meta["name"], meta["namespace"])
        if found is not None and not any(
            _owned_by(found, owner["uid"]) for owner in meta.get("ownerReferences") or ()
        ):
            raise Conflict(f"{kind.kind} {meta['name']} was made by something else meanwhile")

    def _settle(self, key: Key, obj: Object, desired: Desired, *, asking: bool) -> float | None:
        """Writes the status, now or after the seconds returned.

        While engines are `asking` for a while more, what they said before stands: after a start, nothing is known of
        any, and a status must not say so for a moment.
        """
        before = (obj.get("status") or {}).get("conditions") or ()
        after = desired.status["conditions"]
        verdicts = {c["type"]: c["status"] for c in after}
        homeless = verdicts[names.CAPACITY_SUFFICIENT] != "True" or not desired.claims
        with self._lock:
            self._unsettled.pop(key, None)
            if verdicts[names.READY] != "True":
                self._unsettled[key] = homeless
        self._parts.metrics.conditions(key, after)
        now, pause = self._parts.now(), self._parts.pace.calm
        if (obj.get("status") or {}).get("observedGeneration") == _version_of(obj).generation:
            # After a start, much is not known for a moment that the status tells already.
            self._told.setdefault(key, (now, pause))
        left = self._waits(key, obj, desired) if asking else 0.0
        if left > 0:
            return left
        self._asked.pop(key, None)
        told = self._told.get(key)
        if told is not None and not urgent(obj.get("status") or {}, desired.status):
            last, waited = told
            left = self._left(last, waited)
            if left > 0 and status_differs(obj, desired.status):
                return left
            # What goes on for long is told less and less often.
            pause = min(2 * waited, CALMEST * pause) if self._left(last, 2 * waited) > 0 else pause
        if self._parts.executor.apply_status(obj, desired.status):
            self._told[key] = now, pause
            self._parts.recorder.record(obj, transitions(before, after))
        return None

    def _waits(self, key: Key, obj: Object, desired: Desired) -> float:
        """Seconds for which a status of a spec that was seen may still wait for engines' answers."""
        before = obj.get("status") or {}
        seen = before.get("observedGeneration") == desired.status["observedGeneration"]
        if not seen or not status_differs(obj, desired.status):
            self._asked.pop(key, None)
            return 0.0
        return self._left(self._asked.setdefault(key, self._parts.now()), self._parts.pace.calm)

    def _copy_secret(self, copy: Object) -> None:
        meta = copy["metadata"]
        live = self._parts.gateway.get(SECRET, meta["name"], meta["namespace"])
        self._parts.executor.apply(copy, live)

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._unsettled.pop(key, None)
        self._told.pop(key, None)
        self._asked.pop(key, None)
        self._parts.metrics.forget(key)
        self._touch(self.claims.drop(key))
        if self.mounts.put(key, frozenset()):
            self.sweep_volumes()

    def _touch(self, names_of_nodes: Iterable[str]) -> None:
        for name in sorted(names_of_nodes):
            self._enqueue(node_key(name), self._parts.pace.settle)

    # -- a node ----------------------------------------------------------------------------------------------

    def _node(self, key: Key) -> float | None:
        node = self._parts.mirror.get(NODE, key.name)
        if node is None or "deletionTimestamp" in node["metadata"]:
            self._written.pop(key.name, None)
            return None
        live = self._parts.mirror.get(NODE_WEIGHT_CACHE, key.name)
        if live is not None and "deletionTimestamp" in live["metadata"]:
            return _UNKNOWN_NEEDS_SECONDS
        early = self._early(key.name)
        if early > 0:
            return early
        self._ensure_lease(node)
        standing, carried = _standing(live), nodes.warm_labels(node)
        wanted = self._needs_of(key.name, standing, carried, shrink=True)
        if wanted != self._needs_of(key.name, standing, carried, shrink=False):
            return self._shrink(key.name)
        self._write(node, live, *wanted)
        return None

    def _shrink(self, name: str) -> float | None:
        """Takes away from a node what nobody needs, from a fresh look at everything that may need it."""
        node = self._parts.gateway.get(NODE, name)
        live = self._parts.gateway.get(NODE_WEIGHT_CACHE, name)
        # A cache that somebody deleted is made anew, whatever labels it has left on its Node.
        if node is None or (live is not None and "deletionTimestamp" in live["metadata"]):
            return _UNKNOWN_NEEDS_SECONDS
        standing, carried = _standing(live), nodes.warm_labels(node)
        used = self._used_by_pods(name, standing)
        known = self._needs_known()
        # Claims are read after that: a deployment planned meanwhile counts as known, and may need what is here.
        planned = self._needs_of(name, standing, carried, shrink=known)
        wanted = self._needs_of(name, standing, carried, shrink=known, used=used)
        self._write(node, live, *wanted)
        return None if known and wanted == planned else _UNKNOWN_NEEDS_SECONDS

    def _write(self, node: Object, live: Object | None, wanted: Claim, labels: frozenset[str]) -> None:
        shrinks = not _standing(live).entry_ids <= wanted.entry_ids
        wrote = self._parts.executor.apply(nodes.cache_object(node, wanted), live, guarded=shrinks)
        if nodes.warm_labels(node) != labels:
            self._parts.executor.label_node(nodes.label_object(node, labels))
            wrote = True
        if wrote:
            self._written[node["metadata"]["name"]] = self._parts.now()

    def _early(self, node: str) -> float:
        """Seconds until the node may be written again; a burst of claims then takes one write, not one for each."""
        last = self._written.get(node)
        if last is None:
            return 0.0
        left = self._left(last, self._parts.pace.node)
        if left <= 0:
            self._written.pop(node, None)
        return left

    def _left(self, last: datetime, pause: float) -> float:
        """Seconds of a pause that are left since `last`; none when the clock was set back meanwhile."""
        gone = (self._parts.now() - last).total_seconds()
        return pause - gone if gone >= 0 else 0.0

    def _needs_of(
        self,
        node: str,
        standing: Claim,
        carried: frozenset[str],
        *,
        shrink: bool,
        used: tuple[NodeClaim, ...] = (),
    ) -> tuple[Claim, frozenset[str]]:
        """What the node shall hold and carry as labels, by the claims of now."""
        claims = self.claims.of_node(node)
        labels = frozenset(label for claim in claims for label in claim.labels)
        # What pods use stays as it stands; how long, and checked since when, is said by whoever claims it now.
        claimed = frozenset(name for each in claims for name in each.claim.entry_ids)
        rest = tuple(NodeClaim(each.claim.only(each.claim.entry_ids - claimed)) for each in used)
        return nodes.node_spec(
            (*claims, *rest), standing, shrink=shrink
        ), labels if shrink else labels | carried

    def _used_by_pods(self, node: str, standing: Claim) -> tuple[NodeClaim, ...]:
        """What engine pods on the node stand on, by a fresh list: one may not be known yet, or not be gone yet.

        Of what stands there: whoever may make a pod can write into it whatever he likes.
        """
        found = self._parts.gateway.list(POD, labels=OUR_LABELS, fields={"spec.nodeName": node}).items
        pods = (observe.read_pod(pod, None) for pod in found)
        return tuple(
            NodeClaim(standing.only(pod.record.claim.entry_ids))
            for pod in pods
            if pod.record is not None and not pod.finished
        )

    def _needs_known(self) -> bool:
        """Whether every deployment that exists, by a fresh list, has been planned as it is specified now."""
        found = self._parts.gateway.heads(DIFFUSION_DEPLOYMENT).items
        metas = (obj["metadata"] for obj in found)
        return self.claims.shrinkable(
            (deployment_key(meta["namespace"], meta["name"]), Version(meta["uid"], meta.get("generation", 0)))
            for meta in metas
            if "deletionTimestamp" not in meta
        )

    def _ensure_lease(self, node: Object) -> None:
        name = node_lease_name(node["metadata"]["name"])
        if self._parts.heartbeats.age(name) is not None:
            return
        lease = nodes.lease_object(node, self._parts.namespace)
        if self._parts.gateway.get(LEASE, name, self._parts.namespace) is None:
            self._parts.executor.apply(lease, None)

    # -- leftovers -------------------------------------------------------------------------------------------

    def sweep_volumes(self) -> int:
        """Deletes volumes of cache roots that no deployment mounts any more; how many."""
        return self.mounts.sweep() if self._needs_known() else 0

    def sweep_secrets(self) -> int:
        """Deletes copies of credentials that no source refers to any more; how many."""
        if not self._needs_known():
            return 0
        used, gone = self.claims.source_ids(), 0
        for secret in self._parts.gateway.list(SECRET, self._parts.agent_namespace).items:
            if not _is_copy(secret) or secret["metadata"]["labels"][SOURCE_LABEL] in used:
                continue
            gone += self._parts.executor.delete(
                SECRET,
                secret["metadata"]["name"],
                self._parts.agent_namespace,
                lambda found: (
                    _is_copy(found)
                    and found["metadata"]["labels"][SOURCE_LABEL] not in self.claims.source_ids()
                ),
            )
        return gone


def _version_of(obj: Object) -> Version:
    """Which deployment, and which of its specs."""
    return Version(obj["metadata"]["uid"], obj["metadata"].get("generation", 0))


def _standing(live: Object | None) -> Claim:
    if live is None:
        return Claim()
    facts = observe.read_cache(live, None)
    return Claim(facts.spec.sources, facts.spec.entries)


def _is_copy(secret: Object) -> bool:
    """Whether a Secret is the operator's copy of a credential."""
    labels = secret["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/managed-by") == OPERATOR_FIELD_MANAGER and SOURCE_LABEL in labels


def _owned_by(obj: Object, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or ())


def _soonest(desired: Desired, status_in: float | None) -> float | None:
    times = [seconds for seconds in (desired.recheck_seconds, status_in) if seconds is not None]
    found = {condition["type"]: condition for condition in desired.status["conditions"]}
    if found[names.USING_CACHE]["reason"] == "Unreported" and desired.status.get("readyReplicas"):
        times.append(_UNREPORTED_SECONDS)
    return min(times, default=None)
