"""kopf as the source of events, and nothing more: handlers put keys into the queue.

Low-level event handlers keep no state on objects and add no finalizer; what they miss, the full listings find.
Must not reconcile, read the API or block.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from typing import Any, Final

import kopf
from dlo_api.names import GROUP
from prometheus_client import Counter

from dlo_operator.mirror import OUR_LABELS, OURS, kinds

_OUR_SELECTOR: Final = ",".join(f"{name}={value}" for name, value in sorted(OUR_LABELS.items()))
_NAMES: Final = {kind.plural: kind.kind for kind in kinds()}
_RECONNECTS: Final = (
    (re.compile(r"Restarting the watch-stream for ([a-z]+)\."), "Expired"),
    (re.compile(r"Watch-stream for ([a-z]+)\..* is inactive, reconnecting"), "Silent"),
)

Tell = Callable[[dict[str, Any], bool], None]
Problem = Callable[[], str]


def registry(tell: Tell, problem: Problem, login: Callable[..., Any]) -> kopf.OperatorRegistry:
    """The handlers: `tell(object, deleted)` for each event, `problem()` for the probe (empty: none)."""
    made = kopf.OperatorRegistry()

    async def on_event(*, event: Any, **_: Any) -> None:
        tell(dict(event["object"]), event.get("type") == "DELETED")

    for kind in kinds():
        group, _, version = kind.api_version.rpartition("/")
        kopf.on.event(group, version, kind.plural, id=f"tell-{kind.plural}", registry=made)(on_event)

    async def probe(**_: Any) -> str:
        found = problem()
        if found:
            # Any other kind of error is tried again inside the probe, which then hangs instead of failing.
            raise kopf.PermanentError(found)
        return "ok"

    kopf.on.probe(id="operator", registry=made)(probe)
    kopf.on.login(registry=made)(login)
    return made


class _Reconnects(logging.Filter):
    """Counts what kopf says of its watches, which it tells in words alone; lets through what is not for debugging."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record goes on."""
        words = record.getMessage()
        for pattern, cause in _RECONNECTS:
            found = pattern.match(words)
            if found is not None:
                self._counter.labels(_NAMES.get(found[1], found[1]), cause).inc()
        return record.levelno > logging.DEBUG


def count_reconnects(counter: Counter) -> None:
    """Counts watches that begin anew out of order: by kind, and `Expired` or `Silent`."""
    log = logging.getLogger("kopf._cogs.clients.watching")
    for earlier in tuple(log.filters):
        if isinstance(earlier, _Reconnects):
            log.removeFilter(earlier)
    log.setLevel(logging.DEBUG)
    log.addFilter(_Reconnects(counter))


class _NoDiffs(kopf.DiffBaseStorage):
    """No handler asks what has changed in an object, for which kopf would copy each one it is told of."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> Any:
        """Nothing of the object."""
        del body, extra_fields
        return {}

    def fetch(self, *, body: kopf.Body) -> Any:
        """Nothing was kept."""
        del body
        return {}

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: Any) -> None:
        """Nothing is kept."""
        del body, patch, essence


def settings(rng: random.Random) -> kopf.OperatorSettings:
    """kopf's settings: streams that end, requests that end, and nothing written on objects."""
    made = kopf.OperatorSettings()
    made.watching.inactivity_timeout = 70.0
    # A whole number: it goes into the URL as it is, and the API server refuses 300.0.
    made.watching.server_timeout = 300
    made.watching.client_timeout = 330.0
    made.watching.connect_timeout = 10.0
    made.watching.chunk_size = 500
    made.networking.request_timeout = 30.0
    made.networking.connect_timeout = 10.0
    # About five minutes in all, jittered; then the process ends and starts again, which is cheap.
    made.networking.error_backoffs = [
        seconds * (0.75 + 0.5 * rng.random()) for seconds in (1, 1, 2, 3, 5, 8, 13, 21, 30, 45, 60, 60, 60)
    ]
    # A worker keeps its place for the idle time after its object's last event: with the default of 5 s, the 65th
    # object that changes would wait so long for one of 64 places.
    made.queueing.worker_limit = 256
    made.queueing.idle_timeout = 0.05
    made.execution.max_workers = 8
    made.posting.enabled = False
    made.persistence.finalizer = f"{GROUP}/finalizer"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    made.persistence.diffbase_storage = _NoDiffs()
    made.peering.standalone = True
    made.scanning.disabled = True
    for kind in OURS:
        group, _, version = kind.api_version.rpartition("/")
        made.watching.label_selectors[group, version, kind.plural] = _OUR_SELECTOR
    return made
