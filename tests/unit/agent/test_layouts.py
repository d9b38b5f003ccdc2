"""Layouts that the agent is given by name, beside those that ship with the product."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dlo_api.identity import source_id
from dlo_api.v1alpha1.source import DirectorySource, Source
from dlo_cache.layout import Layout
from dlo_cache.layouts import builtin_layout
from dlo_cache.root import init_root
from dlo_cli.samples import samples_root
from unit.agent.one_node import OneNode, layout, source

FLUX = "FluxTransformer2DModel"
OTHER = Source(directory=DirectorySource(root="mine", path="other"))


def built_in() -> Layout:
    """The product's own layout of the sample."""
    found = builtin_layout(FLUX)
    assert found is not None
    return found


def renamed(name: str, architecture: str = FLUX) -> Layout:
    """The same rules under another id."""
    return replace(built_in(), id=name, architecture=architecture)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[OneNode]:
    """A node with two layouts, and a root with a checkpoint of a class that is not built in."""
    folder = tmp_path / "mine"
    shutil.copytree(samples_root() / "digits", folder / "other")
    for path in (folder / "other/model_index.json", folder / "other/transformer/config.json"):
        path.write_text(path.read_text().replace(FLUX, "OtherTransformer"))
    made = OneNode(
        init_root(tmp_path / "cache").path,
        source_roots={"samples": samples_root(), "mine": folder},
        layouts={"mine": renamed("mine"), "other": renamed("other", "OtherTransformer")},
    )
    yield made
    made.close()


def test_a_named_layout_cuts(node: OneNode) -> None:
    """Its id and digest are part of the entry's name; the bytes are those of its rules."""
    node.ask([layout(0), layout(0, layout="mine")])
    own, named = node.settle()["entries"]
    assert (own["phase"], named["phase"]) == ("Ready", "Ready")
    assert own["inputKey"] != named["inputKey"]
    manifest = json.loads(
        (node.settings.root / "v1/entries" / named["inputKey"] / "manifest.json").read_text()
    )
    stated = json.dumps(manifest)
    assert renamed("mine").digest in stated
    assert built_in().digest not in stated
    assert node.status()["sources"][0]["layoutDigest"] == built_in().digest


def test_a_name_that_this_node_does_not_know(node: OneNode) -> None:
    """UnknownLayout with the names there are; a layout of another class is refused too."""
    node.ask([layout(0, layout="yours"), layout(0, layout="other")])
    unknown, wrong = node.settle()["entries"]
    assert (unknown["reason"], wrong["reason"]) == ("UnknownLayout", "UnknownLayout")
    assert "known: mine, other" in unknown["message"]
    assert "OtherTransformer" in wrong["message"]


def test_a_class_that_is_not_built_in(node: OneNode) -> None:
    """Blocks, head counts and digest are reported by the layout that the agent was given for it."""
    node.ask([{**layout(0, layout="other"), "sourceId": source_id(OTHER)}], [source(OTHER)])
    status = node.settle()
    assert status["entries"][0]["phase"] == "Ready"
    found = status["sources"][0]
    assert found["architecture"] == "OtherTransformer"
    assert found["layoutDigest"] == renamed("other", "OtherTransformer").digest
    assert found["headCounts"]
    transformer = next(each for each in found["components"] if each["name"] == "transformer")
    assert transformer["blocks"] > 0


def test_a_layout_that_changes(node: OneNode, tmp_path: Path) -> None:
    """An agent started with another layout of the name builds again; with an unrelated one it does not."""
    node.ask([layout(0, layout="mine")])
    before = node.settle()["entries"][0]["inputKey"]
    node.close()
    for layouts, same in (
        ({"mine": renamed("mine"), "other": renamed("more", "OtherTransformer")}, True),
        ({"mine": renamed("changed")}, False),
    ):
        again = OneNode(node.settings.root, layouts=layouts)
        again.cluster = node.cluster
        again.restart()
        entry = again.settle()["entries"][0]
        assert entry["phase"] == "Ready"
        assert (entry["inputKey"] == before) is same
        again.close()
