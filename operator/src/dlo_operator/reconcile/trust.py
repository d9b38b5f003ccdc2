"""Which records of templates and pods may be acted on. Pure.

A record stands in a namespace, where everybody who may make pods can write one. What it asks nodes to fetch and to
build is therefore taken only as far as nothing new is asked by it: sources that this namespace may name, with pins
and credentials that the operator itself has given out, and entries of these. An untrusted record is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dlo_api.identity import entry_id
from dlo_api.v1alpha1.node_weight_cache import NodeSource, Pin
from dlo_api.wanted import id_in_namespace, secret_of_source

from dlo_operator.reconcile.inputs import DeploymentInputs
from dlo_operator.reconcile.record import Claim, Record


def trusted(inputs: DeploymentInputs) -> DeploymentInputs:
    """The same inputs without the records that may not be acted on."""
    judged: list[tuple[Claim, bool]] = []

    def only(record: Record | None) -> Record | None:
        if record is None:
            return None
        # Pods of one revision carry equal records: each is judged once.
        good = next((verdict for claim, verdict in judged if claim == record.claim), None)
        if good is None:
            good = _good(record.claim, inputs)
            judged.append((record.claim, good))
        return record if good else None

    workload = inputs.workload
    return replace(
        inputs,
        workload=replace(workload, record=only(workload.record)) if workload is not None else None,
        pods=tuple(replace(pod, record=only(pod.record)) for pod in inputs.pods),
    )


def root_known(record: Record, roots: frozenset[str]) -> bool:
    """Whether some node keeps its cache where the record says; also while no node has said anything."""
    return not roots or record.root in roots


def _good(claim: Claim, inputs: DeploymentInputs) -> bool:
    sources = {source.id: source for source in claim.sources}
    return all(_source(source, inputs) for source in claim.sources) and all(
        entry.id == entry_id(entry) and entry.source_id in sources for entry in claim.entries
    )


def _source(source: NodeSource, inputs: DeploymentInputs) -> bool:
    if source.id != id_in_namespace(source.source, source.variant, inputs.namespace):
        return False
    copies = {"", f"dlo-source-{source.id}"} if secret_of_source(source.source) is not None else {""}
    return source.secret_name in copies and _pinned_before(source.id, source.pin, inputs)


def _pinned_before(identity: str, pin: Pin, inputs: DeploymentInputs) -> bool:
    """Whether the operator gave out this pin: it stands in a node's list, or it did for this deployment."""
    caches = inputs.caches
    names = caches if inputs.shortlist is None else inputs.shortlist.near & caches.keys()
    given = [caches[name].sources[identity].pin for name in names if identity in caches[name].sources]
    standing = [other for other in given if other.digest]
    if standing:
        return pin in standing
    status: Mapping[str, Any] = inputs.status.get("revision") or {}
    return pin.digest in ("", status.get("sourceDigest"))
