"""An engine ends because an entry's bytes are wrong: its node's agent has to check them, and nobody else's."""

from __future__ import annotations

from itertools import permutations

import pytest
from dlo_api.v1alpha1.node_weight_cache import NodeEntry
from dlo_kube.gateway import Object
from dlo_kube.kinds import NODE_WEIGHT_CACHE, POD
from dlo_operator.reconcile.record import Claim, merge_claims
from unit.operator.kubelets import CRASHED
from unit.operator.world import NAMESPACE, World

LINE = (
    "Corrupt: entry 0123: tensor a.weight differs from what was published — it is built again once reported"
)


def doubts(world: World) -> dict[str, set[str]]:
    """By node, since when its entries must have been checked."""
    return {
        node: {
            entry.get("verifiedAfter", "")
            for entry in world.object(NODE_WEIGHT_CACHE, node)["spec"]["entries"]
        }
        for node in world.agents
    }


@pytest.mark.parametrize("line", [LINE, LINE.replace("Corrupt", "BadEntry")])
def test_entries_count_only_once_checked_after_an_engine_found_them_wrong(line: str) -> None:
    world = World()
    world.create(changes={"spec.replicas": 1})
    world.kubelets.crash = line
    world.settle()
    pod = next(iter(world.cluster.objects(POD)))
    found = doubts(world)
    assert found.pop(pod["spec"]["nodeName"]) == {CRASHED}
    assert all(since <= {""} for since in found.values())
    # The record in the template is the deployment's, not a node's: nothing is rolled by a doubt.
    assert CRASHED not in pod["metadata"]["annotations"]["dlo.dev/cache-record"]
    # Checked or built again, the engine starts, and the doubt is over.
    world.kubelets.crash = ""
    world.cluster.remove(POD, pod["metadata"]["name"], NAMESPACE)
    world.settle()
    assert world.condition("Ready")[0] == "True"
    assert all(since <= {""} for since in doubts(world).values())


def test_the_doubt_is_over_when_the_same_pods_engine_runs_again() -> None:
    """The container was restarted in its pod, which still stands on the entries."""
    world = World()
    world.create(changes={"spec.replicas": 1})
    world.kubelets.crash = LINE
    world.settle()
    pod = next(iter(world.cluster.objects(POD)))
    assert {CRASHED} in doubts(world).values()

    def recover(obj: Object) -> None:
        obj["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        container = obj["status"]["containerStatuses"][0]
        container.update(ready=True, state={"running": {"startedAt": CRASHED}})

    world.kubelets.crash = ""
    world.cluster.edit(POD, pod["metadata"]["name"], recover, NAMESPACE)
    world.settle()
    assert all(since <= {""} for since in doubts(world).values())


def test_a_shorter_retention_reaches_entries_that_pods_use() -> None:
    world = World()
    world.create()
    world.settle()
    world.change("spec.cache.retentionSeconds", 20)
    world.settle()
    found = [
        entry["retentionSeconds"]
        for node in world.agents
        for entry in world.object(NODE_WEIGHT_CACHE, node)["spec"].get("entries", ())
    ]
    assert set(found) == {20}


def test_merged_claims_keep_the_longest_retention_and_the_latest_doubt() -> None:
    def claim(retention: int, doubt: str | None) -> Claim:
        entry = NodeEntry(
            id="e1", source_id="5e", kind="Files", retention_seconds=retention, verified_after=doubt
        )
        return Claim((), (entry,))

    early, late = "2026-03-01T10:00:00Z", "2026-03-01T10:00:01Z"
    for claims in permutations([claim(5, late), claim(60, None), claim(10, early)]):
        (merged,) = merge_claims(claims).entries
        assert (merged.retention_seconds, merged.verified_after) == (60, late)


def test_any_other_end_doubts_nothing() -> None:
    world = World()
    world.create(changes={"spec.replicas": 1})
    world.kubelets.crash = "PortInUse: port 8000 is taken"
    world.settle()
    assert all(since <= {""} for since in doubts(world).values())
