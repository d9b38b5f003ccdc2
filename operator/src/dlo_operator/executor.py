"""Writes what a plan means, and nothing that stands already. Decides nothing.

An object is applied when its intent differs from the one that its annotation names, or when it was changed
behind our back; deletes look again first and name the uid they mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, Protocol

from dlo_api.identity import digest_of
from dlo_api.names import OPERATOR_FIELD_MANAGER, label
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, Kind

APPLIED: Final = label("applied")
_SUFFIXES: Final = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{word: Fraction(1000 ** (power + 1)) for power, word in enumerate(("k", "M", "G", "T", "P", "E"))},
    **{f"{word}i": Fraction(1024 ** (power + 1)) for power, word in enumerate("KMGTPE")},
}
_QUANTITY: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([numkMGTPE]|[KMGTPE]i|)")


class Memory(Protocol):
    """Told of every write that went well, so that the next look sees it."""

    def wrote(self, obj: Object) -> None:
        """The object as it is now."""

    def deleted(self, obj: Object) -> None:
        """The object as it was."""


class Executor:
    """Applies objects under the one field manager."""

    def __init__(self, gateway: Gateway, memory: Memory | None = None) -> None:
        self._gateway = gateway
        self._memory = memory

    def apply(self, intent: Object, live: Object | None, *, guarded: bool = False) -> bool:
        """Makes the object as meant; whether that took a write. Raises what `Gateway.apply` raises.

        Args:
            intent: all that we mean of it.
            live: the object as it was read.
            guarded: change that version of that object and no other, since something of it is taken away.
        """
        meta = intent["metadata"]
        notes = {**(meta.get("annotations") or {}), APPLIED: digest_of(intent)[:16]}
        stamped = {**intent, "metadata": {**meta, "annotations": notes}}
        if live is not None and stands(stamped, live):
            return False
        if live is not None and guarded:
            stamped["metadata"].update({name: live["metadata"][name] for name in ("uid", "resourceVersion")})
        self._wrote(self._gateway.apply(stamped, manager=OPERATOR_FIELD_MANAGER))
        return True

    def label_node(self, labels: Object) -> None:
        """Makes our labels of a Node as meant; others' labels are not looked at."""
        self._wrote(self._gateway.apply(labels, manager=OPERATOR_FIELD_MANAGER))

    def apply_status(self, obj: Object, status: Mapping[str, Any]) -> bool:
        """Makes the status of a DiffusionDeployment as meant, leaving others' conditions alone."""
        if not status_differs(obj, status):
            return False
        meta = obj["metadata"]
        self._wrote(
            self._gateway.apply_status(
                {
                    "apiVersion": DIFFUSION_DEPLOYMENT.api_version,
                    "kind": DIFFUSION_DEPLOYMENT.kind,
                    "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
                    "status": dict(status),
                },
                manager=OPERATOR_FIELD_MANAGER,
            )
        )
        return True

    def delete(
        self, kind: Kind, name: str, namespace: str | None, still_meant: Callable[[Object], bool]
    ) -> bool:
        """Deletes an object after a fresh look, if it is still the one that is meant."""
        found = self._gateway.get(kind, name, namespace)
        if found is None or "deletionTimestamp" in found["metadata"] or not still_meant(found):
            return False
        meta = found["metadata"]
        gone = self._gateway.delete(
            kind, name, namespace, uid=meta["uid"], resource_version=meta["resourceVersion"]
        )
        if self._memory is not None:
            self._memory.deleted(found)
        return gone

    def _wrote(self, obj: Object) -> None:
        if self._memory is not None:
            self._memory.wrote(obj)


def stands(intent: Any, live: Any) -> bool:
    """Whether everything in `intent` is in `live`; what others added does not matter.

    A field left out of the intent is seen by the digest in the annotation, not here.
    """
    if isinstance(intent, dict):
        return isinstance(live, dict) and all(
            stands(value, live.get(key)) or (value in ({}, [], "") and key not in live)
            for key, value in intent.items()
        )
    if isinstance(intent, list):
        return (
            isinstance(live, list)
            and len(live) == len(intent)
            and all(stands(mine, theirs) for mine, theirs in zip(intent, live, strict=True))
        )
    return bool(intent == live) or _same_quantity(intent, live)


def _same_quantity(one: Any, other: Any) -> bool:
    """Whether both are the same amount: the API server keeps `0.5` as `500m`."""
    found = [_QUANTITY.fullmatch(str(value)) for value in (one, other) if not isinstance(value, bool)]
    if len(found) != 2 or found[0] is None or found[1] is None:
        return False
    first, second = (Fraction(match[1]) * _SUFFIXES[match[2]] for match in (found[0], found[1]))
    return first == second


def status_differs(obj: Object, intent: Mapping[str, Any]) -> bool:
    """Whether an apply of `intent` would change the status of `obj`.

    It would where something that we mean is not there, and where we own something that we do not mean any more;
    what others have added stays whatever we do. Without a record of owners, all but foreign conditions counts as ours.
    """
    live = obj.get("status") or {}
    if not _holds(intent, live):
        return True
    managed = obj["metadata"].get("managedFields")
    if managed is None:
        mine = {condition["type"] for condition in intent.get("conditions", ())}
        ours = {**live, "conditions": [c for c in live.get("conditions", ()) if c.get("type") in mine]}
        return not _holds(ours, intent)
    return any(
        _given_up((entry.get("fieldsV1") or {}).get("f:status") or {}, intent)
        for entry in managed
        if entry.get("manager") == OPERATOR_FIELD_MANAGER and entry.get("subresource") == "status"
    )


def _holds(intent: Any, live: Any) -> bool:
    """Whether `live` has all of `intent`: members of objects, conditions by their type, other lists whole.

    An API server may or may not keep empty members.
    """
    if isinstance(intent, Mapping):
        return isinstance(live, Mapping) and all(
            _holds_conditions(value, live.get(key) or ())
            if key == "conditions"
            else _holds(value, live.get(key))
            for key, value in intent.items()
            if _plain(value) not in ({}, [], None)
        )
    return bool(_plain(intent) == _plain(live))


def _holds_conditions(intent: Any, live: Any) -> bool:
    standing = {condition.get("type"): condition for condition in live}
    return all(_holds(condition, standing.get(condition["type"])) for condition in intent)


def _given_up(owned: Mapping[str, Any], intent: Any) -> bool:
    """Whether something in a set of owned fields, as `managedFields` writes it, is not in `intent`."""
    for path, below in owned.items():
        kind, _, name = path.partition(":")
        if kind == "f" and isinstance(intent, Mapping):
            if name not in intent or _given_up(below, intent[name]):
                return True
        elif kind == "k" and isinstance(intent, list | tuple):
            keys = json.loads(name)
            item = next((i for i in intent if all(i.get(k) == v for k, v in keys.items())), None)
            if item is None or _given_up(below, item):
                return True
        elif kind in ("f", "k"):
            return True
    return False


def _plain(value: Any) -> Any:
    """A value without empty members, which an API server may or may not keep."""
    if isinstance(value, Mapping):
        return {key: plain for key, item in value.items() if (plain := _plain(item)) not in ({}, [], None)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
