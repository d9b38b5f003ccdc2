"""What the words of agents mean for a deployment: every reason that a node may report has its place here. Pure.

An agent's own word is never lost: where a condition has another one for it, the message begins with it, and
`status.problems` carries it as it is.
"""

from __future__ import annotations

from typing import Final

from dlo_api import conditions as names
from dlo_api.advice import advised

#: Words on a source or an entry that make the spec itself impossible: the reason of `Accepted`.
REFUSED: Final = {
    "UnknownArchitecture": "UnknownArchitecture",
    "UnknownLayout": "UnknownArchitecture",
    "UnknownTensor": "UnsupportedCombination",
    "UnsupportedQuantization": "UnsupportedCombination",
    "NotDivisible": "InvalidTopology",
}
#: Words on a source, beside those that `SourceResolved` has itself.
_OF_SOURCE: Final = {
    "SourceUnsupported": "SourceInvalid",
    "NotUnderstood": "AgentNotReady",
    # A failure of the node's own while it reads: the model may be as good as ever.
    "BuildFailed": "SourceUnreachable",
    "Busy": "SourceUnreachable",
    "Denied": "SourceUnreachable",
    "ReadOnly": "SourceUnreachable",
    "IntegrityFailed": "SourceInvalid",
}
#: Words that say that the node cannot hold the entries: the reason of `CapacitySufficient`.
_NO_ROOM: Final = {
    "InsufficientDisk": "InsufficientDisk",
    "InodesExhausted": "InsufficientDisk",
    "InsufficientHostMemory": "InsufficientHostMemory",
    "MapCountTooLow": "MapCountTooLow",
}
#: Words on an entry, beside those that say something of source or spec: the reason of `CacheReady`.
_OF_ENTRY: Final = {
    "IntegrityFailed": "IntegrityFailed",
    "DiskFull": "DiskFull",
    "InsufficientDisk": "DiskFull",
    "InodesExhausted": "DiskFull",
    "NotUnderstood": "AgentNotReady",
}
_FULL: Final = frozenset({"DiskFull", "InodesExhausted", "InsufficientDisk"})


def of_source(word: str) -> str:
    """The reason of `SourceResolved` for an agent's word; one that is not known may pass by itself."""
    if word in names.REASONS[names.SOURCE_RESOLVED]:
        return word
    return _OF_SOURCE.get(word, "SourceUnreachable")


def blames_source(word: str) -> bool:
    """Whether a word on an entry or source says that the source is what fails."""
    return word.startswith("Source") and word not in REFUSED


def of_storage(word: str) -> str:
    """The reason of `CapacitySufficient` for a root that cannot be used."""
    return "InsufficientDisk" if word in _FULL else "RootNotMounted"


def of_room(word: str) -> str | None:
    """The reason of `CapacitySufficient` for a word on a missing entry; None when it says nothing of room."""
    return _NO_ROOM.get(word)


def of_entry(word: str) -> str:
    """The reason of `CacheReady` for a word on an entry that failed."""
    return _OF_ENTRY.get(word, "BuildFailed")


def spoken(word: str | None, reason: str, message: str | None) -> str:
    """An agent's message with what to do, behind the agent's own word where the condition's reason is another."""
    said = message or ""
    if not word or word == reason:
        return advised(reason, said or reason)
    return advised(word, f"{word}: {said}" if said else word)
