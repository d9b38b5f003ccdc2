"""Removes what the operator has made outside its release: the last act of an uninstall. Safe to repeat.

Takes objects away by what marks them as the operator's own, and never what people made: DiffusionDeployments with
their children stay, and so do disks. Must run when no operator does, or it would make everything again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlo_api.names import OPERATOR_FIELD_MANAGER
from dlo_kube.errors import Conflict, KubeError, NotFound
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import (
    DIFFUSION_DEPLOYMENT,
    LEASE,
    NODE,
    NODE_WEIGHT_CACHE,
    PERSISTENT_VOLUME,
    PERSISTENT_VOLUME_CLAIM,
    SECRET,
    Kind,
)

from dlo_operator.gather import SOURCE_LABEL
from dlo_operator.leader import LEASE_NAME
from dlo_operator.nodes import label_object, warm_labels
from dlo_operator.reconcile.volumes import VOLUME_LABEL

_OURS = {"app.kubernetes.io/managed-by": OPERATOR_FIELD_MANAGER}


@dataclass(frozen=True)
class CleanupSettings:
    """Where to look: the operator's namespace, the agents', and a kubeconfig's path (empty inside a cluster)."""

    namespace: str
    agent_namespace: str
    kubeconfig: str = ""


def parse_cleanup(argv: Sequence[str]) -> CleanupSettings:
    """The settings that a command line gives; a wrong one exits with 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="dlo-operator cleanup",
        description="Remove what the operator has made outside its release, after it was uninstalled.",
        allow_abbrev=False,
    )
    parser.add_argument("--namespace", required=True, help="namespace of the operator")
    parser.add_argument("--agent-namespace", required=True, help="namespace of the agents")
    parser.add_argument("--kubeconfig", default="", metavar="FILE", help="outside a cluster")
    given = parser.parse_args(list(argv))
    return CleanupSettings(given.namespace, given.agent_namespace, given.kubeconfig)


@dataclass(frozen=True)
class Step:
    """One kind of leftover: what it is called, how many went, and why some did not (empty: none is left)."""

    what: str
    removed: int = 0
    problem: str = ""


def clean_up(gateway: Gateway, settings: CleanupSettings) -> Iterator[Step]:
    """Takes everything away, kind by kind, each told as it is done. A kind that fails does not stop the next.

    Caches go first, since agents act on them; volumes and their claims last, where no deployment is left whose
    engines may mount them.
    """
    namespace, agents = settings.namespace, settings.agent_namespace
    steps: tuple[tuple[str, Callable[[], Iterator[bool]]], ...] = (
        ("NodeWeightCaches", lambda: _delete_all(gateway, NODE_WEIGHT_CACHE, None, lambda _: True)),
        ("Leases", lambda: _delete_all(gateway, LEASE, namespace, _is_our_lease)),
        ("labels of Nodes", lambda: _unlabel_nodes(gateway)),
        ("Secrets", lambda: _delete_all(gateway, SECRET, agents, _is_copied_secret)),
        ("PersistentVolumeClaims", lambda: _delete_unused(gateway, PERSISTENT_VOLUME_CLAIM)),
        ("PersistentVolumes", lambda: _delete_unused(gateway, PERSISTENT_VOLUME)),
    )
    for what, act in steps:
        removed = 0
        try:
            for gone in act():
                removed += gone
        except KubeError as error:
            yield Step(what, removed, f"{error.code}: {what}: {error}")
        else:
            yield Step(what, removed)


def _delete_all(
    gateway: Gateway, kind: Kind, namespace: str | None, ours: Callable[[Object], bool]
) -> Iterator[bool]:
    """Deletes all of a kind that are ours; a kind that is not served any more has none."""
    try:
        found = gateway.list(kind, namespace).items
    except NotFound:
        return
    for obj in found:
        meta = obj["metadata"]
        if "deletionTimestamp" in meta or not ours(obj):
            continue
        try:
            yield gateway.delete(kind, meta["name"], meta.get("namespace"), uid=meta["uid"])
        except Conflict:
            # Another object of that name: made after ours went, by somebody who wants it.
            yield False


def _delete_unused(gateway: Gateway, kind: Kind) -> Iterator[bool]:
    """Deletes volumes or claims of namespaces without a DiffusionDeployment."""
    try:
        deployments = gateway.list(DIFFUSION_DEPLOYMENT).items
    except NotFound:
        deployments = ()
    used = {obj["metadata"]["namespace"] for obj in deployments if "deletionTimestamp" not in obj["metadata"]}
    yield from _delete_all(
        gateway, kind, None, lambda obj: _is_our_volume(obj) and _claimed_from(obj) not in used
    )


def _claimed_from(obj: Object) -> str:
    """The namespace of a claim, or of the claim that a volume is meant for."""
    reference = (obj.get("spec") or {}).get("claimRef") or {}
    return str(obj["metadata"].get("namespace") or reference.get("namespace") or "")


def _unlabel_nodes(gateway: Gateway) -> Iterator[bool]:
    """Takes our labels off every Node, also those that somebody else has written over since."""
    for node in gateway.list(NODE).items:
        if not warm_labels(node):
            continue
        none = label_object(node, ())
        try:
            kept = warm_labels(gateway.apply(none, manager=OPERATOR_FIELD_MANAGER))
            if kept:
                # Somebody else owns them too. Another value takes them over; then they can go.
                taken = {**none, "metadata": {**none["metadata"], "labels": dict.fromkeys(kept, "gone")}}
                gateway.apply(taken, manager=OPERATOR_FIELD_MANAGER)
                gateway.apply(none, manager=OPERATOR_FIELD_MANAGER)
        except (Conflict, NotFound):
            yield False  # the Node is gone, and its labels with it
        else:
            yield True


def _is_ours(obj: Object) -> bool:
    labels = obj["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in _OURS.items())


def _is_our_volume(obj: Object) -> bool:
    return _is_ours(obj) and VOLUME_LABEL in (obj["metadata"].get("labels") or {})


def _is_our_lease(obj: Object) -> bool:
    return _is_ours(obj) or obj["metadata"]["name"] == LEASE_NAME


def _is_copied_secret(obj: Object) -> bool:
    return _is_ours(obj) and SOURCE_LABEL in (obj["metadata"].get("labels") or {})
