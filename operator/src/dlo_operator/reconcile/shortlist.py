"""The few nodes that a decision about one deployment has to look at closely, out of all of the cluster. Pure.

With a thousand nodes, looking at each for each decision is most of the work. Whoever keeps an index of the fleet
hands a shortlist in; without one it is worked out here from everything, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dlo_api.eligibility import engines_that_fit
from dlo_api.v1alpha1 import DiffusionDeploymentSpec
from dlo_api.wanted import entries_for, id_of_source

from dlo_operator.reconcile.inputs import CacheFacts, DeploymentInputs, Shortlist
from dlo_operator.reconcile.record import Record
from dlo_operator.reconcile.scheduling import matching


def interest(
    spec: DiffusionDeploymentSpec | None, namespace: str, records: Iterable[Record]
) -> frozenset[str]:
    """Ids of the source and the entries that the decision asks caches for."""
    ids: set[str] = set()
    for record in records:
        ids |= {source.id for source in record.claim.sources} | record.claim.entry_ids
    if spec is not None:
        identity = id_of_source(spec, namespace)
        ids |= {identity, *(entry.id for entry in entries_for(spec, identity))}
    return frozenset(ids)


def roots_of(caches: Mapping[str, CacheFacts]) -> frozenset[str]:
    """Paths at which nodes keep their caches."""
    return frozenset(cache.root for cache in caches.values() if cache.root)


def shortlist_of(inputs: DeploymentInputs) -> Shortlist:
    """The shortlist, from a look at every node and cache."""
    spec, caches = inputs.spec, inputs.caches
    matched = matching(spec, inputs.nodes) if spec is not None else ()
    ids = interest(spec, inputs.namespace, inputs.records)
    eligible = {n.name: n for n in matched if spec is not None and engines_that_fit(spec, n) > 0}
    return Shortlist(
        matching=matched,
        eligible=tuple(eligible.values()),
        by_name=eligible,
        near=frozenset(name for name, cache in caches.items() if not ids.isdisjoint(cache.ids)),
        roots=roots_of(caches),
    )
