"""Things go wrong on a node, are reported by their reasons, and heal when the cause is gone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from dlo_api.identity import source_id
from dlo_api.v1alpha1.node_weight_cache import NodeWeightCacheStatus
from dlo_api.v1alpha1.source import DirectorySource, Source
from dlo_cache import store
from dlo_cache.root import MARKER, init_root, open_root
from dlo_cli.samples import samples_root
from dlo_kube.errors import Unavailable
from dlo_kube.kinds import NODE_WEIGHT_CACHE
from unit.agent.one_node import NODE, OneNode, SmallDisk, layout, source, two_ranks


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    """The disk under the root."""
    small = SmallDisk()
    monkeypatch.setattr(os, "statvfs", small)
    return small


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[tuple[OneNode, Path]]:
    """A node with a root of checkpoints of its own, still empty."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    node = OneNode(init_root(tmp_path / "cache").path, source_roots={"mine": folder})
    yield node, folder
    node.close()


MINE = Source(directory=DirectorySource(root="mine", path="digits"))


def mine(*entries: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Entries and sources of the checkpoint in the node's own root."""
    return [{**each, "sourceId": source_id(MINE)} for each in entries or two_ranks()], [source(MINE)]


def flip(path: Path, at: int) -> None:
    """Changes one bit of a read-only file."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    path.chmod(0o444)


def block_of(node: OneNode, key: str) -> Path:
    """The largest data file of an entry."""
    return max(
        (node.settings.root / "v1/entries" / key).glob("*.safetensors"), key=lambda path: path.stat().st_size
    )


def test_a_disk_that_is_too_small(node: OneNode, disk: SmallDisk) -> None:
    """Refused before the first byte; built as soon as there is room, without waiting for the pause."""
    disk.free = 1 << 20
    node.ask(two_ranks())
    status = node.settle()
    assert {each["reason"] for each in status["entries"]} == {"InsufficientDisk"}
    assert {each["phase"] for each in status["entries"]} == {"Failed"}
    assert node.condition("SpaceAvailable")["reason"] == "InsufficientDisk"
    assert node.condition("Ready")["reason"] == "InsufficientDisk"
    assert status["root"]["freeBytes"] < 1 << 34
    assert node.stored() == set()
    assert list((node.settings.root / "v1/ingest").iterdir()) == []
    disk.free = 1 << 30
    status = node.settle()
    assert node.condition("Ready")["status"] == "True"
    assert node.condition("SpaceAvailable")["status"] == "True"
    assert not any("nextAttempt" in each for each in status["entries"])


def test_room_is_made_from_what_nobody_refers_to(node: OneNode, disk: SmallDisk) -> None:
    """An entry that no object of ours listed goes, oldest first, once a wanted one lacks its room."""
    node.ask([layout(0), layout(1)])
    node.settle()
    ours = node.stored()
    node.cluster.remove(NODE_WEIGHT_CACHE, NODE)
    node.ask([layout(0, 4)])
    disk.free = 1 << 20
    node.settle()
    assert node.stored() < ours
    disk.free = None
    node.advance(400)
    node.settle()
    assert node.entries()["0/4"]["phase"] == "Ready"


def test_a_flipped_bit_is_found_by_the_scrub(tmp_path: Path) -> None:
    """Set aside, built again from the source, checked again; the readers' proof stays the same."""
    node = OneNode(init_root(tmp_path / "cache").path, scrub_seconds=1000.0)
    node.ask(two_ranks())
    before = node.settle()
    key = before["entries"][0]["inputKey"]
    inode = block_of(node, key).stat().st_ino
    flip(block_of(node, key), -100)
    node.advance(999)
    assert node.settle()["entries"] == before["entries"]
    node.advance(1)
    after = node.settle()
    assert {each["phase"] for each in after["entries"]} == {"Ready"}
    assert [each["manifestSha256"] for each in after["entries"]] == [
        each["manifestSha256"] for each in before["entries"]
    ]
    assert block_of(node, key).stat().st_ino != inode
    aside = [path.name for path in (node.settings.root / "v1/quarantine").iterdir()]
    assert sum(name.startswith(key) for name in aside) == 2
    node.close()


def test_bytes_that_an_engine_doubts_are_checked_at_once_and_once(tmp_path: Path) -> None:
    """Damage that no scrub would find for days is mended as soon as an engine has met it."""
    node = OneNode(init_root(tmp_path / "cache").path)
    node.ask(two_ranks())
    before = node.settle()
    damaged = before["entries"][0]["inputKey"]
    flip(block_of(node, damaged), -100)
    node.advance(60)
    assert node.settle()["entries"] == before["entries"]
    doubted = datetime.fromtimestamp(node.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    node.ask([{**each, "verifiedAfter": doubted} for each in two_ranks()])
    node.advance(2)
    after = node.settle()
    assert {each["phase"] for each in after["entries"]} == {"Ready"}
    assert [each["manifestSha256"] for each in after["entries"]] == [
        each["manifestSha256"] for each in before["entries"]
    ]
    aside = (node.settings.root / "v1/quarantine").iterdir()
    assert {path.name.split(".")[0] for path in aside} == {damaged}
    assert all(each["lastVerified"] > doubted for each in after["entries"])
    node.ask(two_ranks())
    node.advance(60)
    # The doubt is taken back once the engine runs; what was checked stays checked.
    assert node.settle()["entries"] == after["entries"]
    node.close()


def test_damage_is_reported_until_it_is_mended(tmp_path: Path) -> None:
    """Without its source a bad entry stays Quarantined, IntegrityFailed; with it, it is built again."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(samples_root() / "digits", folder / "digits")
    node = OneNode(init_root(tmp_path / "cache").path, source_roots={"mine": folder}, scrub_seconds=1000.0)
    node.ask(*mine(layout(0)))
    key = node.settle()["entries"][0]["inputKey"]
    (folder / "digits").rename(folder / "away")
    flip(block_of(node, key), -100)
    node.advance(1000)
    node.turn()
    node.wait_for(lambda: node.status()["entries"][0].get("reason") == "IntegrityFailed")
    assert key not in node.stored()
    node.settle()
    assert node.status()["entries"][0]["reason"] == "SourceNotFound"
    assert node.condition("Ready")["status"] == "False"
    (folder / "away").rename(folder / "digits")
    node.advance(600)
    assert node.settle()["entries"][0]["phase"] == "Ready"
    node.close()


def test_an_entry_cut_short_is_set_aside(node: OneNode) -> None:
    """What a reader would refuse to open is not Ready: it is quarantined and built again."""
    node.ask([layout(0)])
    key = node.settle()["entries"][0]["inputKey"]
    path = block_of(node, key)
    path.chmod(0o644)
    os.truncate(path, 4096)
    (node.settings.root / "v1/entries" / key).chmod(0o555)
    node.restart()
    assert node.settle()["entries"][0]["phase"] == "Ready"
    assert any(each.name.startswith(key) for each in (node.settings.root / "v1/quarantine").iterdir())


def test_a_source_that_is_not_there_yet(checkpoints: tuple[OneNode, Path]) -> None:
    """SourceNotFound with the next attempt; resolved and built once it has appeared and the pause is over."""
    node, folder = checkpoints
    node.ask(*mine())
    status = node.settle()
    assert status["sources"][0]["reason"] == "SourceNotFound"
    assert {(each["phase"], each["reason"]) for each in status["entries"]} == {("Pending", "SourceNotFound")}
    NodeWeightCacheStatus.model_validate_json(json.dumps(status))
    shutil.copytree(samples_root() / "digits", folder / "digits")
    assert node.settle()["sources"][0]["reason"] == "SourceNotFound"
    node.advance(10)
    assert {each["phase"] for each in node.settle()["entries"]} == {"Ready"}


def test_a_source_that_changes_after_it_was_resolved(checkpoints: tuple[OneNode, Path]) -> None:
    """Nothing is built from other bytes than those that were reported; put back, it is built."""
    node, folder = checkpoints
    shutil.copytree(samples_root() / "digits", folder / "digits")
    entries, sources = mine()
    node.ask([], sources)
    digest = node.settle()["sources"][0]["digest"]
    readable = folder / "digits/scheduler/scheduler_config.json"
    before = readable.read_bytes()
    readable.write_bytes(before + b"\n")
    node.ask(entries, sources)
    status = node.settle()
    assert {each["reason"] for each in status["entries"]} == {"SourceMismatch"}
    assert status["sources"][0]["digest"] == digest
    assert node.stored() == set()
    readable.write_bytes(before)
    node.advance(100)
    assert {each["phase"] for each in node.settle()["entries"]} == {"Ready"}


def test_an_entry_that_somebody_removed(node: OneNode) -> None:
    """Built again, and checked again before it counts."""
    node.ask([layout(0)])
    before = node.settle()["entries"][0]
    store.remove(open_root(node.settings.root), before["inputKey"])
    node.advance(50)
    after = node.settle()["entries"][0]
    assert after["phase"] == "Ready"
    assert after["inputKey"] == before["inputKey"]
    assert after["lastVerified"] > before["lastVerified"]


def test_a_half_copied_source(checkpoints: tuple[OneNode, Path]) -> None:
    """A missing shard is SourceIncomplete, never a smaller model."""
    node, folder = checkpoints
    shutil.copytree(samples_root() / "digits", folder / "digits")
    (folder / "digits/transformer/diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    node.ask(*mine())
    assert node.settle()["sources"][0]["reason"] == "SourceIncomplete"


def test_a_path_that_leads_out_of_its_root(checkpoints: tuple[OneNode, Path], tmp_path: Path) -> None:
    """Refused, whether by dots, by an absolute path, or by a link."""
    node, folder = checkpoints
    shutil.copytree(samples_root() / "digits", tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    for path in ("../secret", str(tmp_path / "secret"), "link"):
        outside = Source(directory=DirectorySource(root="mine", path=path))
        node.ask([], [source(outside)])
        assert node.settle()["sources"][0]["reason"] == "SourceUntrusted", path


def test_an_unknown_root_names_those_there_are(checkpoints: tuple[OneNode, Path]) -> None:
    """The message says which roots the node has."""
    node, _ = checkpoints
    node.ask([])
    (found,) = node.settle()["sources"]
    assert found["reason"] == "SourceNotFound"
    assert "mine" in found["message"]


def test_a_size_that_does_not_divide(node: OneNode) -> None:
    """Said once, tried again slowly, and the other entries are built."""
    node.ask([layout(0, 3), layout(0)])
    status = node.settle()
    assert [(each["phase"], each.get("reason")) for each in status["entries"]] == [
        ("Failed", "NotDivisible"),
        ("Ready", None),
    ]


def test_a_root_that_is_not_mounted(tmp_path: Path) -> None:
    """Reported, nothing written into the empty folder, and healed when the marker appears."""
    folder = tmp_path / "cache"
    folder.mkdir()
    node = OneNode(folder)
    node.ask(two_ranks())
    status = node.settle()
    assert node.condition("StorageHealthy")["reason"] == "RootNotMounted"
    assert node.condition("Ready")["reason"] == "RootNotMounted"
    assert node.condition("SpaceAvailable")["status"] == "Unknown"
    assert {each["reason"] for each in status["entries"]} == {"RootNotMounted"}
    assert "totalBytes" not in status["root"]
    NodeWeightCacheStatus.model_validate_json(json.dumps(status))
    assert list(folder.iterdir()) == []
    init_root(folder)
    node.settle()
    assert node.condition("StorageHealthy")["status"] == "True"
    assert node.condition("Ready")["status"] == "True"
    node.close()


def test_a_root_that_goes_and_comes_back(node: OneNode) -> None:
    """The disk is taken away under the agent: reported; put back: Ready at once, nothing was lost."""
    node.ask(two_ranks())
    node.settle()
    marker = node.settings.root / MARKER
    marker.rename(marker.with_suffix(".away"))
    node.settle()
    assert node.condition("StorageHealthy")["reason"] == "RootNotMounted"
    assert len(node.stored()) == 3
    marker.with_suffix(".away").rename(marker)
    node.settle()
    assert node.condition("Ready")["status"] == "True"


def test_the_api_server_is_away(node: OneNode) -> None:
    """Builds go on, the status is written when the server is back, and pauses between the tries grow."""

    def refuse(call: Any) -> None:
        if call.verb == "apply_status":
            raise Unavailable("the API server gave no answer")

    node.cluster.before.append(refuse)
    node.ask(two_ranks())
    node.settle()
    assert len(node.stored()) == 3
    tries = node.writes()
    for _ in range(20):
        node.turn()
    assert node.writes() == tries
    node.cluster.before.remove(refuse)
    node.advance(60)
    node.settle()
    assert node.condition("Ready")["status"] == "True"
