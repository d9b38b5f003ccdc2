"""What the agent remembers between two looks, and what the end of an action changes in it. Pure.

The ledger outlives the process; failures and what was warmed do not: a restart tries everything at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dlo_api.v1alpha1.node_weight_cache import NodeEntry
from dlo_cache.errors import Cancelled

from dlo_agent import reasons, references
from dlo_agent.actions import (
    Action,
    Build,
    BuildFiles,
    Evict,
    Forget,
    Quarantine,
    Resolve,
    Sweep,
    Verify,
    Warm,
)
from dlo_agent.executor import Outcome
from dlo_agent.references import Binding, Ledger
from dlo_agent.wanted import Wanted
from dlo_agent.warm import Warmed
from dlo_agent.work import Made, Removed, Resolved, Verified
from dlo_agent.world import Failure, fingerprint

_MESSAGE: Final = 256


@dataclass(frozen=True)
class Memory:
    """Ledger, failures by subject, and when each key was last warmed."""

    ledger: Ledger = field(default_factory=Ledger)
    failures: Mapping[str, Failure] = field(default_factory=dict)
    warmed: Mapping[str, float] = field(default_factory=dict)


def after(memory: Memory, outcome: Outcome, wanted: Wanted | None, now: float, jitter: float) -> Memory:
    """The memory after an action has ended."""
    if outcome.error is None:
        return _succeeded(memory, outcome, wanted, now)
    if isinstance(outcome.error, Cancelled):
        return memory
    return _failed(memory, outcome.action, outcome.error, now, jitter)


def only_listed(memory: Memory, wanted: Wanted, present: Iterable[str]) -> Memory:
    """The memory without failures of what is listed no more, or of entries that are gone."""
    subjects = {f"entry/{each}" for each in wanted.entry_ids}
    subjects |= {f"source/{each}" for each in wanted.sources} | {f"key/{each}" for each in present}
    if memory.failures.keys() <= subjects:
        return memory
    return replace(memory, failures={key: each for key, each in memory.failures.items() if key in subjects})


def describe(error: Exception) -> tuple[str, str]:
    """Code and message of an error; one that nobody expected is named by its type."""
    code = getattr(error, "code", None)
    message = getattr(error, "message", None)
    if isinstance(code, str) and isinstance(message, str):
        hint = getattr(error, "hint", "")
        return code, f"{message} — {hint}" if hint else message
    return "Unexpected", f"{type(error).__name__}: {error}"


def _succeeded(memory: Memory, outcome: Outcome, wanted: Wanted | None, now: float) -> Memory:
    result, ledger = outcome.result, memory.ledger
    failures, warmed = dict(memory.failures), dict(memory.warmed)
    if isinstance(result, Resolved):
        ledger = references.resolve(ledger, result.source_id, result.resolution)
    elif isinstance(result, Made):
        ledger = references.resolve(ledger, result.source_id, result.resolution)
        asked = _asked(outcome.action)
        for entry_id, built in result.built.items():
            entry = (wanted.entry(entry_id) if wanted is not None else None) or asked[entry_id]
            binding = Binding(
                key=built.key,
                basis=result.resolution.basis,
                source_digest=result.resolution.digest,
                retention_seconds=entry.retention_seconds,
                uid=ledger.uid,
            )
            ledger = references.bind(ledger, entry_id, binding, now)
            if not built.reused:
                ledger = references.unverify(ledger, built.key)
    elif isinstance(result, Verified):
        ledger = references.verify(ledger, result.key, now)
    elif isinstance(result, Warmed):
        warmed[result.key] = now
    elif isinstance(result, Removed):
        for key in result.keys:
            warmed.pop(key, None)
            ledger = references.unverify(ledger, key)
        if isinstance(outcome.action, Quarantine):
            failures |= _set_aside(memory, outcome.action, now)
    for subject, _ in _subjects(outcome.action):
        known = failures.get(subject)
        # An integrity failure is over when the bytes were checked, not when they were written again.
        if (
            known is not None
            and known.reason == reasons.INTEGRITY_FAILED
            and not isinstance(result, Verified)
        ):
            failures[subject] = replace(known, next_attempt=now)
        else:
            failures.pop(subject, None)
    return Memory(ledger, failures, warmed)


def _asked(action: Action) -> dict[str, NodeEntry]:
    """The entries as they were listed when their build began."""
    if isinstance(action, Build):
        return {entry.id: entry for entry in action.entries}
    return {action.entry.id: action.entry} if isinstance(action, BuildFiles) else {}


def _set_aside(memory: Memory, action: Quarantine, now: float) -> dict[str, Failure]:
    found = {}
    for entry_id in action.ids:
        attempts = _attempts(memory, f"entry/{entry_id}", "") + 1
        message = action.message[:_MESSAGE]
        found[f"entry/{entry_id}"] = Failure(reasons.INTEGRITY_FAILED, message, attempts, now)
    return found


def _failed(memory: Memory, action: Action, error: Exception, now: float, jitter: float) -> Memory:
    code, message = describe(error)
    reason = reasons.reason_of(code)
    needed = getattr(error, "needed_bytes", 0)
    failures, ledger, warmed = dict(memory.failures), memory.ledger, dict(memory.warmed)
    for subject, mark in _subjects(action):
        attempts = _attempts(memory, subject, mark) + 1
        failures[subject] = Failure(
            reason=reason,
            message=message[:_MESSAGE],
            attempts=attempts,
            next_attempt=now + reasons.pause_seconds(reason, attempts, jitter, code=code),
            fingerprint=mark,
            needed=needed if isinstance(needed, int) else 0,
        )
    if isinstance(action, Verify) and reason == reasons.INTEGRITY_FAILED:
        ledger = references.unverify(ledger, action.key)
        warmed.pop(action.key, None)
    return Memory(ledger, failures, warmed)


def _subjects(action: Action) -> tuple[tuple[str, str], ...]:
    """What an action's failure is remembered for, and the fingerprint of what was asked."""
    if isinstance(action, Resolve):
        return ((f"source/{action.source.id}", fingerprint(action.source)),)
    if isinstance(action, Build | BuildFiles):
        mark = fingerprint(action.source)
        return tuple((f"entry/{entry_id}", mark) for entry_id in action.entry_ids)
    if isinstance(action, Verify):
        return tuple((f"entry/{entry_id}", "") for entry_id in action.ids)
    if isinstance(action, Warm | Evict | Quarantine):
        return ((f"key/{action.key}", ""),)
    assert isinstance(action, Forget | Sweep)  # noqa: S101 - there is no other action
    return ()


def _attempts(memory: Memory, subject: str, mark: str) -> int:
    known = memory.failures.get(subject)
    return known.attempts if known is not None and (not mark or known.fingerprint in ("", mark)) else 0
