"""What the fake adds to the contract: faults, counts, lost history, the garbage collector, other people's edits."""

from __future__ import annotations

import pytest
from contract.gateway import deployment, node_cache
from dlo_kube.errors import Expired, Unavailable
from dlo_kube.gateway import Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, NODE_WEIGHT_CACHE, POD, SECRET
from fakes.kube import FakeCluster


def _child(name: str, *owners: Object) -> Object:
    references = [
        {"kind": o["kind"], "name": o["metadata"]["name"], "uid": o["metadata"]["uid"]} for o in owners
    ]
    meta = {"name": name, "namespace": "default", "ownerReferences": references}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta}


@pytest.mark.parametrize("after", [False, True])
def test_the_nth_write_fails(after: bool) -> None:
    """Before it takes effect, or after: an answer that is lost is the harder case."""
    cluster = FakeCluster()
    cluster.fail(2, Unavailable("lost"), after=after)
    for number in (1, 2, 3):
        cluster.get(SECRET, "x", "default")
        if number == 2:
            with pytest.raises(Unavailable, match="lost"):
                cluster.apply(_child(f"s-{number}"), manager="m")
        else:
            cluster.apply(_child(f"s-{number}"), manager="m")
    stored = {obj["metadata"]["name"] for obj in cluster.objects(SECRET)}
    assert stored == ({"s-1", "s-2", "s-3"} if after else {"s-1", "s-3"})
    assert cluster.writes == {("apply", "Secret"): 3}


def test_collector_takes_what_has_lost_all_owners() -> None:
    """Over several generations; not while one owner is left, and not what never had one."""
    cluster = FakeCluster()
    one, two = (cluster.create(deployment("default")) for _ in range(2))
    child = cluster.create(_child("child", one))
    cluster.create(_child("grandchild", child))
    cluster.create(_child("shared", one, two))
    cluster.create(_child("free"))
    assert cluster.collect() == 0
    cluster.remove(DIFFUSION_DEPLOYMENT, one["metadata"]["name"], "default")
    assert cluster.collect() == 2
    assert {obj["metadata"]["name"] for obj in cluster.objects(SECRET)} == {"shared", "free"}


def test_a_running_watch_expires_with_its_history() -> None:
    """As the server says it in mid-stream."""
    cluster = FakeCluster()
    version = cluster.list(NODE_WEIGHT_CACHE).resource_version
    stream = cluster.watch(NODE_WEIGHT_CACHE, resource_version=version, timeout_seconds=5)
    cluster.apply(node_cache(), manager="m")
    assert next(stream).type == "ADDED"
    cluster.compact()
    with pytest.raises(Expired):
        next(stream)


def test_others_edit_and_put() -> None:
    """A kubelet writes a pod's status; that counts as no call of ours, and objects are the caller's own."""
    cluster = FakeCluster()
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "default"}, "spec": {}}
    cluster.put({**pod, "status": {"phase": "Pending"}})
    cluster.edit(POD, "p", lambda obj: obj["status"].update(phase="Running"), "default")
    found = cluster.get(POD, "p", "default")
    assert found is not None
    assert found["status"] == {"phase": "Running"}
    assert found["metadata"]["generation"] == 1
    found["status"]["phase"] = "mine"
    assert cluster.objects(POD)[0]["status"] == {"phase": "Running"}
    assert cluster.writes == {}
    assert [call.verb for call in cluster.calls] == ["get"]
