"""`cache.mount: PersistentVolume`: the pair, its life, and pods that pass Pod Security `restricted`."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_kube.gateway import Object
from dlo_kube.kinds import (
    DEPLOYMENT,
    DIFFUSION_DEPLOYMENT,
    PERSISTENT_VOLUME,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    Kind,
)
from dlo_operator.cleanup import CleanupSettings, clean_up
from dlo_operator.keys import deployment_key
from dlo_operator.reconcile.volumes import claim_name, volume_name
from fakes.kube import Call
from unit.operator.pod_security import refused
from unit.operator.test_render import digits, pod
from unit.operator.world import NAMESPACE, World

MOUNT: dict[str, Any] = {"spec.cache.mount": "PersistentVolume"}
ROOT = "/var/cache/dlo"


def mounted(policy: str = "Required") -> dict[str, Any]:
    """The pod of the digits example with its cache as a volume."""
    spec = digits()
    return pod(
        spec.model_copy(
            update={"cache": spec.cache.model_copy(update={"mount": "PersistentVolume", "policy": policy})}
        )
    )


def only(world: World, kind: Kind) -> Object:
    """The one object of a kind."""
    (found,) = world.cluster.objects(kind)
    return found


@pytest.mark.parametrize("policy", ["Required", "Opportunistic", "Disabled"])
def test_the_pod_passes_restricted(policy: str) -> None:
    """Everything of it; a pod with a host path fails by that alone, at both levels."""
    assert refused(mounted(policy), "restricted") == []
    on_host = pod(digits())
    assert refused(on_host, "baseline") == ["hostPath"]
    assert refused(on_host, "restricted") == ["hostPath", "volume cache"]


@pytest.mark.parametrize(
    ("path", "value", "control"),
    [
        (("hostNetwork",), True, "hostNetwork"),
        (("containers", 0, "securityContext", "privileged"), True, "privileged"),
        (("containers", 0, "securityContext", "capabilities"), {"add": ["SYS_ADMIN"]}, "capabilities"),
        (("containers", 0, "ports", 0, "hostPort"), 80, "hostPort"),
        (("securityContext", "runAsNonRoot"), False, "runAsNonRoot of"),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "seccompProfile"),
        (
            ("initContainers", 0, "securityContext", "allowPrivilegeEscalation"),
            True,
            "allowPrivilegeEscalation of cache-gate",
        ),
        (("containers", 0, "securityContext", "runAsUser"), 0, "runAsUser of engine"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "",
)
def test_the_rules_see_what_they_are_for(path: tuple[Any, ...], value: Any, control: str) -> None:
    """A pod that is changed for the worse in one place is refused for it."""
    changed: Any = mounted()
    if path == ("securityContext", "runAsNonRoot"):
        for container in (*changed["containers"], *changed["initContainers"]):
            del container["securityContext"]["runAsNonRoot"]
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    assert any(control in found for found in refused(changed, "restricted"))


def test_entries_are_mounted_as_from_a_host_path() -> None:
    """The same mounts, read-only, by subPath; only the volume is another."""
    claimed, on_host = mounted(), pod(digits())
    cache = [volume for volume in claimed["volumes"] if volume["name"] == "cache"]
    assert cache == [
        {"name": "cache", "persistentVolumeClaim": {"claimName": claim_name(ROOT), "readOnly": True}}
    ]
    for kind in ("containers", "initContainers"):
        assert claimed[kind][0]["volumeMounts"] == on_host[kind][0]["volumeMounts"]
    assert claimed["securityContext"]["supplementalGroups"] == [4242]


def test_a_pair_is_made_for_namespace_and_root() -> None:
    """Bound to each other beforehand, read-only, never provisioned, kept when released."""
    world = World()
    world.enforce("restricted")
    world.create(changes=MOUNT)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    volume, claim = only(world, PERSISTENT_VOLUME), only(world, PERSISTENT_VOLUME_CLAIM)
    assert volume["metadata"]["name"] == volume_name(NAMESPACE, ROOT) == claim["spec"]["volumeName"]
    assert (claim["metadata"]["namespace"], claim["metadata"]["name"]) == (NAMESPACE, claim_name(ROOT))
    assert "ownerReferences" not in volume["metadata"]
    assert volume["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "dlo-operator"
    spec = volume["spec"]
    assert "hostPath" not in spec
    assert (spec["local"], spec["mountOptions"]) == ({"path": ROOT}, ["ro"])
    assert spec["persistentVolumeReclaimPolicy"] == "Retain"
    assert spec["accessModes"] == claim["spec"]["accessModes"] == ["ReadOnlyMany"]
    assert spec["storageClassName"] == claim["spec"]["storageClassName"] == ""
    (term,) = spec["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]
    assert spec["claimRef"]["uid"] == claim["metadata"]["uid"]
    assert all(refused(p["spec"]["template"]["spec"], "restricted") == [] for p in [world.object(DEPLOYMENT)])
    assert world.writes(world.operate) == 0


def test_the_pair_goes_with_its_last_user() -> None:
    """Two deployments share it; the first one's end changes nothing, the second's removes both."""
    world = World()
    world.create(changes=MOUNT)
    world.create("twin", MOUNT)
    world.settle()
    assert len(world.cluster.objects(PERSISTENT_VOLUME)) == 1
    world.delete()
    world.settle()
    assert world.condition("Ready", "twin") == ("True", "Ready")
    assert len(world.cluster.objects(PERSISTENT_VOLUME_CLAIM)) == 1
    world.delete("twin")
    world.settle()
    assert world.cluster.objects(PERSISTENT_VOLUME) == ()
    assert world.cluster.objects(PERSISTENT_VOLUME_CLAIM) == ()


def test_the_pair_goes_when_pods_mount_the_host_path_again() -> None:
    """After the template is the new one; what others made is left alone."""
    world = World()
    foreign = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "mine"}, "spec": {}}
    world.cluster.put(foreign)
    world.create(changes=MOUNT)
    world.settle()
    world.change("spec.cache.mount", "HostPath")
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")
    assert only(world, PERSISTENT_VOLUME)["metadata"]["name"] == "mine"
    assert world.cluster.objects(PERSISTENT_VOLUME_CLAIM) == ()


def test_what_is_no_longer_ours_is_left() -> None:
    """Somebody takes our label off between the list and the fresh look."""
    world = World()
    world.create(changes=MOUNT)
    world.settle()
    name = only(world, PERSISTENT_VOLUME)["metadata"]["name"]

    def take_it(call: Call) -> None:
        if (call.verb, call.kind) == ("list", "PersistentVolume"):
            world.cluster.edit(PERSISTENT_VOLUME, name, lambda obj: obj["metadata"].update(labels={}))

    world.cluster.after.append(take_it)
    world.delete()
    world.settle()
    assert only(world, PERSISTENT_VOLUME)["metadata"]["labels"] == {}
    assert world.cluster.objects(PERSISTENT_VOLUME_CLAIM) == ()


def test_an_operator_that_was_away_sweeps_what_it_left() -> None:
    """The deployment went while nobody looked; only when all that exist are planned is anything deleted."""
    world = World()
    world.create(changes=MOUNT)
    world.create("other", MOUNT)
    world.settle()
    world.delete()
    world.start()
    assert world.operator.controller.sweep_volumes() == 0
    world.delete("other")
    world.settle()
    assert world.operator.controller.sweep_volumes() == 2
    assert world.cluster.objects(PERSISTENT_VOLUME) == ()


@pytest.mark.parametrize("kind", [PERSISTENT_VOLUME, PERSISTENT_VOLUME_CLAIM], ids=lambda kind: kind.kind)
def test_a_half_that_somebody_deleted_comes_back_bound(kind: Kind) -> None:
    """A claim made anew has another uid, which the volume takes over; pods can be made again."""
    world = World()
    world.create(changes=MOUNT)
    world.settle()
    found = only(world, kind)
    world.cluster.remove(kind, found["metadata"]["name"], found["metadata"].get("namespace"))
    world.settle()
    claim = only(world, PERSISTENT_VOLUME_CLAIM)
    assert only(world, PERSISTENT_VOLUME)["spec"]["claimRef"]["uid"] == claim["metadata"]["uid"]
    for old in world.cluster.objects(POD):
        world.cluster.remove(POD, old["metadata"]["name"], NAMESPACE)
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


def test_a_claim_that_is_going_is_waited_for() -> None:
    """It is looked at again soon, and made anew when it is gone."""
    world = World()
    world.create(changes=MOUNT)
    world.settle()
    name = claim_name(ROOT)
    world.cluster.edit(
        PERSISTENT_VOLUME_CLAIM, name, lambda obj: obj["metadata"].update(finalizers=["in-use"]), NAMESPACE
    )
    world.cluster.remove(PERSISTENT_VOLUME_CLAIM, name, NAMESPACE)
    world.operate()
    assert "deletionTimestamp" in only(world, PERSISTENT_VOLUME_CLAIM)["metadata"]
    assert world.operator.controller.reconcile(deployment_key(NAMESPACE, "digits")) == 5
    world.cluster.edit(
        PERSISTENT_VOLUME_CLAIM, name, lambda obj: obj["metadata"].update(finalizers=[]), NAMESPACE
    )
    world.operate()
    assert "deletionTimestamp" not in only(world, PERSISTENT_VOLUME_CLAIM)["metadata"]


def test_a_namespace_that_opens_is_noticed() -> None:
    """Nobody watches namespaces: it is looked at again after a while, and the message says what else helps."""
    world = World()
    world.enforce("restricted")
    world.create()
    world.settle()
    assert world.condition("Ready") == ("False", "PodSecurityDenied")
    assert "cache.mount: PersistentVolume" in world.message("Accepted")
    assert world.cluster.objects(DEPLOYMENT) == ()
    assert world.operator.controller.reconcile(deployment_key(NAMESPACE, "digits")) == 60
    world.enforce("privileged")
    world.time.seconds += 60
    world.settle()
    assert world.condition("Ready") == ("True", "Ready")


def test_two_roots_in_one_namespace_have_two_pairs() -> None:
    """Deployments on two node classes, each with its own claim."""
    world = World()
    world.agents["node-2"].root = "/mnt/nvme"
    for number in (1, 2):
        chosen = {"spec.placement.nodeSelector": {"kubernetes.io/hostname": f"node-{number}"}}
        world.create(f"digits-{number}", {**MOUNT, **chosen, "spec.replicas": 1})
    world.settle()
    paths = {volume["spec"]["local"]["path"] for volume in world.cluster.objects(PERSISTENT_VOLUME)}
    assert paths == {ROOT, "/mnt/nvme"}
    assert len(world.cluster.objects(DIFFUSION_DEPLOYMENT)) == 2
    assert world.condition("Ready", "digits-2") == ("True", "Ready")


def test_volumes_that_others_labelled_like_ours_are_left() -> None:
    """The label of a manager is anybody's to give, and a claim holds data: ours are marked as cache roots too."""
    world = World()
    world.create(changes=MOUNT)
    labels = {"app.kubernetes.io/managed-by": "dlo-operator"}
    claim: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": NAMESPACE, "labels": labels},
        "spec": {},
    }
    world.cluster.put(claim)
    world.settle()
    world.delete()
    world.settle()
    assert only(world, PERSISTENT_VOLUME_CLAIM)["metadata"]["name"] == "models"
    settings = CleanupSettings("dlo-system", "dlo-agents")
    assert all(step.problem == "" for step in clean_up(world.cluster, settings))
    assert only(world, PERSISTENT_VOLUME_CLAIM)["metadata"]["name"] == "models"
