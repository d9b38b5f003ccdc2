"""What single templates say: images, names, the agents' pods, network policies, policies, notes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dlo_api.names import SECRET_READER_ROLE
from dlo_cache.layout_json import parse_layout
from dlo_operator.reconcile.volumes import PREFIX
from dlo_operator.reconcile.workload import ENGINE_NAME, selector
from unit.chart.rendering import CHART, containers, helm, of_kind, one, pods, render, rendered, template

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ({}, "dlo/agent:0.1.0"),
        ({"image": {"tag": "v2"}}, "dlo/agent:v2"),
        ({"image": {"registry": "localhost:5000/mirror/"}}, "localhost:5000/mirror/dlo/agent:0.1.0"),
        ({"agent": {"image": {"tag": "v3"}}, "image": {"tag": "v2"}}, "dlo/agent:v3"),
        (
            {"agent": {"image": {"digest": DIGEST, "tag": "v3"}}, "image": {"registry": "localhost"}},
            f"localhost/dlo/agent@{DIGEST}",
        ),
    ],
)
def test_images_have_registry_and_tag_or_digest(values: dict[str, object], image: str) -> None:
    """The agents' pods and the gate that the operator puts into engine pods use the same one."""
    objects = render(values=values)
    pod = one(objects, "DaemonSet", "default")["spec"]["template"]["spec"]
    assert {container["image"] for container in containers(pod)} == {image}
    args = one(objects, "Deployment", "dlo-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--agent-image={image}" in args


@pytest.mark.parametrize(
    ("words", "prefix"),
    [
        ((), "dlo-dlo-operator"),
        (("--set", "fullnameOverride=weights"), "weights"),
        (("--set", "nameOverride=dl"), "dlo"),
        (("--set", f"fullnameOverride={'n' * 63}"), "n" * 40),
    ],
)
def test_names_fit_and_are_unique(words: tuple[str, ...], prefix: str) -> None:
    """No two objects share kind, namespace and name; names fit labels."""
    seen = set()
    for item in render(*words):
        meta = item.obj["metadata"]
        assert len(meta["name"]) <= 63
        key = (item.obj["kind"], meta.get("namespace"), meta["name"])
        assert key not in seen
        seen.add(key)
        if item.obj["kind"] == "CustomResourceDefinition" or meta["name"] == SECRET_READER_ROLE:
            continue
        assert meta["name"].startswith(prefix)
    assert ("ClusterRole", None, SECRET_READER_ROLE) in seen


def test_every_object_carries_the_common_labels() -> None:
    """And every namespaced one says its namespace, so that `kubectl apply` of the output does the same."""
    for item in rendered("production"):
        labels = item.obj["metadata"]["labels"]
        for name in ("name", "instance", "component", "version", "managed-by", "part-of"):
            assert labels[f"app.kubernetes.io/{name}"], item.source
        assert labels["app.kubernetes.io/name"] != ENGINE_NAME
        cluster_wide = item.obj["kind"].startswith(("Cluster", "Custom", "Validating"))
        assert ("namespace" in item.obj["metadata"]) is not cluster_wide, item.source


def test_selectors_meet_their_own_pods_alone() -> None:
    """Operator, agents of each class, and engines are told apart."""
    objects = rendered("production")
    made = [*of_kind(objects, "Deployment"), *of_kind(objects, "DaemonSet")]
    for one_of in made:
        wanted = one_of["spec"]["selector"]["matchLabels"].items()
        met = [obj for obj in made if wanted <= obj["spec"]["template"]["metadata"]["labels"].items()]
        assert met == [one_of]
        assert not wanted <= selector("digits").items()


def test_operator_is_replaced_and_never_doubled() -> None:
    """`Recreate`, one replica by default, probed where it answers."""
    deployment = one(rendered("default"), "Deployment", "dlo-operator")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    container = deployment["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_agent_is_on_every_node_and_says_how_it_is() -> None:
    """Taints are tolerated; liveness and readiness are the agent's two answers."""
    pod = one(rendered("default"), "DaemonSet", "default")["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
    container = pod["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


@pytest.mark.parametrize(
    ("budget", "base", "request_"),
    [("0", "256Mi", "256Mi"), ("200Gi", "256Mi", "205056Mi"), ("1500M", "1Gi", "2455Mi"), ("1", "0", "1Mi")],
)
def test_memory_request_is_the_warm_budget_and_the_agents_own(budget: str, base: str, request_: str) -> None:
    """In whole mebibytes, rounded up; without a limit."""
    values = {
        "nodeClasses": [
            {"name": "a", "root": {"path": "/a", "init": True}, "warmBudget": budget, "headroom": "0"}
        ],
        "agent": {"resources": {"requests": {"memory": base}}},
    }
    pod = one(render(values=values), "DaemonSet", "-a")["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "100m", "memory": request_}}


def test_source_roots_are_mounted_where_their_class_is() -> None:
    """A folder that only some nodes have keeps no other node's agent from starting."""
    found = {
        obj["metadata"]["name"].rpartition("-")[2]: {
            volume["name"]: volume for volume in obj["spec"]["template"]["spec"]["volumes"]
        }
        for obj in of_kind(rendered("production"), "DaemonSet")
    }
    assert found["nvme"]["source-models"]["hostPath"] == {"path": "/srv/models", "type": "Directory"}
    assert "source-models" not in found["ssd"]
    for volumes in found.values():
        claim = {"claimName": "models", "readOnly": True}
        assert volumes["source-shared"]["persistentVolumeClaim"] == claim


def test_layouts_are_files_that_the_agent_can_read() -> None:
    """The text arrives as it was given, and a change of it replaces the pods."""
    objects = rendered("production")
    data = one(objects, "ConfigMap", "layouts")["data"]
    values = yaml.safe_load((CHART / "ci/production-values.yaml").read_text())
    assert data == {"my-model.json": values["layouts"]["my-model"]}
    assert parse_layout(data["my-model.json"])["id"] == "my-model"
    sums = set()
    for text in ("{}", '{"a": 1}'):
        changed = render(values={"layouts": {"my-model": text}})
        sums.add(
            one(changed, "DaemonSet", "default")["spec"]["template"]["metadata"]["annotations"][
                "checksum/layouts"
            ]
        )
    assert len(sums) == 2


def test_proxy_never_stands_before_the_api_server() -> None:
    """Its address is filled in by the kubelet."""
    pod = one(rendered("production"), "DaemonSet", "nvme")["spec"]["template"]["spec"]
    env = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert env["NO_PROXY"] == "$(KUBERNETES_SERVICE_HOST),localhost,127.0.0.1,.internal,10.0.0.0/8"
    assert env["SSL_CERT_FILE"] == "/etc/dlo/ca/ca.crt"
    plain = one(rendered("default"), "DaemonSet", "default")["spec"]["template"]["spec"]["containers"][0]
    assert not {item["name"] for item in plain["env"]} & {"HTTP_PROXY", "NO_PROXY", "SSL_CERT_FILE"}


def test_network_policies_open_what_is_needed() -> None:
    """Names, the API server, engines for the operator, sources for agents; in: metrics alone."""
    assert of_kind(rendered("default"), "NetworkPolicy") == []
    objects = rendered("production")
    operator, agent = (one(objects, "NetworkPolicy", part)["spec"] for part in ("operator", "agent"))
    for policy, kind, name in ((operator, "Deployment", "dlo-operator"), (agent, "DaemonSet", "nvme")):
        labels = one(objects, kind, name)["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        dns, api = policy["egress"][:2]
        assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
        assert api == {
            "ports": [{"port": 443, "protocol": "TCP"}],
            "to": [{"ipBlock": {"cidr": "10.96.0.1/32"}}],
        }
    engines = operator["egress"][2]["to"][0]["podSelector"]["matchLabels"]
    assert engines.items() <= selector("digits").items()
    assert [port["port"] for port in agent["egress"][2]["ports"]] == [443, 9000]
    assert [rule["ports"][0]["port"] for rule in (*operator["ingress"], *agent["ingress"])] == [
        "metrics",
        "http",
    ]
    test = one(objects, "Pod", "test")["metadata"]["labels"]
    assert operator["ingress"][0]["from"][-1]["podSelector"]["matchLabels"].items() <= test.items()


def test_open_network_policy_keeps_metadata_services_out() -> None:
    """By default an agent reaches any address but link-local ones."""
    agent = one(render("--set", "networkPolicy.enabled=true"), "NetworkPolicy", "agent")["spec"]
    assert agent["egress"][2]["to"] == [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}]


def test_policies_are_bound_and_name_the_accounts_that_pods_use() -> None:
    """A policy about another account would hold nobody back."""
    for name in ("default", "production"):
        objects = rendered(name)
        policies = {
            obj["metadata"]["name"]: obj["spec"] for obj in of_kind(objects, "ValidatingAdmissionPolicy")
        }
        bindings = [obj["spec"] for obj in of_kind(objects, "ValidatingAdmissionPolicyBinding")]
        assert {binding["policyName"] for binding in bindings} == set(policies)
        assert {tuple(binding["validationActions"]) for binding in bindings} == {("Deny",)}
        # One is about pods, whoever makes them.
        (shared,) = [policy for policy in policies if policy.endswith("-cache-volumes")]
        pods_policy = policies.pop(shared)
        assert "userInfo" not in json.dumps(pods_policy)
        assert f"startsWith('{PREFIX}')" in json.dumps(pods_policy)
        assert pods_policy["failurePolicy"] == "Fail"
        named = {policy["matchConditions"][0]["expression"].split("'")[1] for policy in policies.values()}
        used = set()
        for kind in ("Deployment", "DaemonSet"):
            for obj in of_kind(objects, kind):
                account = obj["spec"]["template"]["spec"]["serviceAccountName"]
                used.add(f"system:serviceaccount:{obj['metadata']['namespace']}:{account}")
        assert named == used
        assert {policy["failurePolicy"] for policy in policies.values()} == {"Fail"}
        roots = [cls["hostPath"]["path"] for cls in cache_volumes(name)]
        text = json.dumps(policies)
        assert all(f"'{root}'" in text for root in roots)


def cache_volumes(name: str) -> list[dict[str, dict[str, str]]]:
    """The cache volumes of all agents."""
    found = [pod["volumes"][0] for where, pod in pods(rendered(name)) if where.startswith("DaemonSet")]
    assert {volume["name"] for volume in found} == {"cache"}
    return found


def test_chart_names_what_it_holds() -> None:
    """Artifact Hub's annotations agree with the chart; its example is one that the product takes."""
    from dlo_api.load import load_manifest

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    notes = {key.rpartition("/")[2]: value for key, value in chart["annotations"].items()}
    crds = {crd["metadata"]["name"]: crd for crd in of_kind(rendered("default"), "CustomResourceDefinition")}
    assert {crd["name"] for crd in yaml.safe_load(notes["crds"])} == set(crds)
    for crd in yaml.safe_load(notes["crds"]):
        assert crd["kind"] == crds[crd["name"]]["spec"]["names"]["kind"]
    (example,) = yaml.safe_load(notes["crdsExamples"])
    assert load_manifest(yaml.safe_dump(example), "example").spec.replicas == 2
    images = {image["image"] for image in yaml.safe_load(notes["images"])}
    assert images == {f"dlo/{name}:{chart['appVersion']}" for name in ("operator", "agent", "engine")}
    pyproject = (CHART.parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["appVersion"]}"\n' in pyproject


def test_older_clusters_are_refused() -> None:
    """The policies and the node in tokens came with 1.30."""
    done = template("--kube-version", "1.29.9")
    assert done.returncode != 0
    assert "requires kubeVersion: >=1.30.0-0" in done.stderr
    assert template("--kube-version", "1.30.0").returncode == 0


def test_notes_say_the_next_command(tmp_path: Path) -> None:
    """The manifest in them is one that the product takes."""
    from dlo_api.load import load_manifest

    done = helm(
        *("install", "weights", str(CHART), "-n", "team", "--dry-run=client"),
        *("--set", "cleanup.enabled=false"),
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:\n")[2]
    assert "kubectl label namespace team pod-security.kubernetes.io/enforce=privileged" in notes
    assert "--serviceaccount=team:weights-dlo-operator-operator" in notes
    assert "--take-ownership" in notes
    manifest = notes.partition("<<MANIFEST\n")[2].partition("     MANIFEST")[0]
    text = "\n".join(line.removeprefix("     ") for line in manifest.splitlines())
    assert load_manifest(text, "notes").spec.parallelism.tensor == 2
    kept = helm("install", "weights", str(CHART), "--dry-run=client", "--set", "crds.keep=false").stdout
    assert "--take-ownership" not in kept


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_init_root_needs_the_capabilities_that_it_has_and_no_less(tmp_path: Path) -> None:
    """On a folder of root's, and again on the root that it has made; without any one of them it fails."""
    pod = one(rendered("default"), "DaemonSet", "default")["spec"]["template"]["spec"]
    wanted = pod["initContainers"][0]["securityContext"]["capabilities"]["add"]

    def init(folder: Path, capabilities: list[str]) -> subprocess.CompletedProcess[str]:
        allowed = ",".join(["-all", *(f"+{name.lower()}" for name in capabilities)])
        command = ["setpriv", f"--bounding-set={allowed}", "--inh-caps=-all", "--no-new-privs"]
        agent = [sys.executable, "-P", "-m", "dlo_agent", "init-root", "--root", str(folder)]
        return subprocess.run(
            [*command, *agent, "--uid=65532", "--gid=65532"], capture_output=True, text=True, timeout=60
        )

    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    for _ in range(2):
        done = init(folder, wanted)
        assert done.returncode == 0, done.stderr
    assert (folder.stat().st_uid, folder.stat().st_gid, folder.stat().st_mode & 0o777) == (
        65532,
        65532,
        0o750,
    )
    for lacking in wanted:
        other = tmp_path / lacking
        other.mkdir(mode=0o755)
        assert init(other, [name for name in wanted if name != lacking]).returncode == 1, lacking
