"""Who may do what, tried with the accounts, tokens and mounts that the chart and the operator give."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from cluster.clusters import Cluster, until
from cluster.images import name_of
from cluster.product import CACHE, Deployed, Release

#: Ways to write below a folder; each prints its name when it was refused, and ends the program when it was not.
_WRITES = """
import ctypes, fcntl, json, os, pathlib, sys
root = pathlib.Path(sys.argv[1])
entries = sorted((root / "v1" / "entries").iterdir())
entry = entries[0]
file = entry / "manifest.json"
lease = entry / "lease"
libc = ctypes.CDLL(None, use_errno=True)

def locked():
    fd = os.open(lease, os.O_RDONLY)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

def remounted():
    if libc.mount(b"none", os.fsencode(str(entry)), None, 32 | 4096, None):
        raise OSError(ctypes.get_errno(), "mount")

ways = {
    "open for writing": lambda: open(file, "r+b"),
    "truncate": lambda: os.truncate(file, 0),
    "create": lambda: open(entry / "new", "xb"),
    "make a folder": lambda: os.mkdir(entry / "new"),
    "remove": lambda: os.unlink(file),
    "rename": lambda: os.rename(file, entry / "other"),
    "hard link": lambda: os.link(file, entry / "other"),
    "symbolic link": lambda: os.symlink("/etc/passwd", entry / "other"),
    "change the mode": lambda: os.chmod(file, 0o777),
    "change the times": lambda: os.utime(file),
    "set an attribute": lambda: os.setxattr(file, "user.x", b"1"),
    "lock out the builder": locked,
    "remount": remounted,
    "create beside": lambda: os.mkdir(root / "v1" / "entries" / "new"),
}
done = []
for name, way in ways.items():
    try:
        way()
    except OSError:
        continue
    done.append(name)
print(json.dumps({"entries": [each.name for each in entries], "done": done, "tried": len(ways)}))
"""


def test_an_engine_sees_its_own_entries_alone_and_can_write_none(
    cluster: Cluster, deploy: Callable[..., Deployed]
) -> None:
    first = deploy(replicas=1)
    # Other entries of the same model: those of one coordinate instead of two.
    second = deploy("other", replicas=1, parallelism={"tensor": 1})
    seen = {}
    for each in (first, second):
        each.wait()
        told = json.loads(_in_engine(each, _WRITES, CACHE))
        assert told["done"] == []
        assert told["tried"] >= 12
        seen[each.name] = set(told["entries"])
        assert seen[each.name] == {entry["inputKey"] for entry in each.get()["status"]["cache"]["entries"]}
    assert seen["digits"] - seen["other"]
    assert seen["other"] - seen["digits"]


def test_an_agents_token_writes_its_own_node_and_no_other(
    cluster: Cluster, release: Release, worker: str
) -> None:
    """With the token that is mounted in the running agent, not one made for the test."""
    pod = next(p["metadata"]["name"] for p in release.pods("agent") if p["spec"]["nodeName"] == worker)
    other = next(node for node in cluster.nodes() if node != worker)
    told = json.loads(
        cluster.kubectl(
            *("exec", "-i", "-n", release.namespace, pod, "-c", "agent", "--", "python", "-"),
            *(worker, other, release.namespace),
            text=_AS_AGENT,
        )
    )
    assert told["own status"] == 200, told
    assert told["own lease"] == 200, told
    refused = {name: status for name, status in told.items() if not name.startswith("own ")}
    assert set(refused.values()) == {403}, told
    assert len(refused) >= 8


_AS_AGENT = """
import json, ssl, sys, urllib.error, urllib.request
own, other, system = sys.argv[1:]
place = "/var/run/secrets/kubernetes.io/serviceaccount"
token = open(place + "/token").read()
trust = ssl.create_default_context(cafile=place + "/ca.crt")
cache = "/apis/dlo.dev/v1alpha1/nodeweightcaches"
leases = f"/apis/coordination.k8s.io/v1/namespaces/{system}/leases"
patch = "application/merge-patch+json"

def ask(method, path, body=None, kind=patch):
    request = urllib.request.Request("https://kubernetes.default.svc" + path, method=method)
    request.add_header("Authorization", "Bearer " + token)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", kind)
    try:
        with urllib.request.urlopen(request, context=trust) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}

told = {
    "own status": ask("PATCH", f"{cache}/{own}/status", {"status": {}})[0],
    "own lease": ask("PATCH", f"{leases}/{own}", {"metadata": {"labels": {}}})[0],
    "other status": ask("PATCH", f"{cache}/{other}/status", {"status": {"agentVersion": "forged"}})[0],
    "other lease": ask("PATCH", f"{leases}/{other}", {"spec": {"holderIdentity": "forged"}})[0],
    "own spec": ask("PATCH", f"{cache}/{own}", {"spec": {"entries": []}})[0],
    "delete": ask("DELETE", f"{cache}/{other}")[0],
    "nodes": ask("PATCH", f"/api/v1/nodes/{own}", {"metadata": {"labels": {"x": "y"}}})[0],
    "list secrets": ask("GET", "/api/v1/secrets")[0],
    "secrets elsewhere": ask("GET", "/api/v1/namespaces/kube-system/secrets/x")[0],
    "deployments": ask("GET", "/apis/dlo.dev/v1alpha1/diffusiondeployments")[0],
    "pods": ask("GET", f"/api/v1/namespaces/{system}/pods")[0],
}
print(json.dumps(told))
"""


def test_a_restricted_namespace_takes_engines_with_a_volume_and_says_so(
    cluster: Cluster, registry: str, deploy: Callable[..., Deployed], namespace: str, worker: str
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    digits = deploy(replicas=1)
    refused = digits.wait("Accepted", "PodSecurityDenied")
    assert "cache.mount: PersistentVolume" in refused["message"]
    assert digits.pods() == []
    digits.patch({"cache": {"mount": "PersistentVolume"}})
    digits.wait()
    assert digits.draw("a handwritten four").startswith(b"\x89PNG")
    assert json.loads(_in_engine(digits, _WRITES, CACHE))["done"] == []
    claim = next(iter(cluster.get("pvc", namespace=namespace)))["metadata"]["name"]
    # Another pod of the namespace, under the agent's own uid: without readOnly it is refused, with it it reads.
    tenant = _tenant(namespace, claim, name_of("agent", registry), worker)
    assert "readOnly true" in cluster.refused("apply", "-f", "-", text=json.dumps(tenant))
    tenant["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = True
    cluster.apply(tenant)
    cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod/tenant", "--timeout=60s")
    words = ["exec", "-i", "-n", namespace, "tenant", "--", "python", "-", "/cache"]
    assert json.loads(cluster.kubectl(*words, text=_WRITES))["done"] == []
    cluster.kubectl("delete", "pod", "tenant", "-n", namespace, "--wait")
    cluster.kubectl("delete", "ddep", "digits", "-n", namespace, "--wait")
    until("without volumes", lambda: not cluster.get("pv"), 120, lambda: cluster.get("pv"))
    assert cluster.get("pvc", namespace=namespace) == []


def _in_engine(deployed: Deployed, program: str, *arguments: str) -> str:
    pod = deployed.pods()[0]["metadata"]["name"]
    where = ["exec", "-i", "-n", deployed.namespace, pod, "-c", "engine", "--", "python", "-"]
    return deployed.cluster.kubectl(*where, *arguments, text=program)


def _tenant(namespace: str, claim: str, image: str, node: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "tenant", "namespace": namespace},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "tenant",
                    "image": image,
                    "command": ["python", "-c", "import signal; signal.pause()"],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                }
            ],
            "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }


def test_the_operators_account_reads_no_secret_outside_the_agents_namespace(
    cluster: Cluster, release: Release
) -> None:
    account = release.pods("operator")[0]["spec"]["serviceAccountName"]
    who = f"--as=system:serviceaccount:{release.namespace}:{account}"
    for verb in ("get", "list", "watch", "create", "delete"):
        for where in ("kube-system", "default"):
            assert (
                cluster.kubectl("auth", "can-i", verb, "secrets", "-n", where, who, check=False).strip()
                == "no"
            )
    assert cluster.kubectl("auth", "can-i", "get", "secrets", "-n", release.namespace, who).strip() == "yes"
    with pytest.raises(RuntimeError, match="forbidden"):
        cluster.kubectl("label", "node", cluster.nodes()[0], "other=label", who)
