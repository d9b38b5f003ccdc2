"""What each service account of the chart may do, asked of a real API server with its own token: exactly this table.

A right more fails, and so does one less; whoever changes the chart's roles says so here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import urllib3
from api.charted import AGENT, AGENTS, CHART, FLAGS, OPERATOR, SYSTEM, Cluster

CLEANUP = "dlo-operator-cleanup"
ELSEWHERE = "elsewhere"

#: (API group/resource) to verbs, by account, first everywhere and then what each namespace adds.
Rights = dict[str, str]
EVERYWHERE: dict[str, Rights] = {
    OPERATOR: {
        "dlo.dev/diffusiondeployments": "get list watch",
        "dlo.dev/diffusiondeployments/status": "patch",
        "dlo.dev/nodeweightcaches": "create get list patch watch",
        "/nodes": "get list patch watch",
        "/namespaces": "get",
        "/pods": "get list watch",
        "apps/deployments": "create get list patch watch",
        "/services": "create get list patch watch",
        "policy/poddisruptionbudgets": "create delete get list patch watch",
        "/persistentvolumes": "create delete get list patch watch",
        "/persistentvolumeclaims": "create delete get list patch watch",
        "events.k8s.io/events": "create",
    },
    AGENT: {
        "dlo.dev/nodeweightcaches": "get list watch",
        "dlo.dev/nodeweightcaches/status": "patch",
    },
    CLEANUP: {
        "dlo.dev/nodeweightcaches": "delete list",
        "/nodes": "list patch",
        "dlo.dev/diffusiondeployments": "list",
        "/persistentvolumes": "delete list",
        "/persistentvolumeclaims": "delete list",
    },
}
MORE: dict[tuple[str, str], Rights] = {
    (OPERATOR, SYSTEM): {"coordination.k8s.io/leases": "create get list patch watch"},
    (OPERATOR, AGENTS): {"/secrets": "create delete get list patch"},
    (AGENT, SYSTEM): {"coordination.k8s.io/leases": "get patch"},
    (AGENT, AGENTS): {"/secrets": "get"},
    (CLEANUP, SYSTEM): {"coordination.k8s.io/leases": "delete list"},
    (CLEANUP, AGENTS): {"/secrets": "delete list"},
}
HOMES = {OPERATOR: SYSTEM, AGENT: AGENTS, CLEANUP: SYSTEM}
PLACES = (SYSTEM, AGENTS, ELSEWHERE, "kube-system")


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Iterator[Cluster]:
    """With the accounts of the clean-up Job, which live only while a release is uninstalled, and one without rights."""
    shown = ("--show-only", "templates/cleanup/rbac.yaml")
    text = cluster.helm("template", "dlo-operator", str(CHART), "-n", SYSTEM, *FLAGS, *shown)
    cluster.server.kubectl("apply", "-f", "-", text=text)
    cluster.server.kubectl("create", "namespace", ELSEWHERE)
    cluster.server.kubectl("create", "serviceaccount", "nobody", "-n", ELSEWHERE)
    yield cluster
    cluster.server.kubectl("delete", "-f", "-", text=text)


def reviewed(cluster: Cluster, home: str, account: str, namespace: str) -> tuple[Rights, list[Any]]:
    """What the server says that the account may do in a namespace, and its rights on paths that are no resource."""
    answer = urllib3.PoolManager(ca_certs=str(cluster.server.ca_file)).request(
        "POST",
        f"{cluster.server.url}/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        headers={
            "Authorization": f"Bearer {cluster.token(home, account)}",
            "Content-Type": "application/json",
        },
        body=json.dumps({"spec": {"namespace": namespace}}),
    )
    assert answer.status == 201, answer.data
    status = answer.json()["status"]
    assert status.get("incomplete") is False, "the server does not know all rules"
    return table(status["resourceRules"]), sorted(map(json.dumps, status.get("nonResourceRules", ())))


def table(rules: Iterable[Any]) -> Rights:
    """One line for each resource; names of objects, where a rule has some, belong to it."""
    found: dict[str, set[str]] = {}
    for rule in rules:
        for group in rule.get("apiGroups", [""]):
            for resource in rule.get("resources", ()):
                names = ",".join(rule.get("resourceNames", ()))
                key = f"{group}/{resource}" + (f" named {names}" if names else "")
                found.setdefault(key, set()).update(rule["verbs"])
    return {key: " ".join(sorted(verbs)) for key, verbs in found.items()}


@pytest.mark.parametrize("namespace", PLACES)
@pytest.mark.parametrize("account", HOMES)
def test_each_account_may_do_this_and_no_more(whole: Cluster, account: str, namespace: str) -> None:
    """H12: in its own namespaces, in a team's, and in the cluster's; beside what every account may ask about itself."""
    everyone, paths = reviewed(whole, ELSEWHERE, "nobody", namespace)
    rights, own_paths = reviewed(whole, HOMES[account], account, namespace)
    assert own_paths == paths
    assert {key: verbs for key, verbs in rights.items() if key not in everyone} == {
        **EVERYWHERE[account],
        **MORE.get((account, namespace), {}),
    }
    assert {key: rights[key] for key in everyone} == everyone
    for key, verbs in rights.items():
        if key in everyone:
            continue
        assert "*" not in key + verbs
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(verbs.split())
        assert "secrets" not in key or namespace == AGENTS, (
            f"{account} reaches secrets in {namespace}: {verbs}"
        )
        assert not key.startswith("/pods/"), key


def test_nobody_else_is_bound(whole: Cluster) -> None:
    """Bindings of the chart are for its own accounts; `dlo-secret-reader` and people's roles are for people to bind."""
    listed = json.loads(whole.server.kubectl("get", "clusterrolebindings,rolebindings", "-A", "-o", "json"))
    ours = [item for item in listed["items"] if "dlo" in item["roleRef"]["name"]]
    subjects = {
        (subject["kind"], subject["namespace"], subject["name"])
        for item in ours
        for subject in item["subjects"]
    }
    assert subjects == {("ServiceAccount", home, account) for account, home in HOMES.items()}
    bound = {item["roleRef"]["name"] for item in ours}
    roles = json.loads(whole.server.kubectl("get", "clusterroles", "-o", "json"))["items"]
    free = {role["metadata"]["name"] for role in roles if "dlo" in role["metadata"]["name"]} - bound
    assert free == {"dlo-operator-viewer", "dlo-operator-editor", "dlo-secret-reader"}
    (reader,) = (role for role in roles if role["metadata"]["name"] == "dlo-secret-reader")
    assert table(reader["rules"]) == {"/secrets": "get"}
    accounts = json.loads(whole.server.kubectl("get", "serviceaccounts", "-A", "-o", "json"))["items"]
    made = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in accounts}
    assert {place for place in made if "dlo" in place[1]} == {(home, name) for name, home in HOMES.items()}


def test_a_right_more_would_be_seen(whole: Cluster) -> None:
    """The test of the test: rights added to a role, here for a moment, show in the review."""
    extra = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    change = json.dumps([{"op": "add", "path": "/rules/-", "value": extra}])
    role = ("clusterrole", f"{AGENT}")
    before = json.loads(whole.server.kubectl("get", *role, "-o", "json"))["rules"]
    whole.server.kubectl("patch", *role, "--type=json", "-p", change)
    try:
        for _ in range(50):
            rights, _paths = reviewed(whole, AGENTS, AGENT, ELSEWHERE)
            if "/secrets" in rights:
                break
            time.sleep(0.1)
        assert rights["/secrets"] == "get"
        assert rights.keys() - EVERYWHERE[AGENT].keys() >= {"/secrets"}
    finally:
        back = json.dumps([{"op": "replace", "path": "/rules", "value": before}])
        whole.server.kubectl("patch", *role, "--type=json", "-p", back)
