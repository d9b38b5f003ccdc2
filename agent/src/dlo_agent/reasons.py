"""From an error's code to the reason that status carries, and how long to wait after it. Pure.

Reasons are part of the API: they are added, never renamed. Whatever has no row here is ``BuildFailed``, with
the error's own words in the message.
"""

from __future__ import annotations

from typing import Final

HASHING: Final = "Hashing"
INTEGRITY_FAILED: Final = "IntegrityFailed"
INSUFFICIENT_DISK: Final = "InsufficientDisk"
INSUFFICIENT_HOST_MEMORY: Final = "InsufficientHostMemory"
DISK_FULL: Final = "DiskFull"
INODES_EXHAUSTED: Final = "InodesExhausted"
NEWER_FORMAT: Final = "NewerFormat"
NOT_UNDERSTOOD: Final = "NotUnderstood"
SOURCE_NOT_FOUND: Final = "SourceNotFound"
SOURCE_MISMATCH: Final = "SourceMismatch"
BUILD_FAILED: Final = "BuildFailed"
BUSY: Final = "Busy"
ROOT_NOT_MOUNTED: Final = "RootNotMounted"

#: Reasons that room on the disk cures, and nothing else.
SPACE: Final = frozenset({INSUFFICIENT_DISK, DISK_FULL, INODES_EXHAUSTED})

_REASONS: Final = {
    "SourceNotFound": SOURCE_NOT_FOUND,
    "UnknownRoot": SOURCE_NOT_FOUND,
    "RemoteNotFound": SOURCE_NOT_FOUND,
    "UnknownEndpoint": SOURCE_NOT_FOUND,
    "PathLeavesRoot": "SourceUntrusted",
    "SourceUntrusted": "SourceUntrusted",
    "SourceUnauthorized": "SourceUnauthorized",
    "SourceUnreachable": "SourceUnreachable",
    "SourceUnavailable": "SourceUnreachable",
    "SourceAmbiguous": "SourceAmbiguous",
    "SourceInvalid": "SourceInvalid",
    "SourceIncomplete": "SourceIncomplete",
    "SourceMismatch": SOURCE_MISMATCH,
    "SourceChanged": SOURCE_MISMATCH,
    "SourceUnsupported": "SourceUnsupported",
    "UnknownArchitecture": "UnknownArchitecture",
    "UnknownLayout": "UnknownLayout",
    "NotDivisible": "NotDivisible",
    "UnknownTensor": "UnknownTensor",
    "UnsupportedQuantization": "UnsupportedQuantization",
    "InsufficientDisk": INSUFFICIENT_DISK,
    "InsufficientInodes": INODES_EXHAUSTED,
    "DiskFull": DISK_FULL,
    "Corrupt": INTEGRITY_FAILED,
    "NewerFormat": NEWER_FORMAT,
    "Denied": "Denied",
    "UnsafeMode": "Denied",
    "ReadOnly": "ReadOnly",
    "Busy": BUSY,
    "RootNotMounted": ROOT_NOT_MOUNTED,
    "RootNotFound": ROOT_NOT_MOUNTED,
    "FilesystemUnsupported": "LocksUnsupported",
    "RootNotDirectory": "RootBroken",
    "RootBroken": "RootBroken",
}

#: Every reason that a failure can have.
ALL: Final = tuple(sorted({*_REASONS.values(), BUILD_FAILED}))

# Seconds before the second attempt, and the longest wait.
_ORDINARY: Final = (5.0, 300.0)
_SLOW: Final = (60.0, 900.0)
_QUICK: Final = (2.0, 30.0)
_BY_REASON: Final = {
    **dict.fromkeys(("SourceUnauthorized", "SourceUntrusted", "SourceAmbiguous", "SourceMismatch"), _SLOW),
    **dict.fromkeys(("SourceUnsupported", "UnknownArchitecture", "UnknownLayout", "UnknownTensor"), _SLOW),
    **dict.fromkeys(("NotDivisible", "UnsupportedQuantization", NEWER_FORMAT), _SLOW),
    BUSY: _QUICK,
}
# A folder is looked at often; somebody else's server is not asked often for what it does not have.
_BY_CODE: Final = {"RemoteNotFound": _SLOW, "UnknownEndpoint": _SLOW}
_JITTER: Final = 0.25
_MOST_DOUBLINGS: Final = 16


def reason_of(code: str) -> str:
    """The reason for an error's code."""
    return _REASONS.get(code, BUILD_FAILED)


def pause_seconds(reason: str, attempts: int, jitter: float, *, code: str = "") -> float:
    """Seconds to wait after failure number ``attempts`` in a row; ``jitter`` in 0..1 adds up to a quarter.

    The error's ``code`` counts where one reason has causes of several kinds.

    A first integrity failure is rebuilt at once: the bad entry is out of the way, and waiting helps nobody.
    """
    if reason == INTEGRITY_FAILED and attempts <= 1:
        return 0.0
    first, longest = _BY_CODE.get(code) or _BY_REASON.get(reason, _ORDINARY)
    doublings = min(max(attempts, 1) - 1, _MOST_DOUBLINGS)
    return min(first * 2.0**doublings, longest) * (1.0 + _JITTER * jitter)
