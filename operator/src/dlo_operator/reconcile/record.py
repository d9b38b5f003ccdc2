"""What a revision stands on, written down in its pod template: entries, keys, sizes, the node's root.

The record makes a template a function of the spec and of itself, so that nodes which come and go do not roll
engines, and lets the entries of an old revision be kept for as long as one of its pods is there. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dlo_api.identity import digest_of
from dlo_api.names import label
from dlo_api.v1alpha1.node_weight_cache import ComponentFacts, NodeEntry, NodeSource, SourceStatus
from pydantic import ValidationError

RECORD_ANNOTATION: Final = label("cache-record")
_LABEL_LENGTH: Final = 10


@dataclass(frozen=True)
class Claim:
    """Sources and entries that one revision needs on a node."""

    sources: tuple[NodeSource, ...] = ()
    entries: tuple[NodeEntry, ...] = ()

    @property
    def entry_ids(self) -> frozenset[str]:
        """Ids of the entries."""
        return frozenset(entry.id for entry in self.entries)

    def only(self, ids: frozenset[str]) -> Claim:
        """These of its entries, with the sources that they need."""
        entries = tuple(entry for entry in self.entries if entry.id in ids)
        used = {entry.source_id for entry in entries}
        return Claim(tuple(source for source in self.sources if source.id in used), entries)

    @property
    def warm_label(self) -> str:
        """The label of nodes that hold all of it, pinned as it is."""
        pins = sorted((source.id, source.pin.digest) for source in self.sources)
        return label(f"warm-{digest_of([pins, sorted(self.entry_ids)])[:_LABEL_LENGTH]}")


@dataclass(frozen=True)
class WantedEntry:
    """One entry as the gate looks for it, with its size in bytes."""

    id: str
    kind: str
    component: str | None
    rank: int | None
    coordinate: str | None
    input_key: str
    manifest_sha256: str
    content_digest: str
    bytes: int

    def handover(self) -> dict[str, Any]:
        """The item of the gate's list: a hand-over entry without its folder."""
        return {
            "rank": self.rank,
            "component": self.component,
            "coordinate": self.coordinate,
            "kind": self.kind,
            "inputKey": self.input_key,
            "manifestSha256": self.manifest_sha256,
        }


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model in bytes, for the memory of the pods."""

    components: tuple[ComponentFacts, ...] = ()
    rest_bytes: int | None = None

    @classmethod
    def of(cls, status: SourceStatus) -> ModelSizes:
        """The sizes that an agent found in the headers."""
        return cls(status.components, status.rest_bytes)


@dataclass(frozen=True)
class Record:
    """Everything observed that a template depends on."""

    claim: Claim
    wanted: tuple[WantedEntry, ...]
    sizes: ModelSizes
    root: str
    gid: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of all distinct entries on a node."""
        return sum({entry.input_key: entry.bytes for entry in self.wanted}.values())

    def to_text(self) -> str:
        """The record as it stands in the annotation."""
        value = {
            "sources": [source.to_json() for source in self.claim.sources],
            "entries": [entry.to_json() for entry in self.claim.entries],
            "wanted": [
                {
                    **wanted.handover(),
                    "id": wanted.id,
                    "contentDigest": wanted.content_digest,
                    "bytes": wanted.bytes,
                }
                for wanted in self.wanted
            ],
            "components": [component.to_json() for component in self.sizes.components],
            "restBytes": self.sizes.rest_bytes,
            "root": self.root,
            "gid": self.gid,
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


def read_record(annotations: Mapping[str, str]) -> Record | None:
    """The record in a template's annotations; None when there is none, or none that can be read."""
    try:
        value = json.loads(annotations[RECORD_ANNOTATION])
        return Record(
            claim=Claim(
                tuple(NodeSource.model_validate_json(json.dumps(item)) for item in value["sources"]),
                tuple(NodeEntry.model_validate_json(json.dumps(item)) for item in value["entries"]),
            ),
            wanted=tuple(
                WantedEntry(
                    id=item["id"],
                    kind=item["kind"],
                    component=item["component"],
                    rank=item["rank"],
                    coordinate=item["coordinate"],
                    input_key=item["inputKey"],
                    manifest_sha256=item["manifestSha256"],
                    content_digest=item["contentDigest"],
                    bytes=item["bytes"],
                )
                for item in value["wanted"]
            ),
            sizes=ModelSizes(
                tuple(ComponentFacts.model_validate_json(json.dumps(item)) for item in value["components"]),
                value["restBytes"],
            ),
            root=value["root"],
            gid=value["gid"],
        )
    except (KeyError, TypeError, ValueError, ValidationError):
        return None


def merge_claims(claims: Iterable[Claim]) -> Claim:
    """One claim for all: by id, the longest retention, the latest doubt, a pin before none; in order of ids."""
    sources: dict[str, NodeSource] = {}
    entries: dict[str, NodeEntry] = {}
    for claim in claims:
        for source in claim.sources:
            known_source = sources.get(source.id)
            if known_source is None or (source.pin.digest and not known_source.pin.digest):
                sources[source.id] = source
        for entry in claim.entries:
            known = entries.get(entry.id, entry)
            longest = known if known.retention_seconds >= entry.retention_seconds else entry
            # Moments of the API are UTC with whole seconds, so that their texts are in order of time.
            doubt = max(known.verified_after or "", entry.verified_after or "") or None
            entries[entry.id] = longest.model_copy(update={"verified_after": doubt})
    return Claim(
        tuple(sources[name] for name in sorted(sources)), tuple(entries[name] for name in sorted(entries))
    )
