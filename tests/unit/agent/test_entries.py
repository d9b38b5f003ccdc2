"""From a spec to entries and a status, with the sample model."""

from __future__ import annotations

import json
from pathlib import Path

from dlo_api.v1alpha1.node_weight_cache import NodeWeightCacheStatus
from dlo_cache.build import build_layout_entries
from dlo_cache.files_entry import build_files_entry
from dlo_cache.layouts import builtin_layout
from dlo_cache.root import init_root
from dlo_cli.samples import samples_root
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.pipeline import open_directory
from unit.agent.one_node import DIGITS_ID, OneNode, source, two_ranks


def keys_of_a_run(root: Path) -> dict[str, tuple[str, str]]:
    """Key and manifest digest by coordinate of what `dlo run` builds at tensor size 2."""
    pipeline = open_directory(samples_root() / "digits")
    pipeline = pipeline.with_files(hash_files(pipeline.all_files(), DigestCache(None)))
    found = builtin_layout("FluxTransformer2DModel")
    assert found is not None
    cache = init_root(root)
    built = build_layout_entries(
        cache, pipeline.component("transformer"), found, tensor_size=2, producer={"program": "dlo"}
    )
    files = build_files_entry(
        cache,
        pipeline.rest_files(["transformer"]),
        select="PipelineRest",
        streamed=["transformer"],
        producer={},
    )
    named = {f"{rank}/2": each for rank, each in enumerate(built)} | {"rest": files}
    return {name: (each.key, each.manifest_sha256) for name, each in named.items()}


def test_a_spec_becomes_entries(node: OneNode, tmp_path: Path) -> None:
    """Resolved, built, verified, Ready, under the keys that one machine gives them."""
    node.ask(two_ranks())
    status = node.settle()
    NodeWeightCacheStatus.model_validate_json(json.dumps(status))
    found = {name: (each["inputKey"], each["manifestSha256"]) for name, each in node.entries().items()}
    assert found == keys_of_a_run(tmp_path / "other")
    assert {each["phase"] for each in node.entries().values()} == {"Ready"}
    for each in node.entries().values():
        assert "lastVerified" in each
        assert "reason" not in each
        assert "lastUsed" not in each, "the agent's own reading is no use"
    assert {each["type"]: each["status"] for each in status["conditions"]} == {
        "Ready": "True",
        "StorageHealthy": "True",
        "SpaceAvailable": "True",
    }
    assert status["root"]["usedBytes"] == sum(each["bytes"] for each in status["entries"])
    assert list((node.settings.root / "v1/progress").iterdir()) == []


def test_a_source_is_resolved_before_anyone_asks_for_entries(node: OneNode) -> None:
    """What an operator plans with: digest, architecture, heads, sizes."""
    node.ask([])
    status = node.settle()
    (found,) = status["sources"]
    assert found["id"] == DIGITS_ID
    assert found["architecture"] == "FluxTransformer2DModel"
    assert len(found["digest"]) == len(found["layoutDigest"]) == 64
    assert found["headCounts"] == [4]
    parts = {each["name"]: each for each in found["components"]}
    transformer = parts["transformer"]
    assert transformer["bytes"] >= transformer["blocks"] * 1000 + transformer["residentBytes"]
    assert transformer["largestBlockBytes"] <= transformer["bytes"]
    assert "blocks" not in parts["vae"]
    assert (
        found["restBytes"] + transformer["bytes"]
        < found["bytes"]
        < found["restBytes"] + 2 * transformer["bytes"]
    )


def test_the_pin_that_comes_back_changes_nothing(node: OneNode) -> None:
    """The operator copies the digest found here into the pin; nothing is read or built again."""
    node.ask(two_ranks())
    before = node.settle()
    node.ask(two_ranks(), [source(digest=before["sources"][0]["digest"])])
    after = node.settle()
    assert after["observedGeneration"] == before["observedGeneration"] + 1
    assert after["entries"] == before["entries"]
    assert after["sources"] == before["sources"]


def test_other_bytes_than_pinned(node: OneNode) -> None:
    """The node says so and builds nothing."""
    node.ask(two_ranks(), [source(digest="ab" * 32)])
    status = node.settle()
    assert status["sources"][0]["reason"] == "SourceMismatch"
    assert {each["reason"] for each in status["entries"]} == {"SourceMismatch"}
    assert node.stored() == set()


def test_nothing_changes_nothing_is_written(node: OneNode) -> None:
    """Idle turns and a restart write no status, even as time passes."""
    node.ask(two_ranks())
    node.settle()
    before = node.writes()
    for _ in range(20):
        node.advance(30)
        node.settle()
    node.restart()
    node.settle()
    assert node.writes() == before


def test_a_restart_is_ready_at_once(node: OneNode) -> None:
    """Bindings and verifications are remembered: the first turn reports Ready, even without the source."""
    node.ask(two_ranks())
    node.settle()
    node.restart()
    node.turn()
    assert not node.loop.busy
    assert node.condition("Ready")["status"] == "True"


def test_a_lost_ledger_costs_no_rebuild(node: OneNode) -> None:
    """Listed entries are found again by their keys; no byte is built twice."""
    node.ask(two_ranks())
    before = node.settle()
    inodes = {path.name: path.stat().st_ino for path in (node.settings.root / "v1/entries").iterdir()}
    (node.settings.root / "v1/agent/references.json").write_text("{ damaged")
    node.restart()
    after = node.settle()
    assert {path.name: path.stat().st_ino for path in (node.settings.root / "v1/entries").iterdir()} == inodes
    assert [each["inputKey"] for each in after["entries"]] == [each["inputKey"] for each in before["entries"]]
    assert {each["phase"] for each in after["entries"]} == {"Ready"}


def test_a_later_operator_is_not_misread(node: OneNode) -> None:
    """Unknown fields are left out; an entry that cannot be understood is reported and the others are served."""
    odd = {**two_ranks()[0], "id": "abcdef", "quantization": "Fp4"}
    extra = {**two_ranks()[0], "brandNew": 1}
    node.ask([odd, extra])
    status = node.settle()
    phases = {each["id"]: (each["phase"], each.get("reason")) for each in status["entries"]}
    assert phases == {"abcdef": ("Failed", "NotUnderstood"), extra["id"]: ("Ready", None)}
    NodeWeightCacheStatus.model_validate_json(json.dumps(status))
