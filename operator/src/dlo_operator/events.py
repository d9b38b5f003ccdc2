"""What of a changed status is news: what has to be told at once, and what is worth an Event.

An Event's name follows from the transition, so that saying it twice is refused by the API server. Events are a
courtesy: losing one must not fail a reconcile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from dlo_api import conditions as names
from dlo_api.identity import digest_of
from dlo_api.names import OPERATOR_FIELD_MANAGER
from dlo_kube.errors import KubeError
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import EVENT

_TOLD: Final = frozenset(
    {names.ACCEPTED, names.SOURCE_RESOLVED, names.CACHE_READY, names.USING_CACHE, names.READY}
)
#: Reasons that are ordinary on the way and no news.
_ORDINARY: Final = frozenset(
    {
        "Warming",
        "Hashing",
        "PodsPending",
        "RollingOut",
        "AgentNotReady",
        "Pending",
        "Suspended",
        "Unreported",
        "Deferred",
        "NotAccepted",
    }
)
#: Conditions that people and scripts wait for.
_DECISIVE: Final = frozenset({names.ACCEPTED, names.READY, names.STALLED})
_NOTE: Final = 1024

Condition = Mapping[str, Any]


def transitions(before: Iterable[Condition], after: Iterable[Condition]) -> tuple[Condition, ...]:
    """What somebody may want to act on: that it is ready, failures that are news, and that one of these has ended.

    What happens on the way of every deployment is none: conditions show it, and a fleet's events would push others out.
    """
    known = {condition.get("type"): condition for condition in before}
    told: list[Condition] = []
    for condition in after:
        old = known.get(condition["type"], {})
        same = (old.get("status"), old.get("reason")) == (condition["status"], condition["reason"])
        if same or condition["type"] not in _TOLD:
            continue
        if condition["status"] == "True":
            if old.get("status") != "True" and (condition["type"] == names.READY or failing(old)):
                told.append(condition)
        elif failing(condition):
            told.append(condition)
    # What Ready copies up from another condition is said once.
    reasons = {c["reason"] for c in told if c["type"] != names.READY}
    return tuple(
        c for c in told if c["type"] != names.READY or c["status"] == "True" or c["reason"] not in reasons
    )


def failing(condition: Condition) -> bool:
    """Whether it is not True for a reason that is news."""
    return condition.get("status") in ("False", "Unknown") and condition.get("reason") not in _ORDINARY


def urgent(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a reader waits for what is new in a status: that the spec was seen, that it is ready, that it fails.

    Words, counts and steps on the ordinary way are not: they are written once in a while, and with what is urgent.
    """
    return bool(_waited_for(before) != _waited_for(after))


def _waited_for(status: Mapping[str, Any]) -> Any:
    conditions = [c for c in status.get("conditions", ()) if c.get("type") in names.DEPLOYMENT_CONDITIONS]
    verdicts = {c["type"]: c.get("status") for c in conditions if c["type"] in _DECISIVE}
    faults = {c["type"]: c.get("reason") for c in conditions if c["type"] in _TOLD and failing(c)}
    return status.get("observedGeneration"), verdicts, faults


class Recorder:
    """Writes Events about DiffusionDeployments."""

    def __init__(self, gateway: Gateway, identity: str, now: Callable[[], datetime]) -> None:
        self._gateway = gateway
        self._identity = identity
        self._now = now

    def record(self, obj: Object, told: Iterable[Condition]) -> None:
        """Writes an Event for each condition."""
        meta = obj["metadata"]
        for condition in told:
            about = [meta["uid"], condition["type"], condition["status"], condition["reason"]]
            name = digest_of([*about, condition["lastTransitionTime"], condition.get("observedGeneration")])[
                :16
            ]
            event = {
                "apiVersion": EVENT.api_version,
                "kind": EVENT.kind,
                "metadata": {"name": f"{meta['name']}.{name}", "namespace": meta["namespace"]},
                "eventTime": self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "reportingController": OPERATOR_FIELD_MANAGER,
                "reportingInstance": self._identity,
                "action": "Reconcile",
                "reason": condition["reason"],
                "type": "Normal" if condition["status"] == "True" else "Warning",
                "note": f"{condition['type']}: {condition.get('message', '')}"[:_NOTE],
                "regarding": {
                    "apiVersion": obj["apiVersion"],
                    "kind": obj["kind"],
                    "name": meta["name"],
                    "namespace": meta["namespace"],
                    "uid": meta["uid"],
                },
            }
            try:
                self._gateway.create(event)
            except KubeError:
                continue
