"""What goes, when, and above all what stays."""

from __future__ import annotations

import json

from dlo_cache.entry import open_entry
from dlo_kube.errors import Unavailable
from dlo_kube.kinds import NODE_WEIGHT_CACHE
from fakes.kube import Call
from unit.agent.one_node import NODE, OneNode, layout, source, two_ranks


def test_an_emptied_spec_evicts_after_retention(node: OneNode) -> None:
    """Not a second before, and each entry by its own retention."""
    node.ask([layout(0, retention=100), layout(1, retention=200)])
    node.settle()
    node.ask([])
    node.settle()
    node.advance(99)
    node.settle()
    assert len(node.stored()) == 2
    node.advance(1)
    node.settle()
    assert len(node.stored()) == 1
    node.advance(100)
    node.settle()
    assert node.stored() == set()
    assert "entries" not in node.status()
    assert list((node.settings.root / "v1/trash").iterdir()) == []


def test_an_entry_that_is_read_stays(node: OneNode) -> None:
    """A reader's lease is a reference: the retention counts again when it has gone."""
    node.ask([layout(0)])
    key = node.settle()["entries"][0]["inputKey"]
    with open_entry(node.settings.root / "v1/entries" / key):
        node.ask([])
        node.settle()
        node.advance(10_000)
        node.settle()
        assert node.stored() == {key}
        node.ask([layout(0)])
        assert node.settle()["entries"][0]["lastUsed"] == "2030-03-17T20:00:00Z"
        node.ask([])
    node.settle()
    node.advance(3700)
    node.settle()
    assert node.stored() == set()


def test_what_is_listed_again_stays(node: OneNode) -> None:
    """Released and asked for again within its retention: no eviction, no build."""
    node.ask([layout(0)])
    before = node.settle()["entries"]
    node.ask([])
    node.settle()
    node.advance(50)
    node.ask([layout(0)])
    node.settle()
    node.advance(1000)
    assert node.settle()["entries"][0]["inputKey"] == before[0]["inputKey"]


def test_a_restart_remembers_the_retention(node: OneNode) -> None:
    """The countdown goes on across processes."""
    node.ask([layout(0)])
    node.settle()
    node.ask([])
    node.settle()
    node.advance(60)
    node.restart()
    node.settle()
    node.advance(40)
    node.settle()
    assert node.stored() == set()


def test_a_deleted_object_evicts_nothing(node: OneNode) -> None:
    """Absent is not empty."""
    node.ask(two_ranks(retention=0))
    node.settle()
    node.cluster.remove(NODE_WEIGHT_CACHE, NODE)
    for _ in range(3):
        node.settle()
        node.advance(100_000)
    assert len(node.stored()) == 3


def test_a_new_object_of_the_name_evicts_nothing(node: OneNode) -> None:
    """Neither empty nor with other entries: what an earlier object listed is not this one's to drop."""
    node.ask(two_ranks(retention=0))
    node.settle()
    node.cluster.remove(NODE_WEIGHT_CACHE, NODE)
    node.ask([])
    node.settle()
    node.ask([layout(0, 4, retention=0)])
    node.settle()
    node.ask([])
    node.advance(100_000)
    node.settle()
    assert len(node.stored()) == 3


def test_nothing_goes_without_a_live_look(node: OneNode) -> None:
    """While the server does not answer, what is known only from the watch takes no reference away."""

    def refuse(call: Call) -> None:
        if call.verb == "get" and armed:
            raise Unavailable("the API server gave no answer")

    armed = False
    node.ask([layout(0, retention=0)])
    node.settle()
    node.ask([])
    seen = node.cluster.get(NODE_WEIGHT_CACHE, NODE)
    node.cluster.before.append(refuse)
    armed = True
    node.loop.changed(seen)
    for _ in range(3):
        node.loop.turn()
        node.advance(100)
    assert len(node.stored()) == 1
    assert json.loads((node.settings.root / "v1/agent/references.json").read_text())["released"] == {}
    armed = False
    node.settle()
    node.advance(1)
    node.settle()
    assert node.stored() == set()


def test_retention_that_ends_while_the_server_is_away(node: OneNode) -> None:
    """The object may ask for the entry again by now, so the eviction waits for a look."""
    node.ask([layout(0)])
    node.settle()
    node.ask([])
    node.settle()
    node.advance(1000)

    def refuse(call: Call) -> None:
        if call.verb == "get":
            raise Unavailable("the API server gave no answer")

    node.cluster.before.append(refuse)
    node.loop.turn()
    node.wait_for_work()
    assert len(node.stored()) == 1
    node.cluster.before.remove(refuse)
    node.settle()
    assert node.stored() == set()


def test_a_stale_view_takes_nothing_away(node: OneNode) -> None:
    """An older generation that comes late is not acted on."""
    node.ask([])
    old = node.cluster.get(NODE_WEIGHT_CACHE, NODE)
    node.ask([layout(0, retention=0)])
    node.settle()
    node.loop.changed(old)
    node.loop.turn()
    node.advance(10)
    node.loop.turn()
    assert len(node.stored()) == 1


def test_a_new_revision_keeps_the_old_entry_for_its_retention(node: OneNode) -> None:
    """An entry id that stands for another source digest is another stored entry."""
    node.ask([layout(0)])
    status = node.settle()
    node.ask([layout(0)], [source(digest="cd" * 32)])
    after = node.settle()
    assert after["entries"][0]["reason"] == "SourceMismatch"
    assert "inputKey" not in after["entries"][0]
    node.advance(10_000)
    node.settle()
    assert node.stored() == {status["entries"][0]["inputKey"]}
