"""The operator's parts put together. The only module that wires; starts nothing and reads no setting itself."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import structlog
from dlo_kube.errors import KubeError
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE, Kind
from dlo_obs.logs import describe, where
from prometheus_client import CollectorRegistry

from dlo_operator.controller import Controller, Parts
from dlo_operator.errors import Response, reason_of, response_to, retry_after
from dlo_operator.events import Recorder
from dlo_operator.executor import Executor
from dlo_operator.facts import mirror_views
from dlo_operator.feed import Feed
from dlo_operator.gather import Engines, Gatherer
from dlo_operator.heartbeats import Heartbeats
from dlo_operator.keys import Key, deployment_key, node_key
from dlo_operator.metrics import Metrics
from dlo_operator.mirror import Mirror, kinds
from dlo_operator.pace import PACE, Pace
from dlo_operator.queue import Queue, Taken
from dlo_operator.settings import Settings

_log = structlog.get_logger(__name__)
_FIRST_SECONDS: Mapping[Response, float] = {
    Response.SOON: 0.1,
    Response.BACK_OFF: 0.5,
    Response.SLOW: 15.0,
}


#: Full lists in a row that show changes of which a watch that told nothing should have told.
_MUTE_LISTS = 2
#: H2: the probe is red within two minutes of a standstill.
_STUCK_SECONDS = 90.0


class Clock:
    """The process's clocks."""

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps."""
        return time.monotonic()

    def now(self) -> datetime:
        """The time of day."""
        return datetime.now(UTC)


@dataclass
class Operator:
    """A queue, a controller, and what feeds and watches them."""

    gateway: Gateway
    mirror: Mirror
    settings: Settings
    clock: Clock
    queue: Queue
    controller: Controller
    heartbeats: Heartbeats
    metrics: Metrics
    feed: Feed
    pace: Pace
    known: frozenset[Key] = frozenset()
    answered: float = 0.0
    told: Counter[str] = field(default_factory=Counter)
    mute: Counter[str] = field(default_factory=Counter)

    def work(self, taken: Taken) -> None:
        """Reconciles one key and tells the queue how it went; never raises what a reconcile raises."""
        key, kind = taken.key, taken.key.kind
        self.metrics.queued.labels(kind).observe(taken.waited)
        began = self.clock.monotonic()
        try:
            again_in = self.controller.reconcile(key)
        except Exception as error:
            self._failed(key, error)
        else:
            self.queue.done(key, again_in)
            self.metrics.reconciles.labels(kind, "Done").inc()
        finally:
            self.metrics.duration.labels(kind).observe(self.clock.monotonic() - began)

    def _failed(self, key: Key, error: Exception) -> None:
        seconds = self.queue.failed(
            key, at_least=retry_after(error), first=_FIRST_SECONDS[response_to(error)]
        )
        self.metrics.reconciles.labels(key.kind, "Failed").inc()
        self.metrics.errors.labels(key.kind, reason_of(error)).inc()
        self.metrics.retries.labels(key.kind).inc()
        _log.warning(
            "Could not reconcile",
            key=str(key),
            code=reason_of(error),
            error=describe(error),
            where="" if isinstance(error, KubeError) else where(error),
            retry_seconds=round(seconds, 3),
        )

    def tell(self, obj: Object, deleted: bool) -> None:
        """Takes one event of a watch."""
        self._alive(obj["kind"])
        self.told[obj["kind"]] += 1
        if self.mirror.take(obj, deleted=deleted):
            delay = 0.0 if deleted or _specified(obj) else self.pace.settle
            self.enqueue(self.feed.keys(obj, deleted=deleted), delay)
        else:
            self.feed.heard(obj, deleted=deleted)

    def look_at(self, obj: Object) -> None:
        """Wants looked at whom an object concerns of which something was found out beside the API."""
        self.enqueue(self.feed.concerned(obj, deleted=False))

    def _alive(self, kind: str) -> None:
        """The watch of a kind is known to work."""
        self.metrics.watch_activity.labels(kind).set(self.clock.now().timestamp())

    def resync(self) -> None:
        """Corrects the mirror by full lists, and looks at everything that exists or did. Raises KubeError."""
        for kind in kinds():
            self.correct(kind)
        found = {deployment_key(*place) for place in self.mirror.places(DIFFUSION_DEPLOYMENT)}
        found |= {node_key(name) for _, name in self.mirror.places(NODE)}
        self.enqueue(found | self.known | self.controller.claims.deployments())
        self.known = frozenset(found)
        self.answered = self.clock.monotonic()

    def correct(self, kind: Kind) -> None:
        """Corrects the mirror of one kind by a full list. Raises KubeError.

        A list that shows nothing new says that the watch works, however quiet it is. One that does, after a watch
        that told nothing at all since the list before, twice in a row, says that it sleeps.
        """
        changed, gone = self.mirror.refresh(kind)
        self.answered = self.clock.monotonic()
        self.metrics.relists.labels(kind.kind, "Resync").inc()
        missed = bool(changed or gone)
        if not missed:
            self._alive(kind.kind)
        listed_before = kind.kind in self.told
        self.mute[kind.kind] = (
            self.mute[kind.kind] + 1 if missed and listed_before and not self.told[kind.kind] else 0
        )
        self.told[kind.kind] = 0
        if gone:
            self.metrics.ghosts.labels(kind.kind).inc(len(gone))
        for objects, deleted in ((changed, False), (gone, True)):
            for obj in objects:
                self.enqueue(self.feed.concerned(obj, deleted=deleted))

    def compare_watches(self) -> None:
        """Compares what the watch of DiffusionDeployments told with what there is. Raises KubeError.

        Of no other kind: there may be ten objects of it for each of these, and every resync compares them anyway.
        A change of theirs that no watch told is found then, five minutes late; a user who changes a spec waits for it.
        """
        listed = self.gateway.heads(DIFFUSION_DEPLOYMENT).items
        missed, gone = self.feed.compare(DIFFUSION_DEPLOYMENT.kind, listed)
        if missed:
            self.correct(DIFFUSION_DEPLOYMENT)
        else:
            self._alive(DIFFUSION_DEPLOYMENT.kind)
        self.enqueue(gone)
        self.answered = self.clock.monotonic()

    def problem(self) -> str:
        """Why this process should be started again; empty when it should not."""
        oldest, silent = self.queue.oldest(), self.clock.monotonic() - self.answered
        self.metrics.unfinished.set(oldest)
        for kind, depth in self.queue.depth().items():
            self.metrics.depth.labels(kind).set(depth)
        if oldest > _STUCK_SECONDS:
            return f"a key has been due for {oldest:.0f} s and no worker took it"
        if silent > _STUCK_SECONDS:
            return f"no answer from the API server for {silent:.0f} s"
        mute = sorted(kind for kind, times in self.mute.items() if times >= _MUTE_LISTS)
        if self.feed.asleep or mute:
            kinds_asleep = ", ".join(mute) or DIFFUSION_DEPLOYMENT.kind
            return f"a watch is asleep: a listing shows what it did not tell of {kinds_asleep}"
        return ""

    def look_at_heartbeats(self) -> None:
        """Wants every deployment looked at that a heartbeat concerns which stopped or came back. Raises KubeError."""
        changed = self.heartbeats.refresh()
        self.answered = self.clock.monotonic()
        for node in sorted(changed):
            self.queue.add(node_key(node))
            self.enqueue(self.controller.interested(node, True))

    def enqueue(self, keys: Iterable[Key], delay: float = 0.0) -> None:
        """Wants these keys looked at, after `delay` seconds; an earlier wish stays."""
        for key in sorted(keys):
            self.queue.add(key, delay)


def _specified(obj: Mapping[str, Any]) -> bool:
    """Whether it is a deployment of which the newest spec has not been answered in its status."""
    observed = (obj.get("status") or {}).get("observedGeneration")
    return bool(obj["kind"] == DIFFUSION_DEPLOYMENT.kind and observed != obj["metadata"].get("generation"))


def assemble(
    gateway: Gateway,
    settings: Settings,
    *,
    clock: Clock,
    engines: Engines,
    rng: random.Random,
    metrics: Metrics | None = None,
    pace: Pace = PACE,
) -> Operator:
    """The operator on this gateway; starts nothing. Its first `resync` has to come before any `work`."""
    queue = Queue(clock.monotonic, rng)
    metrics = metrics or Metrics(CollectorRegistry())
    mirror = Mirror(gateway, mirror_views(), clock.monotonic)
    heartbeats = Heartbeats(gateway, settings.plan.namespace, clock.monotonic)
    parts: dict[str, Any] = {
        "gateway": gateway,
        "mirror": mirror,
        "heartbeats": heartbeats,
        "gatherer": Gatherer(gateway, mirror, settings.plan, heartbeats, engines, clock.now),
        "executor": Executor(gateway, mirror),
        "pace": pace,
        "recorder": Recorder(gateway, settings.identity, clock.now),
        "metrics": metrics,
        "now": clock.now,
        "namespace": settings.plan.namespace,
        "agent_namespace": settings.plan.agent_namespace,
    }
    controller = Controller(Parts(**parts), queue.add)
    feed = Feed(controller.interested, controller.claims.deployments)
    made = Operator(gateway, mirror, settings, clock, queue, controller, heartbeats, metrics, feed, pace)
    made.answered = clock.monotonic()
    return made
