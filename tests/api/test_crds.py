"""The CRDs as a server has them: accepted whole, explained, listed, scaled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api.apiserver import ApiServer
from api.conftest import CRDS
from contract.gateway import condition, with_status
from dlo_api.crdgen import KINDS, object_schema
from dlo_kube.client import ClusterGateway
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT
from unit.api.manifests import manifest

_DDEP, _NWCACHE = "diffusiondeployments.dlo.dev", "nodeweightcaches.dlo.dev"


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field.get("description", "")
        yield from _fields(field, f"{path}.{name}")
        yield from _fields(field.get("items", {}), f"{path}.{name}")


@pytest.mark.parametrize("name", [_DDEP, _NWCACHE])
def test_crd_is_accepted(server: ApiServer, name: str) -> None:
    """H7: Established, names accepted, nothing non-structural; and what is stored is what we generated."""
    crd = json.loads(server.kubectl("get", "crd", name, "-o", "json"))
    conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    (kind,) = [kind for kind in KINDS if kind.crd == name]
    stored = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert stored == object_schema(kind)


def test_crds_apply_again_without_a_change(server: ApiServer) -> None:
    """A second install is no change: nothing in the files is rewritten by the server."""
    before = server.kubectl("get", "crd", _DDEP, _NWCACHE, "-o", "jsonpath={.items[*].metadata.generation}")
    server.kubectl("apply", "--server-side", "-f", str(CRDS))
    server.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", str(CRDS))
    after = server.kubectl("get", "crd", _DDEP, _NWCACHE, "-o", "jsonpath={.items[*].metadata.generation}")
    assert before == after == "1 1"


def test_crds_fit_a_plain_apply(server: ApiServer) -> None:
    """Without `--server-side` too: the annotation that keeps the last file has room."""
    server.kubectl("apply", "--dry-run=server", "-f", str(CRDS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_field_is_published_with_words(server: ApiServer, kind: Any) -> None:
    """All levels of the published schema, which is what `kubectl explain` and editors read."""
    page = json.loads(server.kubectl("get", "--raw", "/openapi/v3/apis/dlo.dev/v1alpha1"))
    schema = page["components"]["schemas"][f"dev.dlo.v1alpha1.{kind.name}"]
    for part in ("spec", "status"):
        published = dict(_fields(schema["properties"][part], part))
        assert published == dict(_fields(object_schema(kind)["properties"][part], part))
        assert all(len(words) > 8 for words in published.values())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("ddep", "served by engines that stream its blocks"),
        ("ddep.spec.model.source", "exactly one member"),
        ("ddep.spec.model.source.huggingFace.tokenSecretRef.key", "Key in the Secret"),
        ("ddep.spec.offload.residentLayers", "Auto to fill deviceMemoryBudget"),
        ("ddep.spec.placement.affinity", "Affinity (core type)"),
        ("ddep.status.cache.entries.inputKey", "Key under which nodes store it"),
        ("ddep.status.conditions.reason", "One stable CamelCase word"),
        ("nwcache", "named after it and owned by it"),
        ("nwcache.spec.entries.tensorRank", "Tensor parallel rank"),
        ("nwcache.status.root.freeBytes", "in steps of one per cent"),
    ],
)
def test_explain(server: ApiServer, path: str, words: str) -> None:
    """By short name, at several levels."""
    assert words in " ".join(server.kubectl("explain", path).split())


@pytest.fixture
def listed(gateway: ClusterGateway, namespace: str) -> str:
    """A namespace with one deployment of each source; the last one has a status."""
    sources: dict[str, dict[str, Any]] = {
        "directory": {"directory": {"root": "samples", "path": "digits"}},
        "hub": {"huggingFace": {"repo": "org/name"}},
        "bucket": {"s3": {"bucket": "models"}},
    }
    for name, source in sources.items():
        value = manifest({"spec.model.source": source})
        value["metadata"] = {"name": name, "namespace": namespace}
        gateway.apply(value, manager="user")
    status = {
        "replicas": 2,
        "readyReplicas": 1,
        "selector": "dlo.dev/deployment=bucket",
        "revision": {"current": "5f2c"},
        "cache": {"summary": "3/4", "savedBytesPerNode": 5_000_000_000},
        "conditions": [condition("Ready", "False", "Warming")],
    }
    gateway.apply_status(with_status(value, **status), manager="dlo-operator")
    return namespace


def _rows(table: str) -> list[list[str]]:
    """A table of kubectl, by its columns' places."""
    head, *rows = table.splitlines()
    names = head.split()
    starts = [head.index(f"{name}") for name in names]
    ends = [*starts[1:], None]
    return [
        names,
        *([row[start:end].strip() for start, end in zip(starts, ends, strict=True)] for row in rows if row),
    ]


def test_columns(server: ApiServer, listed: str) -> None:
    """What `kubectl get` shows; unknown is empty, not 0."""
    head, bucket, directory, hub = _rows(server.kubectl("get", "ddep", "-n", listed))
    assert head == ["NAME", "READY", "REASON", "CACHE", "REPLICAS", "MODE", "AGE"]
    assert bucket[:6] == ["bucket", "False", "Warming", "3/4", "1", "DistributedLayerwise"]
    assert directory[:6] == ["directory", "", "", "", "", "DistributedLayerwise"]
    assert hub[:6] == ["hub", "", "", "", "", "DistributedLayerwise"]
    assert bucket[6].endswith("s")


def test_wide_columns_name_the_model_of_every_source(server: ApiServer, listed: str) -> None:
    """One column for three places a model can be in."""
    head, bucket, directory, hub = _rows(server.kubectl("get", "ddep", "-n", listed, "-o", "wide"))
    assert head[7:] == ["MODEL", "REVISION", "SAVED"]
    assert bucket[7:] == ["models", "5f2c", "5000000000"]
    assert directory[7:] == ["digits", "", ""]
    assert hub[7:] == ["org/name", "", ""]


def test_columns_of_a_node(server: ApiServer, gateway: ClusterGateway) -> None:
    """Its short name, and `-o wide`."""
    node = {"apiVersion": "dlo.dev/v1alpha1", "kind": "NodeWeightCache", "metadata": {"name": "columns"}}
    gateway.apply(node, manager="dlo-operator")
    root = {"path": "/var/lib/dlo", "usedBytes": 40, "freeBytes": 50}
    status = {"root": root, "agentVersion": "0.1.0", "conditions": [condition("Ready")]}
    gateway.apply_status(with_status(node, **status), manager="dlo-agent")
    head, row = _rows(server.kubectl("get", "nwcache", "columns", "-o", "wide"))
    assert head == ["NAME", "READY", "REASON", "USED", "FREE", "AGE", "PATH", "AGENT"]
    assert row[:5] == ["columns", "True", "Because", "40", "50"]
    assert row[6:] == ["/var/lib/dlo", "0.1.0"]


def test_category_lists_both_kinds(server: ApiServer, gateway: ClusterGateway, listed: str) -> None:
    """`kubectl get dlo`, and `all` is left alone."""
    node = {"apiVersion": "dlo.dev/v1alpha1", "kind": "NodeWeightCache", "metadata": {"name": "category"}}
    gateway.apply(node, manager="dlo-operator")
    found = server.kubectl("get", "dlo", "-n", listed, "-o", "name").split()
    assert f"{'diffusiondeployment.dlo.dev'}/hub" in found
    assert "nodeweightcache.dlo.dev/category" in found
    assert server.kubectl("get", "all", "-n", listed, "-o", "name") == ""


def test_scale(server: ApiServer, gateway: ClusterGateway, listed: str) -> None:
    """`kubectl scale` sets replicas; an autoscaler reads count and selector; bounds hold there too."""
    server.kubectl("scale", "ddep/bucket", "-n", listed, "--replicas=4")
    found = gateway.get(DIFFUSION_DEPLOYMENT, "bucket", listed)
    assert found is not None
    assert found["spec"]["replicas"] == 4
    path = f"/apis/dlo.dev/v1alpha1/namespaces/{listed}/diffusiondeployments/bucket/scale"
    scale = json.loads(server.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 2, "selector": "dlo.dev/deployment=bucket"}
    assert "1000" in server.kubectl("scale", "ddep/bucket", "-n", listed, "--replicas=1001", check=False)


def test_wait_for_ready(server: ApiServer, gateway: ClusterGateway, listed: str) -> None:
    """`kubectl wait --for=condition=Ready` ends when it is so, and not before."""
    refused = server.kubectl(
        "wait", "--for=condition=Ready", "ddep/bucket", "-n", listed, "--timeout=0s", check=False
    )
    assert "condition not met" in refused
    bucket = gateway.get(DIFFUSION_DEPLOYMENT, "bucket", listed)
    assert bucket is not None
    bucket["metadata"] = {name: bucket["metadata"][name] for name in ("name", "namespace")}
    ready = with_status(bucket, conditions=[condition("Ready")])
    gateway.apply_status(ready, manager="dlo-operator")
    server.kubectl("wait", "--for=condition=Ready", "ddep/bucket", "-n", listed, "--timeout=5s")
