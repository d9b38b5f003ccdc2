"""The level loop: look at everything, plan, start what is due, report, sleep until something changes.

No turn depends on what an earlier one was told: a missed event costs one turn's wait. The API server may be
away: what is known stays true, builds go on, and nothing is evicted until a live look confirms the object.
Only this thread changes the memory.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import structlog
from dlo_cache.errors import CacheError
from dlo_kube.errors import KubeError
from dlo_kube.gateway import Gateway
from dlo_kube.kinds import NODE_WEIGHT_CACHE

from dlo_agent import ledger as ledger_file
from dlo_agent import memory as remembered
from dlo_agent import references
from dlo_agent.actions import Action, Evict, Verify, Warm
from dlo_agent.board import Board
from dlo_agent.credentials import Credentials
from dlo_agent.executor import Executor, Outcome
from dlo_agent.inventory import Inventory, look_at_disk
from dlo_agent.memory import Memory
from dlo_agent.metrics import Metrics
from dlo_agent.node import filesystem_of, node_facts
from dlo_agent.origins import Origins
from dlo_agent.planner import plan, still_wanted
from dlo_agent.reasons import reason_of
from dlo_agent.report import status_of
from dlo_agent.reporter import Reporter
from dlo_agent.resolve import is_current
from dlo_agent.settings import Settings
from dlo_agent.storage import Storage
from dlo_agent.wanted import Wanted, read_wanted
from dlo_agent.work import Worker, producer
from dlo_agent.world import Fetched, Headway, Policy, StorageProblem, World

IDLE_SECONDS: Final = 10.0
BUSY_SECONDS: Final = 2.0
SAMPLE_SECONDS: Final = 10.0
_SHORTEST_SECONDS: Final = 0.05

_log = structlog.get_logger(__name__)


class Loop:
    """One agent. ``turn`` is one look; ``run`` turns until ``stop``.

    ``clock`` gives seconds since 1970, ``jitter`` a number from 0 up to 1.
    """

    def __init__(
        self,
        settings: Settings,
        gateway: Gateway,
        *,
        clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._settings, self._gateway = settings, gateway
        self._clock, self._jitter = clock, jitter
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._object: dict[str, Any] | None = None
        self._memory, self._saved = Memory(), references.Ledger()
        self._origins = Origins(
            roots=settings.source_roots,
            credentials=Credentials(gateway, settings.secrets_namespace or settings.namespace),
            hub_endpoints=settings.hub_endpoints,
            s3_endpoints=settings.s3_endpoints,
        )
        self._facts = node_facts(settings.host_root or settings.root, settings.gid)
        self._policy = Policy(
            warm_budget_bytes=settings.warm_budget_bytes, scrub_seconds=settings.scrub_seconds
        )
        self._storage = Storage(
            settings.root, lock_timeout_seconds=settings.lock_timeout_seconds, clock=clock
        )
        self._worker: Worker | None = None
        self._inventory: Inventory | None = None
        self._filesystem: str | None = None
        self._sampled: tuple[float, dict[str, Headway]] = (0.0, {})
        self._reporter = Reporter(gateway)
        self._executor = Executor(self._wake.set)
        self.board = Board(clock)
        self.metrics = Metrics(self._facts.agent_version)
        self.storage_problem: StorageProblem | None = None
        self.last_turn = time.monotonic()

    def changed(self, obj: dict[str, Any] | None) -> None:
        """The node's object as it is now; may be called from any thread."""
        self._object = obj
        self._wake.set()

    def run(self) -> None:
        """Turns until ``stop``; then stops what runs and lets go of the root. Raises SecondAgent."""
        try:
            while not self._stop.is_set():
                self._wake.clear()
                pause = self.turn()
                self._wake.wait(pause)
        finally:
            self.close()

    def stop(self) -> None:
        """Ends ``run``; may be called from any thread or a signal handler."""
        self._stop.set()
        self._wake.set()

    def close(self) -> None:
        """Stops what runs and lets go of the root."""
        self._executor.close()
        self._take()
        self._save()
        self._storage.close()

    def turn(self) -> float:
        """One look; returns the seconds until the next one, if nothing happens before."""
        self._take()
        self._look_at_storage()
        obj = self._object
        wanted = self._observe(obj)
        world = self._world(wanted)
        if wanted is not None and world.storage is None:
            self._memory = remembered.only_listed(self._memory, wanted, world.stored)
        self._save()
        self._executor.cancel(lambda action: still_wanted(action, world))
        for action in self._confirmed(plan(world), wanted):
            if self._worker is not None and self._executor.start(action, self._worker.run):
                _log.info("Started an action", **_words(action))
        world = replace(world, running=self._executor.running())
        settled = self._report(obj, world)
        self.metrics.show(world)
        self.last_turn = time.monotonic()
        return self._pause(world, settled)

    @property
    def busy(self) -> bool:
        """Whether anything runs, or has ended and was not looked at yet."""
        return bool(self._executor.running())

    def _take(self) -> None:
        """Takes in what has ended."""
        now = self._clock()
        for outcome in self._executor.take():
            wanted = read_wanted(self._object) if self._object is not None else None
            self._memory = remembered.after(self._memory, outcome, wanted, now, self._jitter())
            self.metrics.seen(outcome, now)
            self._post(outcome)
            key = getattr(outcome.action, "key", None)
            if self._inventory is not None and key is not None:
                self._inventory.forget(key)

    def _post(self, outcome: Outcome) -> None:
        """Success needs no file any more; a failure is told to whoever waits at a gate."""
        action, error = outcome.action, outcome.error
        if error is None:
            self.board.drop(action.entry_ids)
            return
        code, message = remembered.describe(error)
        self.board.fail(action.entry_ids, reason_of(code), message)
        if code == "Unexpected":
            _log.error("An action failed unexpectedly", exc_info=error, **_words(action))
        elif code != "Cancelled":
            _log.warning("An action failed", **_words(action), reason=code, detail=message)

    def _look_at_storage(self) -> None:
        before = self._storage.root
        if before is None and self._executor.running():
            return  # on a root that has gone: it ends first
        self.storage_problem = self._storage.check()
        root = self._storage.root
        if root is before:
            return
        self._inventory, self._worker = None, None
        self.board.attach(root)
        if root is None:
            return
        self._filesystem = filesystem_of(root.path)
        self._inventory = Inventory(root, self._clock)
        self._worker = Worker(
            root=root,
            origins=self._origins,
            board=self.board,
            producer=producer(self._facts.agent_version, self._settings.node),
            layouts=self._settings.layouts,
            headroom_bytes=self._settings.headroom_bytes,
            verify_threads=self._settings.verify_threads,
            lock_waited=self.metrics.lock_waited,
            source_read=self.metrics.source_read,
        )
        try:
            self._saved = ledger_file.load(root)
        except CacheError as error:
            self._storage.close()
            self._worker = self._inventory = None
            self.storage_problem = StorageProblem(reason_of(error.code), error.message)
            return
        layouts = self._settings.layouts
        known = {key: each for key, each in self._saved.resolutions.items() if is_current(each, layouts)}
        self._memory = Memory(replace(self._saved, resolutions=known))
        if self._storage.recovered is not None:
            self.metrics.recovered(self._storage.recovered)

    def _observe(self, obj: dict[str, Any] | None) -> Wanted | None:
        """What is asked for; references go only if a live look shows the same generation."""
        if obj is None:
            return None
        wanted = read_wanted(obj)
        if self._storage.root is None:
            return wanted
        ledger = references.observe(self._memory.ledger, wanted, self._clock())
        if ledger.released.keys() - self._memory.ledger.released.keys() and not self._is_live(wanted):
            return wanted
        self._memory = replace(self._memory, ledger=ledger)
        return wanted

    def _is_live(self, wanted: Wanted) -> bool:
        """Whether the server has this very generation now; False when it does not answer."""
        try:
            live = self._gateway.get(NODE_WEIGHT_CACHE, wanted.name)
        except KubeError as error:
            _log.warning("Put off what needs a live look", reason=error.code)
            return False
        if live is None:
            return False
        meta = live["metadata"]
        return bool(meta["uid"] == wanted.uid and meta.get("generation", 0) == wanted.generation)

    def _confirmed(self, actions: tuple[Action, ...], wanted: Wanted | None) -> tuple[Action, ...]:
        evicts = any(isinstance(action, Evict) for action in actions)
        if not evicts or (wanted is not None and self._is_live(wanted)):
            return actions
        return tuple(action for action in actions if not isinstance(action, Evict))

    def _world(self, wanted: Wanted | None) -> World:
        now = self._clock()
        world = World(
            now=now,
            wanted=wanted,
            ledger=self._memory.ledger,
            failures=self._memory.failures,
            running=self._executor.running(),
            headway=self._headway(now),
            warmed=self._memory.warmed,
            storage=self.storage_problem,
            policy=self._policy,
        )
        root = self._storage.root
        if root is None or self._inventory is None:
            return world
        try:
            stored = self._inventory.read()
            disk = look_at_disk(root, self._filesystem, self._settings.headroom_bytes)
            left = self._worker.stage.leftover() if self._worker is not None else None
        except CacheError as error:
            problem = StorageProblem(reason_of(error.code), error.message)
            self.storage_problem = problem
            return replace(world, storage=problem)
        # Our own checks and warm-ups hold leases too, and are no use.
        ours = {each.key for each in world.running if isinstance(each, Verify | Warm)}
        leased = frozenset(key for key, each in stored.items() if each.leased and key not in ours)
        ledger = references.forget(references.use(world.ledger, leased, now), frozenset(stored))
        self._memory = replace(self._memory, ledger=ledger)
        return replace(world, stored=stored, disk=disk, fetched=left and Fetched(*left), ledger=ledger)

    def _headway(self, now: float) -> dict[str, Headway]:
        """What status may show: a new phase at once, bytes done every ten seconds."""
        at, sampled = self._sampled
        current = self.board.headway()
        if now - at >= SAMPLE_SECONDS:
            self._sampled = (now, current)
            return current
        merged = {
            key: sampled[key] if key in sampled and sampled[key].phase == each.phase else each
            for key, each in current.items()
        }
        self._sampled = (at, merged)
        return merged

    def _save(self) -> None:
        root, ledger = self._storage.root, self._memory.ledger
        if root is None or ledger == self._saved:
            return
        try:
            ledger_file.save(root, ledger)
            self._saved = ledger
        except CacheError as error:
            _log.warning("Could not write the references", reason=error.code)

    def _report(self, obj: dict[str, Any] | None, world: World) -> bool:
        if obj is None or world.wanted is None:
            return True
        status = status_of(world, self._facts, self._reporter.previous(obj))
        return self._reporter.send(obj, status, world.now, self._jitter())

    def _pause(self, world: World, settled: bool) -> float:
        """Until the next thing is due, and never longer than an idle look."""
        longest = BUSY_SECONDS if world.running or not settled else IDLE_SECONDS
        due = [failure.next_attempt - world.now for failure in world.failures.values()]
        soon = [each for each in due if each > 0]
        return max(_SHORTEST_SECONDS, min([longest, *soon]))


def _words(action: Action) -> dict[str, Any]:
    """An action for the log: short, and without anybody's text but our own."""
    words: dict[str, Any] = {"action": type(action).__name__, "why": action.why}
    key = getattr(action, "key", None)
    if key is not None:
        words["entry_key"] = key[:12]
    if action.entry_ids:
        words["entries"] = list(action.entry_ids)
    return words
