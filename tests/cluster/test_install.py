"""Helm's side of the life: what an uninstall takes and leaves, and installing again under either name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cluster.clusters import Cluster, until
from cluster.nodeshell import NodeShell
from cluster.product import Deployed, Release, entries_on

#: Kinds of which the control plane makes objects by itself, whoever is installed.
_NOT_OURS = {"events", "events.events.k8s.io", "endpoints", "endpointslices.discovery.k8s.io"}


def test_uninstalled_it_leaves_definitions_objects_and_disks_and_installs_again(
    cluster: Cluster,
    release: Release,
    deploy: Callable[..., Deployed],
    namespace: str,
    shells: dict[str, NodeShell],
    worker: str,
) -> None:
    """Engines go on serving while no operator is there; a second install finds everything as it was."""
    digits = deploy(replicas=1)
    digits.wait()
    pods = {pod["metadata"]["uid"] for pod in digits.pods()}
    entries = entries_on(shells[worker])
    release.uninstall()
    try:
        _only_the_kept_is_left(cluster, release, namespace)
        assert digits.get()["spec"]["replicas"] == 1
        assert digits.draw("a handwritten one").startswith(b"\x89PNG")
        assert entries <= entries_on(shells[worker])
    finally:
        release.install()
    digits.wait()
    until("observed again", lambda: cluster.get("nodeweightcache", worker), 60)
    # The same pods, the same files: nothing was rolled or built.
    assert {pod["metadata"]["uid"] for pod in digits.pods()} == pods
    assert entries <= entries_on(shells[worker])


def _only_the_kept_is_left(cluster: Cluster, release: Release, namespace: str) -> None:
    """Beside people's own namespaces: the definitions with what the server makes of them, and the namespace."""
    left = {row for row in _mentioning(cluster, "dlo") if not row[1].startswith(("test-", "journey-"))}
    assert namespace.startswith("test-")
    assert {name for kind, _, name in left if kind.startswith("customresourcedefinitions")} == {
        "diffusiondeployments.dlo.dev",
        "nodeweightcaches.dlo.dev",
    }
    rest = {row for row in left if row[0] not in ("customresourcedefinitions", "apiservices")}
    assert rest == {("namespaces", "", release.namespace)}, sorted(rest)
    assert cluster.get("nodeweightcaches") == []
    assert _labels_of_nodes(cluster) == set()


def test_another_release_name_takes_the_kept_definitions_over_as_the_notes_say(
    cluster: Cluster, release: Release, deploy: Callable[..., Deployed]
) -> None:
    digits = deploy(replicas=1)
    digits.wait()
    notes = release.install()
    assert "--take-ownership" in notes
    release.uninstall()
    other = Release(cluster, release.registry, "other", "dlo-other", dict(release.values))
    try:
        other.install("--take-ownership")
        digits.wait()
        until("heard of by the new agents", lambda: _ready_caches(cluster) == len(cluster.nodes()), 90)
    finally:
        other.uninstall()
        cluster.kubectl("delete", "namespace", "dlo-other", "--wait")
        release.install("--take-ownership")
    digits.wait()


def _mentioning(cluster: Cluster, word: str) -> set[tuple[str, str, str]]:
    """Kind, namespace and name of every object of the cluster whose name or owner's label has this word."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    found = set()
    for kind in sorted(set(kinds) - _NOT_OURS):
        printed = cluster.kubectl("get", kind, "-A", "-o", "json", "--ignore-not-found", check=False)
        for item in json.loads(printed or "{}").get("items", []):
            meta: dict[str, Any] = item["metadata"]
            marks = json.dumps([meta["name"], meta.get("labels", {}), meta.get("namespace", "")])
            if word in marks.replace("dlo-test", ""):
                found.add((kind.split(".")[0], meta.get("namespace", ""), meta["name"]))
    return {row for row in found if not (row[0] in _DEFAULT_OBJECTS and row[2] in _DEFAULT_OBJECTS[row[0]])}


#: What every namespace has.
_DEFAULT_OBJECTS = {"configmaps": {"kube-root-ca.crt"}, "serviceaccounts": {"default"}}


def _labels_of_nodes(cluster: Cluster) -> set[str]:
    return {key for node in cluster.get("nodes") for key in node["metadata"]["labels"] if "dlo.dev/" in key}


def _ready_caches(cluster: Cluster) -> int:
    conditions = [cache.get("status", {}).get("conditions", []) for cache in cluster.get("nodeweightcaches")]
    return sum(any(c["type"] == "Ready" and c["status"] == "True" for c in each) for each in conditions)
