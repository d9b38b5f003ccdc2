"""The agent's metrics, in a registry of their own. Names and units are part of what operators build on.

No entry key, digest, path or deployment name is ever a label; the node comes from the scrape. What they mean is
in docs/monitoring.md. Must not decide anything.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from dlo_api.v1alpha1.node_weight_cache import NodeSource
from dlo_cache.errors import Cancelled
from dlo_cache.recovery import Recovered
from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector
from prometheus_client import Counter as Count

from dlo_agent import reasons
from dlo_agent.actions import Build, BuildFiles, Evict, Quarantine, Resolve, Verify
from dlo_agent.executor import Outcome
from dlo_agent.memory import describe
from dlo_agent.warm import Warmed
from dlo_agent.work import Made, Removed, Resolved, Verified
from dlo_agent.world import State, World, state_of

_SECONDS: Final = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)
_SOURCE_KINDS: Final = ("directory", "huggingFace", "s3")
_ENTRY_KINDS: Final = ("Layout", "Files")
_SYNC_FAILED: Final = "SyncFailed"


class Metrics:
    """Counters and gauges; ``seen`` is told of every outcome, ``show`` of every world."""

    def __init__(self, version: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._sizes: dict[str, int] = {}
        self._resident_of: dict[str, int] = {}

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def count(name: str, text: str, *labels: str) -> Count:
            return Count(name, text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=_SECONDS, registry=registry)

        ProcessCollector(registry=registry)
        gauge("dlo_build_info", "Always 1; the version of the program.", "version").labels(version).set(1)
        self._turned = gauge(
            "dlo_agent_last_turn_timestamp_seconds", "When the work loop last looked at everything."
        )
        self._renewed = gauge(
            "dlo_agent_lease_renewed_timestamp_seconds",
            "When the node's Lease was last renewed; 0 before the first time.",
        )
        self._usable = gauge("dlo_cache_root_usable", "1 while the cache root can be used, else 0.")
        self._bytes = gauge("dlo_cache_bytes", "Bytes of stored entries.", "state")
        self._entries = gauge("dlo_cache_entries", "Stored entries.", "state")
        self._wanted = gauge("dlo_cache_wanted_entries", "Listed entries.", "state")
        self._failing = gauge(
            "dlo_cache_failing", "Sources, entries and stored keys whose last try failed.", "reason"
        )
        self._capacity = gauge("dlo_cache_capacity_bytes", "Size of the cache's file system.")
        self._free = gauge("dlo_cache_free_bytes", "Bytes that builds may use.")
        self._inodes = gauge("dlo_cache_inodes_free", "Free inodes; NaN where they are not counted.")
        self._resident = gauge(
            "dlo_cache_resident_bytes", "Bytes of entries in the page cache, as their last warm-up saw it."
        )
        self._budget = gauge("dlo_cache_warm_budget_bytes", "Page cache that warm-ups may fill; 0 for none.")
        self._requests = count("dlo_cache_requests", "Listed entries looked for, by how it ended.", "result")
        self._build_seconds = seconds("dlo_cache_build_duration_seconds", "Time of a build pass.", "kind")
        self._built = count("dlo_cache_build_bytes", "Bytes of entries built.", "kind")
        self._build_errors = count("dlo_cache_build_errors", "Build passes that failed.", "reason")
        self._lock_wait = seconds("dlo_cache_lock_wait_seconds", "Wait of a build for its writers' locks.")
        self._evictions = count("dlo_cache_evictions", "Entries evicted.", "reason")
        self._evicted = count("dlo_cache_evicted_bytes", "Bytes of entries evicted.")
        self._gc = seconds("dlo_cache_gc_duration_seconds", "Time to evict one entry.")
        self._fetched = count(
            "dlo_fetch_bytes",
            "Bytes read of sources: hashed in a folder, or fetched over the network.",
            "source_kind",
        )
        self._fetch = seconds("dlo_fetch_duration_seconds", "Time to resolve a source.", "source_kind")
        self._fetch_errors = count(
            "dlo_fetch_errors", "Failures to resolve or read a source.", "source_kind", "reason"
        )
        self._inflight = gauge("dlo_fetch_inflight", "Sources being read now.")
        self._verify = count("dlo_verify", "Verifications.", "result")
        self._verified = count("dlo_verify_bytes", "Bytes verified.")
        self._verify_seconds = seconds("dlo_verify_duration_seconds", "Time to verify one entry.")
        self._quarantined = gauge(
            "dlo_quarantined_entries", "Listed entries set aside and not built again yet."
        )
        self._scrub = gauge(
            "dlo_scrub_last_success_timestamp_seconds", "When a verification last passed; 0 before."
        )
        self._scrub_oldest = gauge(
            "dlo_scrub_oldest_check_timestamp_seconds",
            "When the stored entry checked longest ago was checked; 0 without a checked entry.",
        )
        self._scrub_interval = gauge(
            "dlo_scrub_interval_seconds", "How often every byte is to be checked again."
        )
        self._warmed = count("dlo_warm_bytes", "Bytes brought into the page cache.")
        self._warm_seconds = seconds("dlo_warm_duration_seconds", "Time to warm one entry.")
        self._sync_errors = count("dlo_fsync_errors", "Syncs to the disk that failed; the file was dropped.")
        self._recovery = count("dlo_recovery_actions", "What a start had to put right.", "action")
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """A counter that first appears with its first event hides that event from ``increase``."""
        for result in ("hit", "miss", "wait", "error"):
            self._requests.labels(result)
        for result in ("ok", "corrupt", "error"):
            self._verify.labels(result)
        for cause in ("Retention", "Pressure"):
            self._evictions.labels(cause)
        for action in ("ingest", "trash", "scratch", "modes"):
            self._recovery.labels(action)
        for kind in _ENTRY_KINDS:
            self._built.labels(kind)
            self._build_seconds.labels(kind)
        for kind in _SOURCE_KINDS:
            self._fetched.labels(kind)
            self._fetch.labels(kind)
            for reason in reasons.ALL:
                if reason.startswith("Source"):
                    self._fetch_errors.labels(kind, reason)
        for reason in reasons.ALL:
            self._build_errors.labels(reason)

    def recovered(self, found: Recovered) -> None:
        """Counts what the start on a root put right."""
        for action in ("ingest", "trash", "scratch", "modes"):
            self._recovery.labels(action).inc(len(getattr(found, action)))

    def lock_waited(self, seconds: float) -> None:
        """A build has its writers' locks after so long; may be called from any thread."""
        self._lock_wait.observe(seconds)

    def source_read(self, source: NodeSource, nbytes: int) -> None:
        """So many more bytes of a source were read or fetched; may be called from any thread."""
        self._fetched.labels(source_kind(source)).inc(nbytes)

    def renewed(self, now: float) -> None:
        """The node's Lease was renewed at ``now`` (seconds since 1970)."""
        self._renewed.set(now)

    def seen(self, outcome: Outcome, now: float) -> None:
        """Counts how an action ended; one that was called off does not count."""
        action, result = outcome.action, outcome.result
        if isinstance(outcome.error, Cancelled):
            return
        if outcome.error is not None:
            self._failed(outcome, outcome.error)
        elif isinstance(result, Resolved) and isinstance(action, Resolve):
            self._fetch.labels(source_kind(action.source)).observe(outcome.seconds)
        elif isinstance(result, Made):
            self._made(outcome, result)
        elif isinstance(result, Verified):
            self._verify.labels("ok").inc()
            self._verified.inc(result.bytes)
            self._verify_seconds.observe(outcome.seconds)
            self._scrub.set(now)
        elif isinstance(result, Warmed):
            self._warmed.inc(result.bytes)
            self._warm_seconds.observe(outcome.seconds)
            self._resident_of[result.key] = result.resident
        elif isinstance(action, Evict) and isinstance(result, Removed):
            self._evictions.labels(action.cause).inc()
            self._evicted.inc(sum(self._sizes.get(key, 0) for key in result.keys))
            self._gc.observe(outcome.seconds)
        elif isinstance(action, Quarantine):
            self._verify.labels("corrupt").inc()

    def show(self, world: World) -> None:
        """Sets the gauges."""
        self._turned.set(world.now)
        self._usable.set(world.storage is None)
        self._show_stored(world)
        states = Counter(
            state_of(world, entry)[0] for entry in (world.wanted.entries if world.wanted is not None else ())
        )
        for each in State:
            self._wanted.labels(each.value).set(states[each])
        failing = Counter(failure.reason for failure in world.failures.values())
        for reason in reasons.ALL:
            self._failing.labels(reason).set(failing[reason])
        self._quarantined.set(
            sum(
                failure.reason == reasons.INTEGRITY_FAILED
                for subject, failure in world.failures.items()
                if subject.startswith("entry/")
            )
        )
        self._inflight.set(sum(isinstance(each, Resolve | Build | BuildFiles) for each in world.running))
        self._scrub_interval.set(world.policy.scrub_seconds)
        self._budget.set(world.policy.warm_budget_bytes)
        if world.disk is not None:
            self._capacity.set(world.disk.total)
            self._free.set(world.disk.free)
            inodes = world.disk.inodes_free
            self._inodes.set(float("nan") if inodes is None else inodes)

    def _show_stored(self, world: World) -> None:
        held = world.ledger.held
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for stored in world.stored.values():
            state = "broken" if stored.problem else "referenced" if stored.key in held else "unreferenced"
            sizes[state] += stored.bytes
            counts[state] += 1
        for state in ("referenced", "unreferenced", "broken"):
            self._bytes.labels(state).set(sizes[state])
            self._entries.labels(state).set(counts[state])
        self._sizes = {key: stored.bytes for key, stored in world.stored.items()}
        self._resident_of = {key: each for key, each in self._resident_of.items() if key in world.warmed}
        self._resident.set(sum(self._resident_of.values()))
        checked = [at for key, at in world.ledger.verified.items() if key in world.stored and key in held]
        self._scrub_oldest.set(min(checked, default=0.0))

    def _made(self, outcome: Outcome, result: Made) -> None:
        kind = "Files" if isinstance(outcome.action, BuildFiles) else "Layout"
        new = [built for built in result.built.values() if not built.reused]
        self._requests.labels("miss").inc(len(new))
        self._requests.labels("hit").inc(len(result.built) - len(new))
        if new:
            self._built.labels(kind).inc(sum(built.bytes for built in new))
            self._build_seconds.labels(kind).observe(outcome.seconds)

    def _failed(self, outcome: Outcome, error: Exception) -> None:
        action = outcome.action
        code = describe(error)[0]
        reason = reasons.reason_of(code)
        if code == _SYNC_FAILED:
            self._sync_errors.inc()
        if isinstance(action, Resolve):
            self._fetch_errors.labels(source_kind(action.source), reason).inc()
        elif isinstance(action, Build | BuildFiles):
            result = "wait" if reason == reasons.BUSY else "error"
            self._requests.labels(result).inc(len(action.entry_ids))
            if result == "error":
                self._build_errors.labels(reason).inc()
            if reason.startswith("Source"):
                self._fetch_errors.labels(source_kind(action.source), reason).inc()
        elif isinstance(action, Verify):
            self._verify.labels("corrupt" if reason == reasons.INTEGRITY_FAILED else "error").inc()


def source_kind(source: NodeSource) -> str:
    """Which member a source has: ``directory``, ``huggingFace`` or ``s3``."""
    found = source.source
    given = zip(_SOURCE_KINDS, (found.directory, found.hugging_face, found.s3), strict=True)
    return next((kind for kind, member in given if member is not None), "unknown")
