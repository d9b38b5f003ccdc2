"""`dlo plan --node`: real Node objects, what agents reported beside them, and what is not known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dlo_kube.kinds import NODE, NODE_WEIGHT_CACHE
from unit.cli.prompt import Dlo, Said
from unit.cli.test_bad_input import refused
from unit.operator.world import World

DIGITS = "model: {source: {directory: {root: samples, path: digits}}}\nengine: {device: Cpu}\n"
CUDA = DIGITS.replace("Cpu", "Cuda") + "parallelism: {tensor: 2}\n"
Manifest = Callable[[str], Path]


def node(name: str = "gpu-1", **changes: Any) -> dict[str, Any]:
    """A Node as the API server writes it, as far as anybody looks."""
    value: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"gen": "h200", "nvidia.com/gpu.memory": "143771"}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "7910m", "memory": "65865000Ki", "nvidia.com/gpu": "8", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    for path, new in changes.items():
        value[path] = {**value[path], **new}
    return value


def cache(name: str = "gpu-1", **status: Any) -> dict[str, Any]:
    """What its agent reports."""
    found = {
        "root": {"path": "/var/lib/dlo/cache", "freeBytes": 2**30},
        "memory": {"warmBudgetBytes": 2**30, "lockLimitBytes": 65536},
        **status,
    }
    return {
        "apiVersion": "dlo.dev/v1alpha1",
        "kind": "NodeWeightCache",
        "metadata": {"name": name},
        "spec": {},
        "status": found,
    }


def written(folder: Path, *objects: Any) -> Path:
    """A file with these documents."""
    file = folder / "nodes.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    return file


def verdict(said: Said) -> dict[str, Any]:
    """The one node's verdict."""
    assert said.status == 0, said
    (found,) = json.loads(said.out)["nodes"]
    assert isinstance(found, dict)
    return found


def needs(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its needs by name."""
    return {need["name"]: need for need in found["needs"]}


def test_a_node_that_has_all(dlo: Dlo, manifest: Manifest, tmp_path: Path) -> None:
    """GPUs, their memory, the root's room and the budgets, each from its own source."""
    file = written(tmp_path, node(), cache())
    found = verdict(dlo("plan", "-f", manifest(CUDA), "--node", file, "-o", "json"))
    assert (found["node"], found["eligible"], found["refused"], found["engines"]) == ("gpu-1", True, [], 4)
    by_name = needs(found)
    assert (by_name["GPUs"]["needed"], by_name["GPUs"]["has"]) == (2, 8)
    assert by_name["Device memory"]["has"] == 143771 * 2**20
    assert by_name["Memory, private"]["has"] == 65865000 * 1024
    assert by_name["Disk"]["has"] == 2**30
    assert [name for name, need in by_name.items() if need.get("fits") is False] == []
    text = dlo("plan", "-f", manifest(CUDA), "--node", file).out
    assert "Node gpu-1: an engine can run there, 4 by its GPUs" in text
    assert "RANK  COORDINATE" in text


def test_what_is_not_known_is_absent(dlo: Dlo, manifest: Manifest, tmp_path: Path) -> None:
    """Without the agent's report, without labels, without allocatable: never 0."""
    bare = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-1"}}
    found = verdict(dlo("plan", "-f", manifest(CUDA), "--node", written(tmp_path, bare), "-o", "json"))
    assert not any("has" in need for need in found["needs"])
    assert not any("fits" in need for need in found["needs"])
    assert "no NodeWeightCache was given" in needs(found)["Disk"]["note"]
    said = dlo("plan", "-f", manifest(CUDA), "--node", written(tmp_path, bare))
    assert said.out.count("unknown") == 7
    silent = {**cache(), "status": {}}
    found = verdict(
        dlo("plan", "-f", manifest(CUDA), "--node", written(tmp_path, node(), silent), "-o", "json")
    )
    assert "its agent has not reported" in needs(found)["Disk"]["note"]


TAINT = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
TERMS = [{"matchExpressions": [{"key": "gen", "operator": "In", "values": ["b200"]}]}]


@pytest.mark.parametrize(
    ("placement", "changes", "field", "words"),
    [
        ({"nodeSelector": {"gen": "b200"}}, {}, "spec.placement.nodeSelector", "label gen is 'h200', 'b200'"),
        ({"nodeSelector": {"zone": "a"}}, {}, "spec.placement.nodeSelector", "label zone is not there, 'a'"),
        (
            {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": TERMS}}}},
            {},
            "spec.placement.affinity",
            'gen In ["b200"]',
        ),
        ({}, {"spec": {"taints": [TAINT]}}, "spec.placement.tolerations", "nvidia.com/gpu=true:NoSchedule"),
        ({}, {"spec": {"unschedulable": True}}, "node.spec.unschedulable", "cordoned"),
        (
            {},
            {"status": {"conditions": [{"type": "Ready", "status": "False", "message": "no network"}]}},
            "node.status.conditions",
            "no network",
        ),
    ],
)
def test_the_rule_that_keeps_engines_off(
    dlo: Dlo,
    manifest: Manifest,
    tmp_path: Path,
    placement: dict[str, Any],
    changes: dict[str, Any],
    field: str,
    words: str,
) -> None:
    """One rule, by the field that decides, with what to change."""
    file = manifest(CUDA + f"placement: {json.dumps(placement)}\n")
    found = verdict(dlo("plan", "-f", file, "--node", written(tmp_path, node(**changes)), "-o", "json"))
    assert found["eligible"] is False
    (refusal,) = found["refused"]
    assert refusal["field"] == field
    assert words in refusal["message"]
    assert refusal["hint"]


def test_tolerated_taints_and_preferences_keep_nobody_off(
    dlo: Dlo, manifest: Manifest, tmp_path: Path
) -> None:
    """A toleration takes the taint; PreferNoSchedule is a wish."""
    taints = [TAINT, {"key": "slow", "effect": "PreferNoSchedule"}]
    placement = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    file = manifest(CUDA + f"placement: {json.dumps(placement)}\n")
    said = dlo("plan", "-f", file, "--node", written(tmp_path, node(spec={"taints": taints})), "-o", "json")
    assert verdict(said)["eligible"] is True


@pytest.mark.parametrize(
    ("status", "name"),
    [
        ({"root": {"path": "/c", "freeBytes": 2**20}}, "Disk"),
        ({"memory": {"warmBudgetBytes": 2**20}}, "Memory, shared"),
    ],
)
def test_what_does_not_fit(
    dlo: Dlo, manifest: Manifest, tmp_path: Path, status: dict[str, Any], name: str
) -> None:
    """Needed beside had, and the node is out."""
    file = written(tmp_path, node(), cache(**status))
    found = verdict(dlo("plan", "-f", manifest(CUDA), "--node", file, "-o", "json"))
    assert needs(found)[name]["fits"] is False
    assert found["eligible"] is False


def test_too_few_gpus_and_a_broken_root(dlo: Dlo, manifest: Manifest, tmp_path: Path) -> None:
    """A node with one GPU, whose disk is not mounted."""
    broken = {"type": "StorageHealthy", "status": "False", "reason": "RootNotMounted", "message": "no marker"}
    file = written(
        tmp_path,
        node(status={"allocatable": {"nvidia.com/gpu": "1", "memory": "64Gi"}}),
        cache(conditions=[broken]),
    )
    found = verdict(dlo("plan", "-f", manifest(CUDA), "--node", file, "-o", "json"))
    assert found["engines"] == 0
    assert needs(found)["GPUs"]["fits"] is False
    assert "RootNotMounted: no marker" in found["refused"][0]["message"]


def test_entries_that_are_there_need_no_disk(dlo: Dlo, manifest: Manifest, tmp_path: Path) -> None:
    """What the operator listed and an agent built, by the ids that both compute."""
    world = World(nodes=1)
    world.create(changes={"spec.parallelism.tensor": 1})
    world.settle()
    real, held = world.object(NODE, "node-1"), world.object(NODE_WEIGHT_CACHE, "node-1")
    for entry in held["status"]["entries"]:
        entry["bytes"] = 2**20
    spec = DIGITS + "placement: {}\n"
    empty = {**held, "status": {**held["status"], "entries": []}}
    full = verdict(dlo("plan", "-f", manifest(spec), "--node", written(tmp_path, real, held), "-o", "json"))
    none = verdict(dlo("plan", "-f", manifest(spec), "--node", written(tmp_path, real, empty), "-o", "json"))
    assert needs(none)["Disk"]["needed"] - needs(full)["Disk"]["needed"] == 2 * 2**20
    assert "engines" not in full


def test_lists_and_json_and_several_documents(dlo: Dlo, manifest: Manifest, tmp_path: Path) -> None:
    """As kubectl writes them: one object, a List, both kinds in any order."""
    several = {"apiVersion": "v1", "kind": "List", "items": [cache("b"), node("a"), node("b")]}
    said = dlo("plan", "-f", manifest(CUDA), "--node", written(tmp_path, several), "-o", "json")
    assert [found["node"] for found in json.loads(said.out)["nodes"]] == ["a", "b"]
    file = tmp_path / "node.json"
    file.write_text(json.dumps(node()))
    assert verdict(dlo("plan", "-f", manifest(CUDA), "--node", file, "-o", "json"))["eligible"] is True
    said = dlo("plan", "-f", manifest(CUDA), "--node", file, "-o", "yaml")
    assert yaml.safe_load(said.out)["nodes"][0]["node"] == "gpu-1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["there is no Node in it"]),
        ("a: [", ["not YAML"]),
        ("- 1\n", ["no object"]),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n", ["v1 Pod x is neither"]),
        ("apiVersion: v1\nkind: Node\n", ["without metadata.name"]),
        ("apiVersion: dlo.dev/v1alpha1\nkind: NodeWeightCache\nmetadata: {name: x}\n", ["no Node in it"]),
        ("a: !!python/object:os.system {}\n", ["not YAML"]),
    ],
)
def test_a_file_that_holds_no_node(
    dlo: Dlo, manifest: Manifest, tmp_path: Path, text: str, words: list[str]
) -> None:
    """Named, with the command that saves one."""
    file = tmp_path / "nodes.yaml"
    file.write_text(text)
    refused(dlo("plan", "-f", manifest(CUDA), "--node", file), 2, str(file), "kubectl get node", *words)


def test_a_report_without_its_node_and_a_missing_file(dlo: Dlo, manifest: Manifest, tmp_path: Path) -> None:
    """A NodeWeightCache of another node would be taken for nobody's."""
    file = written(tmp_path, node("a"), cache("b"))
    refused(dlo("plan", "-f", manifest(CUDA), "--node", file), 2, "NodeWeightCache b is of a node")
    refused(dlo("plan", "-f", manifest(CUDA), "--node", tmp_path / "gone"), 2, "cannot be read")
