"""Records that somebody wrote into a pod or a template: nothing is fetched, pinned or mounted by them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dlo_api.identity import entry_id, source_id
from dlo_api.v1alpha1.node_weight_cache import NodeEntry
from dlo_api.v1alpha1.source import Source
from dlo_kube.gateway import Object
from dlo_kube.kinds import DEPLOYMENT, NODE_WEIGHT_CACHE, PERSISTENT_VOLUME, POD
from dlo_operator.reconcile.record import RECORD_ANNOTATION
from dlo_operator.reconcile.revision import REVISION_LABEL
from dlo_operator.reconcile.workload import selector
from unit.api.manifests import manifest
from unit.operator.world import NAMESPACE, World

PRIVATE: dict[str, Any] = {
    "huggingFace": {"repo": "rich/model", "tokenSecretRef": {"name": "hf", "key": "token"}}
}
OTHER: dict[str, Any] = {"huggingFace": {"repo": "some/model"}}
PIN = {"revision": "abc", "digest": "f" * 64}


def record_of(world: World) -> dict[str, Any]:
    """The record in the Deployment's template."""
    template = world.object(DEPLOYMENT)["spec"]["template"]
    value: dict[str, Any] = json.loads(template["metadata"]["annotations"][RECORD_ANNOTATION])
    return value


def asking(world: World, source: dict[str, Any], namespace: str, copy: bool) -> str:
    """The record with another source in it, all ids as they should be, as a deployment of a namespace has them."""
    record = record_of(world)
    model = Source.model_validate_json(json.dumps(source))
    secret = f"{namespace}/hf" if "tokenSecretRef" in source["huggingFace"] else ""
    identity = source_id(model, secret=secret)
    name = f"dlo-source-{identity}" if copy else ""
    record["sources"] = [{"id": identity, "source": source, "variant": "", "secretName": name, "pin": PIN}]
    return with_entries(record, identity)


def with_entries(record: dict[str, Any], identity: str) -> str:
    """The record with its entries moved to a source."""
    for entry in record["entries"]:
        entry["sourceId"] = identity
        entry["id"] = entry_id(NodeEntry.model_validate_json(json.dumps(entry)))
    return json.dumps(record)


def forge(world: World, record: str, node: str = "node-1", name: str = "digits") -> None:
    """A pod that anybody may make, with the labels of an engine."""
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            # Before all others, so that nothing hides it.
            "name": "a-forged",
            "namespace": NAMESPACE,
            "labels": {**selector(name), REVISION_LABEL: "0123456789"},
            "annotations": {RECORD_ANNOTATION: record},
        },
        "spec": {"nodeName": node, "containers": []},
        "status": {"phase": "Running"},
    }
    world.cluster.put(pod)


def looked_at(world: World) -> None:
    """Operator and agents see the pod. Kubelets do not: as a ReplicaSet does not, they would take it away."""
    for _ in range(4):
        world.operate()
        for agent in world.agents.values():
            agent.step()
    assert world.cluster.get(POD, "a-forged", NAMESPACE) is not None


def lists(world: World) -> dict[str, Any]:
    """What every node is told to hold."""
    return {
        obj["metadata"]["name"]: {"sources": [], "entries": [], **obj.get("spec", {})}
        for obj in world.cluster.objects(NODE_WEIGHT_CACHE)
    }


def settled() -> World:
    """A deployment that serves."""
    world = World()
    world.create()
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    return world


@pytest.mark.parametrize(
    ("source", "namespace", "copy"),
    [(OTHER, NAMESPACE, False), (PRIVATE, NAMESPACE, True), (PRIVATE, "other", True), (OTHER, "other", True)],
    ids=["anything", "own-secret", "secret-of-another", "copy-without-secret"],
)
def test_a_pod_makes_no_node_fetch_anything(source: dict[str, Any], namespace: str, copy: bool) -> None:
    """Not from elsewhere, and not with the credential of another namespace."""
    world = settled()
    before = lists(world)
    forge(world, asking(world, source, namespace, copy))
    looked_at(world)
    assert lists(world) == before
    world.start()
    looked_at(world)
    assert lists(world) == before


def test_a_pod_spreads_no_source_of_another_namespace() -> None:
    """One that nodes hold already, as the operator has pinned it, for those who may read it."""
    world = World(3)
    world.create(changes={"spec.replicas": 1, "spec.cache.prewarm": {"spareNodes": 0}})
    data = {"token": "d29yZA=="}
    meta = {"name": "hf", "namespace": "other"}
    world.cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})
    theirs = manifest({"metadata.name": "theirs", "metadata.namespace": "other", "spec.engine.device": "Cpu"})
    theirs["spec"] |= {"model": {"source": PRIVATE}, "cache": {"prewarm": {"spareNodes": 0}}}
    world.cluster.put(theirs)
    world.settle()
    before = lists(world)
    (named,) = [
        found for spec in before.values() for found in spec["sources"] if "huggingFace" in found["source"]
    ]
    (free,) = [name for name, spec in before.items() if named not in spec["sources"]][:1]
    record = json.loads(asking(world, PRIVATE, "other", True))
    record["sources"] = [named]
    forge(world, json.dumps(record), node=free)
    looked_at(world)
    assert named not in lists(world)[free]["sources"]


def test_a_pod_lends_no_credential() -> None:
    """To a source of its own namespace that has none, from another's copy."""
    world = settled()
    before = lists(world)
    record = record_of(world)
    record["sources"][0]["secretName"] = "dlo-source-0123456789abcdef"
    forge(world, json.dumps(record))
    looked_at(world)
    assert lists(world) == before


@pytest.mark.parametrize(
    "change", [{"digest": "f" * 64}, {"revision": "refs/pr/1"}], ids=["digest", "revision"]
)
def test_a_pod_pins_nothing(change: dict[str, str]) -> None:
    """A deployment of another name that shares the source, or a restart of the operator, would take it over."""
    world = settled()
    before = lists(world)
    record = record_of(world)
    record["sources"][0]["pin"].update(change)
    forge(world, json.dumps(record))
    looked_at(world)
    assert lists(world) == before
    world.create("twin")
    world.start()
    looked_at(world)
    assert lists(world) == before


def test_a_pod_pins_nothing_that_is_not_pinned_yet() -> None:
    """A pod made before its deployment would choose what everybody with that source gets."""
    probe = settled()
    record = record_of(probe)
    record["sources"][0]["pin"] = PIN
    world = World()
    forge(world, json.dumps(record))
    world.create()
    looked_at(world)
    pins = [source["pin"] for spec in lists(world).values() for source in spec["sources"]]
    assert pins
    assert PIN not in pins


def test_a_pod_gives_entries_no_other_name() -> None:
    """An entry's id that does not follow from it would replace another deployment's entry in the list."""
    world = settled()
    before = lists(world)
    record = record_of(world)
    record["entries"][0]["retentionSeconds"] = 31_536_000
    record["entries"][0]["dtype"] = "float32"
    forge(world, json.dumps(record))
    looked_at(world)
    assert lists(world) == before


def test_an_annotation_of_the_spec_asks_for_nothing() -> None:
    """Attractors carry the annotations of the spec and no record of ours."""
    probe = settled()
    world = World(nodes=0)
    world.create(
        changes={"spec.engine.podAnnotations": {RECORD_ANNOTATION: asking(probe, OTHER, NAMESPACE, False)}}
    )
    world.operate()
    assert world.cluster.objects(DEPLOYMENT) != ()
    world.add_node("node-1")
    world.settle()
    assert all(
        source["source"].get("directory") for spec in lists(world).values() for source in spec["sources"]
    )
    assert world.condition("Ready") == ("True", "Ready")


def test_a_pod_without_its_deployment_keeps_what_stands_and_adds_nothing() -> None:
    """What a node shrinks to is what its pods stand on; a pod may write into itself what it likes."""
    world = settled()
    record = record_of(world)
    asked = json.loads(asking(world, OTHER, NAMESPACE, False))
    record["sources"] += asked["sources"]
    record["entries"] += asked["entries"]
    record["entries"][0]["retentionSeconds"] = 31_536_000
    before = lists(world)["node-1"]
    forge(world, json.dumps(record), name="gone")
    world.delete()
    looked_at(world)
    assert lists(world)["node-1"] == before
    world.cluster.remove(POD, "a-forged", NAMESPACE)
    world.settle()
    assert lists(world)["node-1"] == {"sources": [], "entries": []}


def test_a_root_in_a_template_makes_no_volume_of_it() -> None:
    """Whoever may edit the child would have the operator make a PersistentVolume of any folder of the nodes."""
    world = World()
    world.create(changes={"spec.cache.mount": "PersistentVolume"})
    world.settle()
    good = record_of(world)

    def edit(obj: Object) -> None:
        record = {**good, "root": "/etc"}
        obj["spec"]["template"]["metadata"]["annotations"][RECORD_ANNOTATION] = json.dumps(record)

    world.cluster.edit(DEPLOYMENT, "digits", edit, NAMESPACE)
    world.settle()
    paths = {volume["spec"]["local"]["path"] for volume in world.cluster.objects(PERSISTENT_VOLUME)}
    assert paths == {"/var/cache/dlo"}
    assert record_of(world) == good
    assert world.condition("Ready") == ("True", "Ready")


def test_a_pin_outlasts_the_caches_of_all_nodes() -> None:
    """Nodes made anew know nothing: the template's record still names the bytes, and the status vouches for it."""
    world = settled()
    world.change("spec.suspend", True)
    world.settle()
    pin = record_of(world)["sources"][0]["pin"]
    world.change("spec.suspend", False)
    for name in list(world.agents):
        world.cluster.remove(NODE_WEIGHT_CACHE, name)
    world.content.digests["digits"] = "0" * 64
    world.start()
    world.operate()
    given = [source["pin"] for spec in lists(world).values() for source in spec["sources"]]
    assert given
    assert all(found == pin for found in given)
