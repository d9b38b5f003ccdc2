"""H12, H16 and H17: what every rendered pod and right must be, in every variant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from dlo_operator.mirror import kinds
from unit.chart.rendering import Object, containers, of_kind, one, pods, render, rendered
from unit.operator.pod_security import RESTRICTED_VOLUMES

NAMES = ("default", "minimal", "monitoring", "production")
#: For the one container that gives a folder of root's to the agent's user.
INIT_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]


@pytest.mark.parametrize("name", NAMES)
def test_pods_have_no_rights_on_their_node(name: str) -> None:
    """Non-root, no capability, no escalation, RuntimeDefault, read-only root, no host namespace."""
    seen = 0
    for where, pod in pods(rendered(name)):
        for host in ("hostNetwork", "hostPID", "hostIPC"):
            assert not pod.get(host), where
        assert pod["securityContext"]["runAsNonRoot"] is True, where
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert pod["enableServiceLinks"] is False
        assert isinstance(pod["automountServiceAccountToken"], bool)
        for container in containers(pod):
            seen += 1
            context, at = container["securityContext"], f"{where} {container['name']}"
            assert context["allowPrivilegeEscalation"] is False, at
            assert context["privileged"] is False, at
            assert context["readOnlyRootFilesystem"] is True, at
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}, at
            assert context["capabilities"]["drop"] == ["ALL"], at
            assert not any("hostPort" in port for port in container.get("ports", ())), at
            if container["name"] == "init-root":
                assert context["capabilities"]["add"] == INIT_CAPABILITIES
                continue
            assert "add" not in context["capabilities"], at
            assert context["runAsNonRoot"] is True, at
            assert context.get("runAsUser", pod["securityContext"]["runAsUser"]) == 65532, at
    assert seen >= 3


@pytest.mark.parametrize("name", NAMES)
def test_pods_meet_restricted_but_for_the_agents_disk(name: str) -> None:
    """H17: only the agents need a privileged namespace, and only for hostPath and the making of its folder."""
    allowed = RESTRICTED_VOLUMES - {"secret"}
    for where, pod in pods(rendered(name)):
        kinds = {kind for volume in pod.get("volumes", ()) for kind in volume if kind != "name"}
        assert kinds <= allowed | ({"hostPath"} if where.startswith("DaemonSet/") else {"secret"}), where
        if not where.startswith("DaemonSet/"):
            assert [c["name"] for c in containers(pod) if c["name"] == "init-root"] == []


def test_the_root_is_made_only_where_that_is_asked_for() -> None:
    """Off: no root user anywhere, and a folder that is missing is an error and not a new folder."""
    made = {
        daemon_set["metadata"]["name"].rpartition("-")[2]: daemon_set["spec"]["template"]["spec"]
        for daemon_set in of_kind(rendered("production"), "DaemonSet")
    }
    assert set(made) == {"nvme", "ssd"}
    assert "initContainers" not in made["nvme"]
    assert made["nvme"]["volumes"][0]["hostPath"] == {"path": "/mnt/nvme/dlo", "type": "Directory"}
    assert [c["name"] for c in made["ssd"]["initContainers"]] == ["init-root"]
    assert made["ssd"]["volumes"][0]["hostPath"]["type"] == "DirectoryOrCreate"


@pytest.mark.parametrize("name", NAMES)
def test_sources_are_read_only_and_scratch_has_a_size(name: str) -> None:
    """What an agent reads models from it cannot write; no emptyDir can fill the node."""
    for where, pod in pods(rendered(name)):
        for container in containers(pod):
            for mount in container.get("volumeMounts", ()):
                if mount["name"].startswith("source-"):
                    assert mount["readOnly"] is True
                    assert mount["recursiveReadOnly"] == "IfPossible"
        for volume in pod.get("volumes", ()):
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"], where


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_bounded_everywhere_but_where_it_must_not_be(name: str) -> None:
    """H14: the agent has no memory limit, since the pages that engines pin are charged to it."""
    for where, pod in pods(rendered(name)):
        for container in containers(pod):
            limits = container["resources"].get("limits", {})
            assert ("memory" in limits) is (container["name"] != "agent"), where
            assert container["resources"]["requests"]["memory"], where


def rules(objects: list[Object]) -> Iterator[tuple[Object, dict[str, Any]]]:
    """Every rule of every role."""
    for role in objects:
        for rule in role["rules"]:
            yield role, rule


@pytest.mark.parametrize("name", NAMES)
def test_rights_name_what_they_are_for(name: str) -> None:
    """No wildcard, no escalation, nothing that reaches into other people's pods."""
    objects = rendered(name)
    for role, rule in rules([*of_kind(objects, "ClusterRole"), *of_kind(objects, "Role")]):
        text = f"{role['metadata']['name']}: {rule}"
        assert "nonResourceURLs" not in rule, text
        for words in (rule["apiGroups"], rule["resources"], rule["verbs"]):
            assert "*" not in words, text
        assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"]), text
        assert not {"pods/exec", "pods/attach", "serviceaccounts/token", "configmaps"} & set(
            rule["resources"]
        ), text
        assert not any("roles" in resource or "webhook" in resource for resource in rule["resources"]), text


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_can_be_read_in_the_whole_cluster(name: str) -> None:
    """`dlo-secret-reader` is a role that people bind in their namespace; the chart binds it to nobody."""
    objects = rendered(name)
    with_secrets = {
        role["metadata"]["name"]
        for role, rule in rules(of_kind(objects, "ClusterRole"))
        if "secrets" in rule["resources"]
    }
    bound = {binding["roleRef"]["name"] for binding in of_kind(objects, "ClusterRoleBinding")}
    bound |= {binding["roleRef"]["name"] for binding in of_kind(objects, "RoleBinding")}
    assert with_secrets == (set() if name == "minimal" else {"dlo-secret-reader"})
    assert not with_secrets & bound
    for role, rule in rules(of_kind(objects, "Role")):
        if "secrets" in rule["resources"]:
            assert role["metadata"]["namespace"] == ("dlo-agents" if name == "production" else "dlo-system")


def can(objects: Any, account: str) -> set[tuple[str, str]]:
    """(verb, resource) of everything that an account may do somewhere."""
    found = set()
    for kind, role_kind in (("ClusterRoleBinding", "ClusterRole"), ("RoleBinding", "Role")):
        for binding in of_kind(objects, kind):
            if account not in {subject["name"] for subject in binding["subjects"]}:
                continue
            role = next(
                role
                for role in of_kind(objects, role_kind)
                if role["metadata"]["name"] == binding["roleRef"]["name"]
            )
            for rule in role["rules"]:
                found |= {(verb, resource) for verb in rule["verbs"] for resource in rule["resources"]}
    return found


def test_agent_may_do_this_and_nothing_more() -> None:
    """Read caches, write their status, renew a Lease, get a Secret by name."""
    assert can(rendered("default"), "dlo-dlo-operator-agent") == {
        ("get", "nodeweightcaches"),
        ("list", "nodeweightcaches"),
        ("watch", "nodeweightcaches"),
        ("patch", "nodeweightcaches/status"),
        ("get", "leases"),
        ("patch", "leases"),
        ("get", "secrets"),
    }


def test_operator_watches_what_kopf_is_told_to_watch() -> None:
    """And deletes nothing but budgets, volumes, claims and its own copies of credentials."""
    may = can(rendered("default"), "dlo-dlo-operator-operator")
    for kind in kinds():
        assert {(verb, kind.plural) for verb in ("get", "list", "watch")} <= may
    assert {resource for verb, resource in may if verb == "delete"} == {
        "poddisruptionbudgets",
        "persistentvolumes",
        "persistentvolumeclaims",
        "secrets",
    }
    assert {resource for verb, resource in may if verb in ("update", "deletecollection")} == set()
    assert {verb for verb, resource in may if resource == "pods"} == {"get", "list", "watch"}


def test_cleanup_stands_on_rights_of_its_own() -> None:
    """All of them are hooks that come before the Job: the release's own are gone by then."""
    hooks = [item.obj for item in rendered("production") if item.source.startswith("cleanup/")]
    weights: dict[str, set[int]] = {}
    for obj in hooks:
        annotations = obj["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "post-delete"
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        weights.setdefault(obj["kind"], set()).add(int(annotations["helm.sh/hook-weight"]))
    (account,), (cluster_role,), (role,), (binding,), (job,) = (
        weights[kind] for kind in ("ServiceAccount", "ClusterRole", "Role", "RoleBinding", "Job")
    )
    assert account < cluster_role == role < binding < job
    made = one(rendered("production"), "Job", "cleanup")["spec"]["template"]["spec"]["serviceAccountName"]
    assert made == one(rendered("production"), "ServiceAccount", "cleanup")["metadata"]["name"]
    assert can(rendered("production"), made) == {
        ("list", "nodeweightcaches"),
        ("delete", "nodeweightcaches"),
        ("list", "nodes"),
        ("patch", "nodes"),
        ("list", "persistentvolumes"),
        ("delete", "persistentvolumes"),
        ("list", "persistentvolumeclaims"),
        ("delete", "persistentvolumeclaims"),
        ("list", "diffusiondeployments"),
        ("list", "leases"),
        ("delete", "leases"),
        ("list", "secrets"),
        ("delete", "secrets"),
    }


def test_roles_for_people_are_not_everybodys() -> None:
    """Making a DiffusionDeployment is making pods, so `edit` does not get it unless asked for."""
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    found = rendered("default")
    editor, viewer = one(found, "ClusterRole", "-editor"), one(found, "ClusterRole", "-viewer")
    assert [key for key in editor["metadata"]["labels"] if key.startswith(prefix)] == []
    assert [key for key in viewer["metadata"]["labels"] if key.startswith(prefix)] == [f"{prefix}view"]
    asked = render(
        "--set", "rbac.aggregate.toEdit=true,rbac.aggregate.toAdmin=true,rbac.aggregate.toView=false"
    )
    labels = one(asked, "ClusterRole", "-editor")["metadata"]["labels"]
    assert (labels[f"{prefix}edit"], labels[f"{prefix}admin"]) == ("true", "true")
    viewer = one(asked, "ClusterRole", "-viewer")
    assert f"{prefix}view" not in viewer["metadata"]["labels"]


def test_budget_never_blocks_a_drain() -> None:
    """None for one replica; for several, one may go."""
    assert of_kind(rendered("default"), "PodDisruptionBudget") == []
    budget = of_kind(rendered("production"), "PodDisruptionBudget")[0]["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    switched = render("--set", "operator.replicas=3,operator.podDisruptionBudget.enabled=false")
    assert of_kind(switched, "PodDisruptionBudget") == []
