"""Writes what a plan means, and nothing that stands already. Decides nothing.

An object is applied when its intent differs from the one that its annotation names, or when it was changed
behind our back; deletes look again first and name the uid they mean.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

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


class Executor:
    """Applies objects under the one field manager."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def apply(self, intent: Object, live: Object | None) -> bool:
        """Makes the object as meant; whether that took a write. Raises what `Gateway.apply` raises."""
        stamped = copy.deepcopy(intent)
        stamped["metadata"].setdefault("annotations", {})[APPLIED] = digest_of(intent)[:16]
        if live is not None and stands(stamped, live):
            return False
        self._gateway.apply(stamped, manager=OPERATOR_FIELD_MANAGER)
        return True

    def label_node(self, labels: Object) -> None:
        """Makes our labels of a Node as meant; others' labels are not looked at."""
        self._gateway.apply(labels, manager=OPERATOR_FIELD_MANAGER)

    def apply_status(self, obj: Object, status: Mapping[str, Any]) -> bool:
        """Makes the status of a DiffusionDeployment as meant, leaving others' conditions alone."""
        if not status_differs(obj.get("status") or {}, status):
            return False
        meta = obj["metadata"]
        self._gateway.apply_status(
            {
                "apiVersion": DIFFUSION_DEPLOYMENT.api_version,
                "kind": DIFFUSION_DEPLOYMENT.kind,
                "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
                "status": dict(status),
            },
            manager=OPERATOR_FIELD_MANAGER,
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
        return self._gateway.delete(
            kind, name, namespace, uid=meta["uid"], resource_version=meta["resourceVersion"]
        )


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


def status_differs(live: Mapping[str, Any], intent: Mapping[str, Any]) -> bool:
    """Whether our part of a status is not as meant."""
    mine = {condition["type"] for condition in intent.get("conditions", ())}
    standing = {
        **live,
        "conditions": [c for c in live.get("conditions", ()) if c.get("type") in mine],
    }
    ordered = {**intent, "conditions": sorted(intent.get("conditions", ()), key=lambda c: str(c["type"]))}
    standing["conditions"].sort(key=lambda c: str(c["type"]))
    return bool(_plain(standing) != _plain(ordered))


def _plain(value: Any) -> Any:
    """A value without empty members, which an API server may or may not keep."""
    if isinstance(value, Mapping):
        return {key: plain for key, item in value.items() if (plain := _plain(item)) not in ({}, [], None)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
