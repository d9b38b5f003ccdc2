"""How any `Gateway` behaves: run against the fake in tests/unit/kube, against a real API server in tests/api."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from dlo_kube.errors import Conflict, Expired, Invalid, NotFound
from dlo_kube.gateway import Gateway, Object
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, LEASE, NODE_WEIGHT_CACHE, SECRET

_NAMES = itertools.count(1)
_OURS, _THEIRS = "dlo-operator", "somebody-else"


def deployment(namespace: str, **spec: Any) -> Object:
    """A small DiffusionDeployment with a name of its own."""
    return {
        "apiVersion": "dlo.dev/v1alpha1",
        "kind": "DiffusionDeployment",
        "metadata": {"name": f"digits-{next(_NAMES)}", "namespace": namespace},
        "spec": {"model": {"source": {"directory": {"root": "samples", "path": "digits"}}}, **spec},
    }


def node_cache(**spec: Any) -> Object:
    """A NodeWeightCache with a name of its own."""
    return {
        "apiVersion": "dlo.dev/v1alpha1",
        "kind": "NodeWeightCache",
        "metadata": {"name": f"node-{next(_NAMES)}"},
        "spec": spec,
    }


def condition(kind: str, status: str = "True", reason: str = "Because") -> dict[str, Any]:
    """One condition."""
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }


def with_status(obj: Object, **status: Any) -> Object:
    """The object's identity and that status."""
    return {**{name: obj[name] for name in ("apiVersion", "kind", "metadata")}, "status": status}


def named(obj: Object) -> Object:
    """The object with nothing in its metadata but name and namespace."""
    meta = {name: obj["metadata"][name] for name in ("name", "namespace") if name in obj["metadata"]}
    return {**obj, "metadata": meta}


def types(obj: Object | None) -> dict[str, str]:
    """Condition types of an object and their status."""
    assert obj is not None
    return {c["type"]: c["status"] for c in obj["status"]["conditions"]}


class GatewayContract:
    """Needs the fixtures `gateway` and `namespace`."""

    @staticmethod
    def now(gateway: Gateway, obj: Object) -> Object:
        """The object as the server has it."""
        meta = obj["metadata"]
        kind = DIFFUSION_DEPLOYMENT if obj["kind"] == DIFFUSION_DEPLOYMENT.kind else NODE_WEIGHT_CACHE
        found = gateway.get(kind, meta["name"], meta.get("namespace"))
        assert found is not None
        return found

    def test_what_is_not_there_is_none(self, gateway: Gateway, namespace: str) -> None:
        """Neither an error nor an empty object."""
        assert gateway.get(DIFFUSION_DEPLOYMENT, "absent", namespace) is None
        assert gateway.get(NODE_WEIGHT_CACHE, "absent") is None
        assert gateway.list(DIFFUSION_DEPLOYMENT, namespace).items == ()

    def test_create_gives_an_identity(self, gateway: Gateway, namespace: str) -> None:
        """uid, version, first generation, time; the name is taken then."""
        wanted = deployment(namespace)
        made = gateway.create(wanted)
        meta = made["metadata"]
        assert meta["uid"]
        assert meta["resourceVersion"]
        assert meta["creationTimestamp"].endswith("Z")
        assert meta["generation"] == 1
        assert self.now(gateway, wanted) == made
        with pytest.raises(Conflict) as refused:
            gateway.create(wanted)
        assert refused.value.code == "AlreadyExists"

    @pytest.mark.parametrize("name", [None, "", "a/b", ".."])
    def test_names_are_checked(self, gateway: Gateway, namespace: str, name: str | None) -> None:
        """An object without a usable name or namespace never reaches another's address."""
        nameless = deployment(namespace)
        if name is None:
            del nameless["metadata"]["namespace"]
        else:
            nameless["metadata"]["name"] = name
        with pytest.raises(Invalid):
            gateway.apply(nameless, manager=_OURS)

    def test_status_is_not_created(self, gateway: Gateway, namespace: str) -> None:
        """It has its own door."""
        for write in (gateway.create, lambda obj: gateway.apply(obj, manager=_OURS)):
            made = write({**deployment(namespace), "status": {"phase": "Ready"}})
            assert "status" not in made

    def test_apply_creates_and_repeats_without_a_change(self, gateway: Gateway, namespace: str) -> None:
        """Idle means that nothing moves: the same intent leaves the version."""
        wanted = deployment(namespace, replicas=2)
        first = gateway.apply(copy.deepcopy(wanted), manager=_OURS)
        assert first["spec"]["replicas"] == 2
        again = gateway.apply(wanted, manager=_OURS)
        assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]

    def test_generation_counts_changes_of_spec_alone(self, gateway: Gateway, namespace: str) -> None:
        """Labels and status do not move it."""
        wanted = deployment(namespace, replicas=1)
        gateway.apply(wanted, manager=_OURS)
        wanted["metadata"]["labels"] = {"a": "b"}
        gateway.apply(wanted, manager=_OURS)
        gateway.apply_status(with_status(wanted, replicas=1), manager=_OURS)
        assert self.now(gateway, wanted)["metadata"]["generation"] == 1
        wanted["spec"]["replicas"] = 2
        assert gateway.apply(wanted, manager=_OURS)["metadata"]["generation"] == 2

    def test_what_is_left_out_goes(self, gateway: Gateway, namespace: str) -> None:
        """A field that this manager owned and does not mean any more."""
        wanted = deployment(namespace)
        wanted["metadata"]["labels"] = {"a": "1", "b": "2"}
        gateway.apply(wanted, manager=_OURS)
        wanted["metadata"]["labels"] = {"a": "1"}
        assert gateway.apply(wanted, manager=_OURS)["metadata"]["labels"] == {"a": "1"}
        del wanted["metadata"]["labels"]
        assert "labels" not in gateway.apply(wanted, manager=_OURS)["metadata"]

    def test_fields_of_others_stay(self, gateway: Gateway, namespace: str) -> None:
        """Neither named by us nor taken away by us."""
        wanted = deployment(namespace)
        theirs = deployment(namespace)
        theirs["metadata"] = {**wanted["metadata"], "labels": {"theirs": "1"}}
        del theirs["spec"]
        wanted["metadata"]["labels"] = {"ours": "1"}
        gateway.apply(wanted, manager=_OURS)
        gateway.apply(theirs, manager=_THEIRS)
        del wanted["metadata"]["labels"]
        assert gateway.apply(wanted, manager=_OURS)["metadata"]["labels"] == {"theirs": "1"}

    def test_force_takes_a_field_over(self, gateway: Gateway, namespace: str) -> None:
        """Without it: Conflict, and nothing has changed. With it: the other owns the field no more."""
        ours = deployment(namespace, replicas=1)
        gateway.apply(ours, manager=_OURS)
        theirs = copy.deepcopy(ours)
        theirs["spec"]["replicas"] = 3
        with pytest.raises(Conflict, match="replicas"):
            gateway.apply(theirs, manager=_THEIRS, force=False)
        assert self.now(gateway, ours)["spec"]["replicas"] == 1
        gateway.apply(theirs, manager=_THEIRS)
        del ours["spec"]["replicas"]
        assert gateway.apply(ours, manager=_OURS)["spec"]["replicas"] == 3

    def test_a_field_stays_while_one_of_two_owners_means_it(self, gateway: Gateway, namespace: str) -> None:
        """Equal values are shared, not fought over."""
        ours = deployment(namespace)
        ours["metadata"]["labels"] = {"shared": "1"}
        gateway.apply(ours, manager=_OURS)
        gateway.apply(ours, manager=_THEIRS, force=False)
        del ours["metadata"]["labels"]
        assert gateway.apply(ours, manager=_OURS)["metadata"]["labels"] == {"shared": "1"}
        assert "labels" not in gateway.apply(ours, manager=_THEIRS)["metadata"]

    def test_dry_run_stores_nothing(self, gateway: Gateway, namespace: str) -> None:
        """It answers with what would be."""
        wanted = deployment(namespace, replicas=2)
        assert gateway.apply(wanted, manager=_OURS, dry_run=True)["spec"]["replicas"] == 2
        assert gateway.get(DIFFUSION_DEPLOYMENT, wanted["metadata"]["name"], namespace) is None
        gateway.apply(wanted, manager=_OURS)
        wanted["spec"]["replicas"] = 4
        assert gateway.apply(wanted, manager=_OURS, dry_run=True)["spec"]["replicas"] == 4
        assert self.now(gateway, wanted)["spec"]["replicas"] == 2

    def test_status_is_apart(self, gateway: Gateway, namespace: str) -> None:
        """Each door changes its own half."""
        wanted = deployment(namespace, replicas=1)
        with pytest.raises(NotFound):
            gateway.apply_status(with_status(wanted, replicas=1), manager=_OURS)
        before = gateway.apply(wanted, manager=_OURS)
        gateway.apply_status({**with_status(wanted, replicas=7), "spec": {"replicas": 9}}, manager=_OURS)
        now = self.now(gateway, wanted)
        assert now["status"]["replicas"] == 7
        assert now["spec"] == before["spec"]
        gateway.apply({**wanted, "status": {"replicas": 8}}, manager=_OURS)
        assert self.now(gateway, wanted)["status"]["replicas"] == 7

    def test_status_that_is_left_out_goes(self, gateway: Gateway) -> None:
        """Unknown is absent."""
        wanted = node_cache()
        gateway.apply(wanted, manager=_OURS)
        gateway.apply_status(with_status(wanted, observedGeneration=1, bootID="a"), manager=_OURS)
        gateway.apply_status(with_status(wanted, observedGeneration=1), manager=_OURS)
        assert self.now(gateway, wanted)["status"] == {"observedGeneration": 1}

    def test_conditions_of_others_survive(self, gateway: Gateway, namespace: str) -> None:
        """H5: the list is a map by type, so every writer keeps its own."""
        wanted = deployment(namespace)
        gateway.apply(wanted, manager=_OURS)
        gateway.apply_status(with_status(wanted, conditions=[condition("Foreign")]), manager=_THEIRS)
        for status in ("Unknown", "False", "True"):
            ours = [condition("Ready", status), condition("Accepted")]
            gateway.apply_status(with_status(wanted, conditions=ours), manager=_OURS)
        assert types(self.now(gateway, wanted)) == {"Foreign": "True", "Ready": "True", "Accepted": "True"}
        gateway.apply_status(with_status(wanted, conditions=[condition("Ready")]), manager=_OURS)
        assert types(self.now(gateway, wanted)) == {"Foreign": "True", "Ready": "True"}

    def test_items_of_a_keyed_list_have_owners(self, gateway: Gateway) -> None:
        """Entries of a node by id; a manager's own go when it leaves them out."""
        one, two = (
            {"id": i, "source": {"s3": {"bucket": f"bucket-{i}"}}, "variant": "", "secretName": ""}
            for i in ("a1", "b2")
        )
        wanted = node_cache(sources=[one])
        gateway.apply(wanted, manager=_OURS)
        gateway.apply({**wanted, "spec": {"sources": [two]}}, manager=_THEIRS)
        assert {s["id"] for s in self.now(gateway, wanted)["spec"]["sources"]} == {"a1", "b2"}
        gateway.apply({**wanted, "spec": {"sources": []}}, manager=_OURS)
        assert {s["id"] for s in self.now(gateway, wanted)["spec"]["sources"]} == {"b2"}

    def test_apply_can_name_the_object_it_means(self, gateway: Gateway, namespace: str) -> None:
        """With a uid or a version that does not hold: Conflict, and nothing is made or changed."""
        wanted = deployment(namespace, replicas=1)
        elsewhere = {**wanted["metadata"], "uid": "0e4b2b8e-0000-4000-8000-000000000000"}
        with pytest.raises(Conflict):
            gateway.apply({**wanted, "metadata": elsewhere}, manager=_OURS)
        first = gateway.apply(wanted, manager=_OURS)
        with pytest.raises(Conflict):
            gateway.apply({**wanted, "metadata": elsewhere}, manager=_OURS)
        wanted["spec"]["replicas"] = 2
        second = gateway.apply(wanted, manager=_OURS)
        stale = {**wanted["metadata"], "resourceVersion": first["metadata"]["resourceVersion"]}
        with pytest.raises(Conflict):
            gateway.apply(
                {**wanted, "spec": {**wanted["spec"], "replicas": 3}, "metadata": stale}, manager=_OURS
            )
        assert self.now(gateway, wanted) == second

    def test_delete_takes_the_object_that_was_meant(self, gateway: Gateway, namespace: str) -> None:
        """H3: not its successor of the same name, and not one that has changed since."""
        wanted = deployment(namespace, replicas=1)
        name = wanted["metadata"]["name"]
        first = gateway.create(wanted)["metadata"]
        changed = gateway.apply(
            {**wanted, "metadata": {**wanted["metadata"], "labels": {"a": "b"}}}, manager="x"
        )
        with pytest.raises(Conflict):
            gateway.delete(
                DIFFUSION_DEPLOYMENT,
                name,
                namespace,
                uid=first["uid"],
                resource_version=first["resourceVersion"],
            )
        version = changed["metadata"]["resourceVersion"]
        assert gateway.delete(
            DIFFUSION_DEPLOYMENT, name, namespace, uid=first["uid"], resource_version=version
        )
        assert not gateway.delete(DIFFUSION_DEPLOYMENT, name, namespace, uid=first["uid"])
        second = gateway.create(wanted)["metadata"]
        assert second["uid"] != first["uid"]
        with pytest.raises(Conflict):
            gateway.delete(DIFFUSION_DEPLOYMENT, name, namespace, uid=first["uid"])
        assert self.now(gateway, wanted)["metadata"]["uid"] == second["uid"]

    def test_a_finalizer_holds_the_object(self, gateway: Gateway, namespace: str) -> None:
        """Deleted is not gone: there is a time of deletion, until nothing holds it."""
        wanted = deployment(namespace)
        wanted["metadata"]["finalizers"] = ["example.org/hold"]
        uid = gateway.apply(wanted, manager=_OURS)["metadata"]["uid"]
        assert gateway.delete(DIFFUSION_DEPLOYMENT, wanted["metadata"]["name"], namespace, uid=uid)
        assert self.now(gateway, wanted)["metadata"]["deletionTimestamp"]
        gateway.apply(named(wanted), manager=_OURS)
        assert gateway.get(DIFFUSION_DEPLOYMENT, wanted["metadata"]["name"], namespace) is None

    def test_list_selects(self, gateway: Gateway, namespace: str) -> None:
        """By label, by name, by namespace; items say what they are."""
        first, second = deployment(namespace), deployment(namespace)
        first["metadata"]["labels"] = {"colour": "red", "size": "s"}
        for obj in (first, second):
            gateway.apply(obj, manager=_OURS)

        def names(**selection: Any) -> set[str]:
            found = gateway.list(DIFFUSION_DEPLOYMENT, **selection).items
            assert {(o["apiVersion"], o["kind"]) for o in found} <= {
                ("dlo.dev/v1alpha1", "DiffusionDeployment")
            }
            return {o["metadata"]["name"] for o in found}

        one, two = first["metadata"]["name"], second["metadata"]["name"]
        assert names(namespace=namespace) == {one, two}
        assert {one, two} <= names()
        assert names(namespace=namespace, labels={"colour": "red", "size": "s"}) == {one}
        assert names(namespace=namespace, labels={"colour": "blue"}) == set()
        assert names(namespace=namespace, fields={"metadata.name": two}) == {two}

    def test_pages_are_the_list_in_parts(self, gateway: Gateway, namespace: str) -> None:
        """Every object once, each page with the version of the listing."""
        made = [gateway.create(deployment(namespace))["metadata"]["name"] for _ in range(5)]
        pages = list(gateway.pages(DIFFUSION_DEPLOYMENT, namespace))
        assert sorted(obj["metadata"]["name"] for page in pages for obj in page.items) == sorted(made)
        assert {page.resource_version for page in pages} == {pages[0].resource_version}
        assert all(obj["kind"] == "DiffusionDeployment" for page in pages for obj in page.items)
        empty = list(gateway.pages(DIFFUSION_DEPLOYMENT, namespace, labels={"none": "such"}))
        assert [page.items for page in empty] == [()]
        assert empty[0].resource_version

    def test_heads_are_metadata_alone(self, gateway: Gateway, namespace: str) -> None:
        """With uid, generation and version, and of the kind that was asked for."""
        made = gateway.create(deployment(namespace))
        (head,) = gateway.heads(DIFFUSION_DEPLOYMENT, namespace).items
        assert set(head) == {"apiVersion", "kind", "metadata"}
        assert (head["apiVersion"], head["kind"]) == (made["apiVersion"], made["kind"])
        for name in ("uid", "generation", "resourceVersion", "namespace"):
            assert head["metadata"][name] == made["metadata"][name]

    def test_kinds_of_the_core(self, gateway: Gateway, namespace: str) -> None:
        """No status, no generation: just the object."""
        meta = {"name": "one", "namespace": namespace}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta}
        gateway.apply({**lease, "spec": {"holderIdentity": "a"}}, manager=_OURS)
        gateway.apply({**lease, "spec": {"holderIdentity": "b"}}, manager=_OURS)
        (found,) = gateway.list(LEASE, namespace).items
        assert (found["kind"], found["spec"]["holderIdentity"]) == ("Lease", "b")
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": {"k": "dg=="}}
        assert gateway.create(secret)["data"] == {"k": "dg=="}
        assert [o["kind"] for o in gateway.list(SECRET, namespace).items] == ["Secret"]

    def test_watch_tells_every_change_in_order(self, gateway: Gateway, namespace: str) -> None:
        """From the version of a list on, of the selected objects alone, and ends in time."""
        other, wanted = deployment(namespace), deployment(namespace, replicas=1)
        version = gateway.list(DIFFUSION_DEPLOYMENT, namespace).resource_version
        gateway.apply(other, manager=_OURS)
        uid = gateway.apply(wanted, manager=_OURS)["metadata"]["uid"]
        wanted["spec"]["replicas"] = 2
        gateway.apply(wanted, manager=_OURS)
        gateway.delete(DIFFUSION_DEPLOYMENT, wanted["metadata"]["name"], namespace, uid=uid)
        stream = gateway.watch(
            DIFFUSION_DEPLOYMENT,
            namespace=namespace,
            fields={"metadata.name": wanted["metadata"]["name"]},
            resource_version=version,
            timeout_seconds=1,
        )
        seen = [e for e in stream if e.type != "BOOKMARK"]
        assert [(e.type, e.obj["spec"]["replicas"]) for e in seen] == [
            ("ADDED", 1),
            ("MODIFIED", 2),
            ("DELETED", 2),
        ]
        assert {e.obj["kind"] for e in seen} == {"DiffusionDeployment"}
        versions = [int(e.obj["metadata"]["resourceVersion"]) for e in seen]
        assert versions == sorted(set(versions))

    def test_watch_from_long_ago_is_expired(self, gateway: Gateway, namespace: str) -> None:
        """Said as an error, never as a quiet stream."""
        gateway.apply(deployment(namespace), manager=_OURS)
        with pytest.raises(Expired):
            list(
                gateway.watch(
                    DIFFUSION_DEPLOYMENT, namespace=namespace, resource_version="1", timeout_seconds=2
                )
            )
