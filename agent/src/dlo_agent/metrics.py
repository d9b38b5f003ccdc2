"""The agent's metrics, in a registry of their own. Names and units are part of what operators build on.

No entry key, digest, path or deployment name is ever a label. Must not decide anything.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from dlo_cache.errors import Cancelled
from dlo_cache.recovery import Recovered
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as Count

from dlo_agent import reasons
from dlo_agent.actions import Build, BuildFiles, Evict, Quarantine, Resolve, Verify
from dlo_agent.executor import Outcome
from dlo_agent.memory import describe
from dlo_agent.work import Made, Resolved, Verified
from dlo_agent.world import State, World, state_of

_SECONDS: Final = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)
DIRECTORY: Final = "directory"


class Metrics:
    """Counters and gauges; ``seen`` is told of every outcome, ``show`` of every world."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        Gauge("dlo_build_info", "Version of the agent.", ["version"], registry=registry).labels(version).set(
            1
        )
        self._bytes = Gauge("dlo_cache_bytes", "Bytes of stored entries.", ["state"], registry=registry)
        self._entries = Gauge("dlo_cache_entries", "Stored entries.", ["state"], registry=registry)
        self._wanted = Gauge("dlo_cache_wanted_entries", "Listed entries.", ["state"], registry=registry)
        self._capacity = Gauge(
            "dlo_cache_capacity_bytes", "Size of the cache's file system.", registry=registry
        )
        self._free = Gauge("dlo_cache_free_bytes", "Bytes that builds may use.", registry=registry)
        self._inodes = Gauge("dlo_cache_inodes_free", "Free inodes.", registry=registry)
        self._requests = Count(
            "dlo_cache_requests", "Listed entries looked for.", ["result"], registry=registry
        )
        self._evictions = Count("dlo_cache_evictions", "Entries evicted.", ["reason"], registry=registry)
        self._gc = Histogram(
            "dlo_cache_gc_duration_seconds", "Time to evict one.", buckets=_SECONDS, registry=registry
        )
        self._fetched = Count("dlo_fetch_bytes", "Source bytes resolved.", ["source_kind"], registry=registry)
        self._fetch = Histogram(
            "dlo_fetch_duration_seconds",
            "Time to resolve a source.",
            ["source_kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._fetch_errors = Count(
            "dlo_fetch_errors", "Failures to resolve or read a source.", ["reason"], registry=registry
        )
        self._inflight = Gauge("dlo_fetch_inflight", "Sources being read.", registry=registry)
        self._verify = Count("dlo_verify", "Verifications.", ["result"], registry=registry)
        self._verified = Count("dlo_verify_bytes", "Bytes verified.", registry=registry)
        self._quarantined = Gauge(
            "dlo_quarantined_entries", "Listed entries set aside and not built again.", registry=registry
        )
        self._scrub = Gauge(
            "dlo_scrub_last_success_timestamp_seconds", "Last verification that passed.", registry=registry
        )
        self._recovery = Count(
            "dlo_recovery_actions", "What a start had to put right.", ["action"], registry=registry
        )

    def recovered(self, found: Recovered) -> None:
        """Counts what the start on a root put right."""
        for action in ("ingest", "trash", "scratch", "modes"):
            self._recovery.labels(action).inc(len(getattr(found, action)))

    def seen(self, outcome: Outcome, now: float) -> None:
        """Counts how an action ended; one that was called off does not count."""
        action, result = outcome.action, outcome.result
        if isinstance(outcome.error, Cancelled):
            return
        if outcome.error is not None:
            self._failed(outcome, reasons.reason_of(describe(outcome.error)[0]))
        elif isinstance(result, Resolved):
            self._fetched.labels(DIRECTORY).inc(result.resolution.facts["bytes"])
            self._fetch.labels(DIRECTORY).observe(outcome.seconds)
        elif isinstance(result, Made):
            for built in result.built.values():
                self._requests.labels("hit" if built.reused else "miss").inc()
        elif isinstance(result, Verified):
            self._verify.labels("ok").inc()
            self._verified.inc(result.bytes)
            self._scrub.set(now)
        elif isinstance(action, Evict):
            self._evictions.labels(action.cause).inc()
            self._gc.observe(outcome.seconds)
        elif isinstance(action, Quarantine):
            self._verify.labels("corrupt").inc()

    def show(self, world: World) -> None:
        """Sets the gauges."""
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
        states = Counter(
            state_of(world, entry)[0] for entry in (world.wanted.entries if world.wanted is not None else ())
        )
        for each in State:
            self._wanted.labels(each.value).set(states[each])
        self._quarantined.set(
            sum(
                failure.reason == reasons.INTEGRITY_FAILED
                for subject, failure in world.failures.items()
                if subject.startswith("entry/")
            )
        )
        self._inflight.set(sum(isinstance(each, Resolve | Build | BuildFiles) for each in world.running))
        if world.disk is not None:
            self._capacity.set(world.disk.total)
            self._free.set(world.disk.free)
            self._inodes.set(world.disk.inodes_free or 0)

    def _failed(self, outcome: Outcome, reason: str) -> None:
        action = outcome.action
        if isinstance(action, Resolve):
            self._fetch_errors.labels(reason).inc()
        elif isinstance(action, Build | BuildFiles):
            self._requests.labels("error").inc(len(action.entry_ids))
            if reason.startswith("Source"):
                self._fetch_errors.labels(reason).inc()
        elif isinstance(action, Verify):
            self._verify.labels("corrupt" if reason == reasons.INTEGRITY_FAILED else "error").inc()
