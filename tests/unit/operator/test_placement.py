"""Which nodes hold a deployment's entries, and on which its pods may run."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_api.eligibility import engines_that_fit
from dlo_api.v1alpha1 import NodeWeightCacheSpec
from dlo_api.v1alpha1.node_weight_cache import NodeEntryStatus, NodeWeightCacheStatus, RootStatus
from dlo_api.wanted import entries_for
from dlo_operator.reconcile.inputs import CacheFacts, NodeFacts, Taint
from dlo_operator.reconcile.placement import Needs, Placed, choose
from dlo_operator.reconcile.scheduling import matching
from unit.api.manifests import deployment

CPU: dict[str, Any] = {"spec.engine.device": "Cpu"}


def node(name: str, **changes: Any) -> NodeFacts:
    """A node with nothing special."""
    return NodeFacts(name=name, uid=name, labels={"kubernetes.io/hostname": name, "gen": "7"}, **changes)


def placed(changes: dict[str, Any], states: dict[str, str], bound: frozenset[str] = frozenset()) -> Placed:
    """The choice among nodes in these states: cold, listed, building, failed, ready, late, silent, full."""
    spec = deployment(CPU | changes).spec
    entries = entries_for(spec, "5" * 16)
    caches: dict[str, CacheFacts] = {}
    for name, state in states.items():
        phase = {"ready": "Ready", "late": "Ready", "building": "Building", "failed": "Failed"}.get(state)
        found = tuple(
            NodeEntryStatus(
                id=entry.id,
                kind=entry.kind,
                phase=phase,  # type: ignore[arg-type]  # one of the phases
                input_key="a" * 64,
                manifest_sha256="b" * 64,
            )
            for entry in (entries if phase else ())
        )
        caches[name] = CacheFacts(
            name=name,
            spec=NodeWeightCacheSpec(entries=entries if state not in ("cold", "silent", "full") else ()),
            status=None
            if state == "silent"
            else NodeWeightCacheStatus(
                root=RootStatus(path="/r", gid=1, free_bytes=1 if state == "full" else 10**9), entries=found
            ),
            lease_age=None if state == "silent" else 500.0 if state == "late" else 1.0,
        )
    nodes = [node(name) for name in states]
    return choose(spec, "uid", nodes, caches, entries, bound=bound, needs=Needs(1000))


def test_needed_are_replicas_and_spares() -> None:
    """One engine a node on the CPU; two replicas and one spare take three of five nodes."""
    found = placed({"spec.replicas": 2}, dict.fromkeys("abcde", "cold"))
    assert len(found.desired) == 3
    assert found.claimed == found.desired == found.warming


def test_all_takes_all_but_only_some_build_at_once() -> None:
    """The others wait for their turn."""
    prewarm = {"scope": "All", "maxParallelNodes": 2}
    found = placed({"spec.cache.prewarm": prewarm}, dict.fromkeys("abcde", "cold") | {"e": "ready"})
    assert len(found.desired) == 5
    assert found.ready == ("e",)
    assert len(found.claimed) == 3


def test_a_failed_node_does_not_hold_up_others() -> None:
    """It keeps its claim, so that it may recover, and takes nobody's turn."""
    prewarm = {"scope": "All", "maxParallelNodes": 1}
    found = placed({"spec.cache.prewarm": prewarm}, {"a": "failed", "b": "cold", "c": "cold"})
    assert found.failed == ("a",)
    assert len(found.warming) == 1
    assert set(found.claimed) == {"a", *found.warming}


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ({"a": "cold", "b": "ready", "c": "cold"}, {"b"}),
        ({"a": "cold", "b": "building", "c": "cold"}, {"b"}),
        ({"a": "late", "b": "cold"}, {"b"}),
        ({"a": "silent", "b": "cold"}, {"b"}),
        ({"a": "full", "b": "cold"}, {"b"}),
        ({"a": "silent"}, {"a"}),
    ],
    ids=[
        "warm first",
        "what is being warmed stays",
        "not a lost one",
        "not one without agent",
        "room",
        "only one",
    ],
)
def test_the_best_nodes_come_first(states: dict[str, str], chosen: set[str]) -> None:
    """One replica, no spare."""
    assert set(placed({"spec.cache.prewarm": {"spareNodes": 0}}, states).desired) == chosen


def test_a_node_with_a_pod_is_always_taken() -> None:
    """Wherever the scheduler put it."""
    prewarm = {"spareNodes": 0, "maxParallelNodes": 1}
    found = placed({"spec.cache.prewarm": prewarm}, dict.fromkeys("abc", "cold"), frozenset("ab"))
    assert set(found.claimed) == {"a", "b"}


def test_the_choice_is_stable_and_spread() -> None:
    """The same inputs give the same nodes; other deployments get others."""
    spec = deployment(CPU | {"spec.cache.prewarm": {"spareNodes": 0}}).spec
    nodes = [node(f"n{number}") for number in range(20)]
    chosen = [choose(spec, str(uid), nodes, {}, entries_for(spec, "5" * 16)).desired for uid in range(40)]
    again = [
        choose(spec, str(uid), reversed(nodes), {}, entries_for(spec, "5" * 16)).desired for uid in range(40)
    ]
    assert chosen == again
    assert len(set(chosen)) > 10


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        ({}, "a"),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, "ab"),
        ({"tolerations": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}, "ab"),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, "a"),
        ({"tolerations": [{"operator": "Exists"}]}, "abc"),
        ({"nodeSelector": {"kubernetes.io/hostname": "a"}}, "a"),
        ({"nodeSelector": {"gen": "8"}}, ""),
    ],
    ids=str,
)
def test_selectors_and_taints(placement: dict[str, Any], names: str) -> None:
    """As the scheduler reads them; a node that is going is never eligible."""
    nodes = [
        node("a", taints=(Taint("soft", "", "PreferNoSchedule"),)),
        node("b", taints=(Taint("gpu", "yes", "NoSchedule"),)),
        node("c", taints=(Taint("out", "", "NoExecute"),)),
        node("d", deleting=True),
    ]
    spec = deployment({f"spec.placement.{key}": value for key, value in placement.items()}).spec
    assert "".join(found.name for found in matching(spec, nodes)) == names


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        ({"key": "gen", "operator": "In", "values": ["7", "8"]}, True),
        ({"key": "gen", "operator": "NotIn", "values": ["7"]}, False),
        ({"key": "gen", "operator": "Exists"}, True),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "other", "operator": "DoesNotExist"}, True),
        ({"key": "gen", "operator": "Gt", "values": ["6"]}, True),
        ({"key": "gen", "operator": "Lt", "values": ["6"]}, False),
        ({"key": "kubernetes.io/hostname", "operator": "Gt", "values": ["6"]}, False),
        ({"key": "gen", "operator": "Odd"}, False),
    ],
    ids=str,
)
def test_required_affinity(expression: dict[str, Any], matches: bool) -> None:
    """Every operator of the API; one that is not known never matches."""
    required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    spec = deployment({"spec.placement.affinity": affinity}).spec
    assert bool(matching(spec, [node("a")])) is matches


def test_gpus_bound_how_many_engines_fit() -> None:
    """By the product of the degrees; a strange figure is none."""
    spec = deployment({"spec.parallelism": {"tensor": 2, "data": 2}}).spec
    assert engines_that_fit(spec, node("a", allocatable={"nvidia.com/gpu": "8"})) == 2
    assert engines_that_fit(spec, node("a", allocatable={"nvidia.com/gpu": "3"})) == 0
    assert engines_that_fit(spec, node("a", allocatable={"nvidia.com/gpu": "many"})) == 0
    assert engines_that_fit(spec, node("a")) == 0
