"""Identities that operator and agent share: ids of sources and entries, and names tied to a node. Pure.

An id is a short hash of what identifies the thing, so that whoever needs the same thing computes the same id,
and lists of several deployments merge by it. Ids are no content addresses: those are the input keys of the
cache. Must not be told apart by pins, retention or anything else that may differ between two askers.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from dlo_api.v1alpha1.node_weight_cache import NodeEntry
from dlo_api.v1alpha1.source import Source

ID_LENGTH: Final = 16


def digest_of(value: Any) -> str:
    """The sha256 of `value` (JSON values) as canonical JSON: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def source_id(source: Source, *, variant: str = "", secret: str = "") -> str:
    """The id of a source.

    Args:
        source: where the model comes from.
        variant: the weight variant.
        secret: `namespace/name` of the Secret that the source is read with; empty for none. It keeps what one
            tenant's credential fetched apart from what another's does.
    """
    return digest_of({"source": source.to_json(), "variant": variant, "secret": secret})[:ID_LENGTH]


def entry_id(entry: NodeEntry) -> str:
    """The id of an entry by its identifying fields; its own `id` and its retention do not count."""
    return digest_of(
        {
            "sourceId": entry.source_id,
            "kind": entry.kind,
            "component": entry.component,
            "tensorSize": entry.tensor_size,
            "tensorRank": entry.tensor_rank,
            "dtype": entry.dtype,
            "quantization": entry.quantization,
            "select": entry.select,
            "streamed": sorted(entry.streamed),
            "layout": entry.layout,
        }
    )[:ID_LENGTH]


def identified(entry: NodeEntry) -> NodeEntry:
    """The same entry under its own id."""
    return entry.model_copy(update={"id": entry_id(entry)})


def node_lease_name(node: str) -> str:
    """The name of a node's heartbeat Lease, in the operator's namespace."""
    return node
