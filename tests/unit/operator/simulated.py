"""A node with its agent, simulated, by the rules of the agent's own package.

It resolves what is listed, builds what is pinned, keeps on disk what it has built.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dlo_api.identity import digest_of, node_lease_name
from dlo_api.names import AGENT_FIELD_MANAGER
from dlo_api.v1alpha1 import NodeWeightCacheSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import LEASE, NODE_WEIGHT_CACHE

GIB = 2**30


@dataclass
class Content:
    """What sources hold, by the last part of their path: digest, or a reason why they cannot be read."""

    digests: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    heads: tuple[int, ...] = (4,)

    def digest(self, name: str) -> str:
        """Digest of a source's files."""
        return self.digests.get(name, digest_of(name))


def source_name(source: NodeSource) -> str:
    """The last part of a source's path."""
    directory = source.source.directory
    return directory.path if directory is not None else "remote"


@dataclass
class Agent:
    """The agent of one node.

    Attributes:
        disk: input keys of what lies on the disk.
        builds: input keys built, in order.
        broken: reason by which every build fails; empty for none.
        alive: whether it does anything.
        idle: whether it builds nothing.
        refusal: reason that entries which are not there have, beside Pending.
        breaks: kinds of entries whose builds fail, if any do.
        lazy: kinds of entries that it never comes to build.
        blind: it says nothing of sources yet; `blank`: nor of entries.
    """

    cluster: Gateway
    node: str
    content: Content
    namespace: str
    root: str = "/var/cache/dlo"
    gid: int = 4242
    free: int = 100 * GIB
    disk: set[str] = field(default_factory=set)
    builds: list[str] = field(default_factory=list)
    broken: str = ""
    other_bytes: bool = False
    storage: str = ""
    alive: bool = True
    idle: bool = False
    refusal: str = ""
    beats: int = 0
    breaks: str = "LayoutFiles"
    max_map_count: int = 65_530
    lazy: str = ""
    blind: bool = False
    blank: bool = False
    warm_budget: int = 64 * GIB

    def step(self, *, most: int = 100) -> bool:
        """One turn of its loop, building at most so many entries; whether its status changed."""
        if not self.alive:
            return False
        self._beat()
        obj = self.cluster.get(NODE_WEIGHT_CACHE, self.node)
        if obj is None:
            return False
        spec = NodeWeightCacheSpec.model_validate_json(json.dumps(obj.get("spec", {})))
        sources = [self._source(source) for source in spec.sources]
        entries = []
        for entry in spec.entries:
            pin = next((s.pin.digest for s in spec.sources if s.id == entry.source_id), "")
            key = self.key(entry, pin)
            stuck = bool(self._fails(entry) or self.storage or self.idle or self.refusal)
            stuck = stuck or entry.kind in self.lazy
            if pin and key not in self.disk and not stuck and most > 0:
                most -= 1
                self.disk.add(key)
                self.builds.append(key)
            if not self.blank:
                entries.append(self._entry(entry, key, pin))
        status: dict[str, Any] = {
            "observedGeneration": obj["metadata"]["generation"],
            "agentVersion": "test",
            "root": {"path": self.root, "gid": self.gid, "freeBytes": self.free, "totalBytes": 200 * GIB},
            "memory": {
                "totalBytes": 64 * GIB,
                "warmBudgetBytes": self.warm_budget,
                "maxMapCount": self.max_map_count,
            },
            "sources": sources,
            "entries": entries,
        }
        if self.storage:
            status["conditions"] = [
                {
                    "type": "StorageHealthy",
                    "status": "False",
                    "reason": self.storage,
                    "message": "the marker file is missing",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ]
        if obj.get("status") == status:
            return False
        identity = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": {"name": self.node}}
        self.cluster.apply_status({**identity, "status": status}, manager=AGENT_FIELD_MANAGER)
        return True

    def key(self, entry: NodeEntry, pin: str) -> str:
        """The input key of an entry: by its bytes, not by who asks."""
        return digest_of(
            [
                *(pin, entry.kind, entry.component, entry.tensor_size, entry.tensor_rank, entry.dtype),
                *([entry.select] if entry.select == "All" else []),
            ]
        )

    def _fails(self, entry: NodeEntry) -> bool:
        return bool(self.broken) and entry.kind in self.breaks

    def _beat(self) -> None:
        lease = self.cluster.get(LEASE, node_lease_name(self.node), self.namespace)
        if lease is None:
            return
        self.beats += 1
        moved = datetime.fromtimestamp(self.beats, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        meta = {"name": self.node, "namespace": self.namespace, "uid": lease["metadata"]["uid"]}
        self.cluster.apply(
            {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": meta,
                "spec": {"holderIdentity": self.node, "renewTime": moved},
            },
            manager=AGENT_FIELD_MANAGER,
        )

    def _source(self, source: NodeSource) -> Object:
        name = source_name(source)
        if self.blind:
            return {"id": source.id}
        if name in self.content.reasons:
            return {
                "id": source.id,
                "reason": self.content.reasons[name],
                "message": f"{name} cannot be read",
            }
        digest = digest_of("other") if self.other_bytes else self.content.digest(name)
        if source.pin.digest and source.pin.digest != digest:
            return {"id": source.id, "reason": "SourceMismatch", "message": "other bytes"}
        return {
            "id": source.id,
            "revision": name,
            "digest": digest,
            "files": 9,
            "bytes": 12 * 2**20,
            "architecture": "FluxTransformer2DModel",
            "headCounts": list(self.content.heads),
            "components": [
                {
                    "name": "transformer",
                    "bytes": 8 * 2**20,
                    "blocks": 4,
                    "largestBlockBytes": 2**20,
                    "residentBytes": 2**20,
                }
            ],
            "restBytes": 4 * 2**20,
        }

    def _entry(self, entry: NodeEntry, key: str, pin: str) -> Object:
        found: Object = {"id": entry.id, "kind": entry.kind}
        if entry.component is not None:
            found["component"] = entry.component
        if not pin:
            return {**found, "phase": "Pending"}
        if key in self.disk:
            return {
                **found,
                "phase": "Ready",
                "inputKey": key,
                "contentDigest": digest_of([key, "content"]),
                "manifestSha256": digest_of([key, "manifest"]),
                "bytes": 4 * 2**20,
            }
        if self._fails(entry):
            phase = "Quarantined" if self.broken == "IntegrityFailed" else "Failed"
            return {**found, "phase": phase, "reason": self.broken, "message": "it did not work"}
        if self.refusal:
            return {**found, "phase": "Pending", "reason": self.refusal, "message": "it cannot be held"}
        return (
            {**found, "phase": "Pending"}
            if self.idle
            else {**found, "phase": "Building", "bytes": 100, "doneBytes": 1}
        )
