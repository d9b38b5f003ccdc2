"""PURE: one answer for `/v1/engine/status` from the shares of all ranks.

Numbers that no rank reports stay absent. The backing is the worst that any rank got.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from dlo_engine.config import Backing, EngineConfig

_ORDER: tuple[str, ...] = ("Resident", *(kind for kind in get_args(Backing) if kind != "Resident"))
_SUMMED = ("registeredBytes", "pssBytes")
_ENTRY = ("component", "coordinate", "inputKey", "manifestSha256", "bytes", *_SUMMED)
_START = ("mapMs", "verifyMs", "registerMs", "importMs", "warmupMs")
_LAST = ("steps", "computeMs", "copyMs", "waitMs", "copiedBytes")

Share = Mapping[str, Any]
"""What one rank's runtime reports."""


def engine_status(
    config: EngineConfig, shares: Mapping[int, Share], last_ranks: Sequence[int]
) -> dict[str, Any]:
    """The status document; `shares` by global rank, `last_ranks` those of the last finished request."""
    return {
        "model": config.model_name,
        "topology": {"tensor": config.tensor, "data": config.data, "world": config.world},
        "device": config.device,
        "offload": {
            "mode": config.mode,
            "transfer": config.transfer,
            "residentLayers": config.resident_layers,
        },
        "backing": worst_backing(shares),
        "entries": _entries(share for _, share in sorted(shares.items())),
        "start": _largest(_only(_START, share.get("start") or {}) for share in shares.values()),
        "lastRequest": _last_request([shares[rank] for rank in last_ranks if rank in shares]),
    }


def worst_backing(shares: Mapping[int, Share]) -> dict[str, Any]:
    """`{kind, fallbackCode, verified}` of the rank that got least; verified if all ranks are."""
    backings = [share["backing"] for _, share in sorted(shares.items())]
    worst = max(backings, key=lambda backing: _ORDER.index(backing["kind"]))
    codes = [code for backing in [worst, *backings] if (code := backing.get("fallbackCode"))]
    return {
        "kind": worst["kind"],
        "fallbackCode": codes[0] if codes else None,
        "verified": all(backing.get("verified", False) for backing in backings),
    }


def _entries(shares: Iterable[Share]) -> list[dict[str, Any]]:
    """Entries once per input key, the bytes that each worker holds summed."""
    merged: dict[str, dict[str, Any]] = {}
    for share in shares:
        for entry in share.get("entries") or ():
            known = merged.get(entry["inputKey"])
            if known is None:
                merged[entry["inputKey"]] = _only(_ENTRY, entry)
                continue
            for name in _SUMMED:
                if name in entry:
                    known[name] = known.get(name, 0) + entry[name]
    return list(merged.values())


def _only(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The documented members; a runtime may report more."""
    return {name: values[name] for name in names if name in values}


def _largest(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The slowest rank's figure, name by name."""
    result: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            result[name] = max(value, result.get(name, value))
    return result


def _last_request(shares: Sequence[Share]) -> dict[str, float] | None:
    """Times of the slowest rank, copied bytes of all ranks of the last request; None before the first."""
    parts = [_only(_LAST, share["lastRequest"]) for share in shares if share.get("lastRequest")]
    if not parts:
        return None
    result = _largest(parts)
    if any("copiedBytes" in part for part in parts):
        result["copiedBytes"] = sum(part.get("copiedBytes", 0) for part in parts)
    return result
