"""kopf as the source of events, and nothing more: handlers put keys into the queue.

Low-level event handlers keep no state on objects and add no finalizer; what they miss, the full listings find.
Must not reconcile, read the API or block.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import kopf
from dlo_api.names import GROUP
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    NODE,
    NODE_WEIGHT_CACHE,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
)

from dlo_operator.reconcile.workload import ENGINE_NAME

#: Kinds that are watched whole, and those of which only our own objects are.
_WHOLE: Final = (DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, NODE)
_OURS: Final = (POD, DEPLOYMENT, SERVICE, POD_DISRUPTION_BUDGET)
_OUR_SELECTOR: Final = f"app.kubernetes.io/name={ENGINE_NAME}"

Tell = Callable[[dict[str, Any], bool], None]
Problem = Callable[[], str]


def registry(tell: Tell, problem: Problem, login: Callable[..., Any]) -> kopf.OperatorRegistry:
    """The handlers: `tell(object, deleted)` for each event, `problem()` for the probe (empty: none)."""
    made = kopf.OperatorRegistry()

    async def on_event(*, event: Any, **_: Any) -> None:
        tell(dict(event["object"]), event.get("type") == "DELETED")

    for kind in (*_WHOLE, *_OURS):
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
    made.queueing.worker_limit = 64
    made.execution.max_workers = 8
    made.posting.enabled = False
    made.persistence.finalizer = f"{GROUP}/finalizer"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    made.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    made.peering.standalone = True
    made.scanning.disabled = True
    for kind in _OURS:
        group, _, version = kind.api_version.rpartition("/")
        made.watching.label_selectors[group, version, kind.plural] = _OUR_SELECTOR
    return made
