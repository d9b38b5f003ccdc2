"""The objects of one node: its NodeWeightCache, heartbeat Lease and labels. Pure rendering and merging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dlo_api.identity import node_lease_name
from dlo_api.names import OPERATOR_FIELD_MANAGER, label
from dlo_kube.gateway import Object
from dlo_kube.kinds import LEASE, NODE, NODE_WEIGHT_CACHE

from dlo_operator.reconcile.plan import NodeClaim
from dlo_operator.reconcile.record import Claim, merge_claims

WARM_PREFIX: Final = label("warm-")
MOST_ENTRIES: Final = 256
MOST_SOURCES: Final = 64


def node_spec(claims: Iterable[NodeClaim], standing: Claim, *, shrink: bool) -> Claim:
    """What the node shall hold: all claims, and what stands there already unless it may shrink.

    Where that is more than an object can list, what stands comes first.
    """
    wanted = [claim.claim for claim in claims]
    merged = merge_claims([*wanted, *(() if shrink else (standing,))])
    known = standing.entry_ids
    entries = sorted(merged.entries, key=lambda entry: (entry.id not in known, entry.id))[:MOST_ENTRIES]
    used = {entry.source_id for entry in entries}
    sources = sorted(merged.sources, key=lambda source: (source.id not in used, source.id))[:MOST_SOURCES]
    listed = {source.id for source in sources}
    return Claim(
        tuple(sorted(sources, key=lambda source: source.id)),
        tuple(sorted((e for e in entries if e.source_id in listed), key=lambda entry: entry.id)),
    )


def cache_object(node: Object, spec: Claim) -> Object:
    """The NodeWeightCache, owned by its Node."""
    return {
        "apiVersion": NODE_WEIGHT_CACHE.api_version,
        "kind": NODE_WEIGHT_CACHE.kind,
        "metadata": {
            "name": node["metadata"]["name"],
            "labels": {"app.kubernetes.io/managed-by": OPERATOR_FIELD_MANAGER},
            "ownerReferences": [_owner(node)],
        },
        "spec": {
            "sources": [source.to_json() for source in spec.sources],
            "entries": [entry.to_json() for entry in spec.entries],
        },
    }


def lease_object(node: Object, namespace: str) -> Object:
    """The heartbeat before its first beat; the agent owns everything but the reference to the Node."""
    return {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.kind,
        "metadata": {
            "name": node_lease_name(node["metadata"]["name"]),
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": OPERATOR_FIELD_MANAGER},
            "ownerReferences": [_owner(node)],
        },
    }


def label_object(node: Object, labels: Iterable[str]) -> Object:
    """The labels of ours that the Node shall carry, and no others of ours."""
    meta = node["metadata"]
    return {
        "apiVersion": NODE.api_version,
        "kind": NODE.kind,
        "metadata": {
            "name": meta["name"],
            "uid": meta["uid"],
            "labels": dict.fromkeys(sorted(labels), "true"),
        },
    }


def warm_labels(node: Object) -> frozenset[str]:
    """The warmth labels that the Node carries."""
    return frozenset(key for key in node["metadata"].get("labels") or {} if key.startswith(WARM_PREFIX))


def _owner(node: Object) -> dict[str, Any]:
    return {
        "apiVersion": NODE.api_version,
        "kind": NODE.kind,
        "name": node["metadata"]["name"],
        "uid": node["metadata"]["uid"],
    }
