"""One deployment as the policies look at it: inputs, and what was worked out from them once. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dlo_api.v1alpha1.node_weight_cache import NodeEntry

from dlo_operator.reconcile.entries import holds_all
from dlo_operator.reconcile.inputs import CacheFacts, DeploymentInputs, NodeFacts, PodFacts, Shortlist
from dlo_operator.reconcile.placement import Needs, Placed
from dlo_operator.reconcile.record import Record
from dlo_operator.reconcile.sources import Resolution


@dataclass(frozen=True)
class Verdict:
    """One condition's state: status, reason and words."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""


@dataclass(frozen=True)
class View:
    """What policies judge.

    Attributes:
        inputs: as read.
        refused: why the spec cannot be acted on; None when it can.
        shortlist: the nodes that concern it.
        matching: nodes that selector and tolerations admit; `eligible` those that have the GPUs too.
        resolution, entries, needs, placed, record, revision: of the wanted revision, as far as known.
        needed: entries without which its engines may not start; all of them, but for a policy that goes on
            without Layout entries.
        current, updating: revision that serves, and the one that is being warmed or rolled out.
    """

    inputs: DeploymentInputs
    refused: Verdict | None = None
    shortlist: Shortlist = field(default_factory=Shortlist)
    matching: tuple[NodeFacts, ...] = ()
    eligible: tuple[NodeFacts, ...] = ()
    resolution: Resolution | None = None
    entries: tuple[NodeEntry, ...] = ()
    needed: tuple[NodeEntry, ...] = ()
    needs: Needs = field(default_factory=Needs)
    placed: Placed = field(default_factory=Placed)
    record: Record | None = None
    revision: str | None = None
    current: str | None = None
    updating: str | None = None

    @property
    def minimum(self) -> int:
        """Warm nodes that make the cache ready."""
        return self.inputs.spec.cache.prewarm.min_ready_nodes if self.inputs.spec is not None else 1

    @property
    def warm(self) -> bool:
        """Whether enough nodes hold every entry."""
        return bool(self.entries) and len(self.placed.ready) >= self.minimum

    @property
    def holders(self) -> tuple[str, ...]:
        """Chosen nodes that hold all that engines may not start without."""
        if self.needed == self.entries:
            return self.placed.ready
        caches = self.inputs.caches
        return tuple(n for n in self.placed.desired if n in caches and holds_all(caches[n], self.needed))

    @property
    def startable(self) -> bool:
        """Whether enough nodes hold what engines may not start without."""
        return bool(self.needed) and len(self.holders) >= self.minimum

    def cache(self, node: str) -> CacheFacts | None:
        """The cache of a node."""
        return self.inputs.caches.get(node)

    @property
    def near(self) -> Mapping[str, CacheFacts]:
        """The caches that have to do with its source or entries."""
        caches = self.inputs.caches
        return {name: caches[name] for name in sorted(self.shortlist.near) if name in caches}

    @property
    def new_pods(self) -> tuple[PodFacts, ...]:
        """Pods of the wanted revision that are not on their way out."""
        return tuple(
            pod
            for pod in self.inputs.pods
            if pod.revision == self.revision and not pod.deleting and not pod.finished
        )
