"""What is printed: three explanations word for word, one JSON document of a stable form, little rights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dlo_cli.cluster import MOST_ASKED
from dlo_cli.console import Console
from dlo_cli.explain import Form, show
from dlo_cli.explain_text import lines
from dlo_cli.explanation import SCHEMA, Explanation
from dlo_kube.kinds import DEPLOYMENT, NODE_WEIGHT_CACHE, POD
from unit.cli.explained import SYSTEM, Engines, beat, deny, edit, explained, pod_status, roots, text
from unit.operator import causes
from unit.operator.world import NAMESPACE, World

GOLDEN = Path(__file__).parent / "golden"


def ready() -> World:
    """Two engines on one node and one on the other: a page of each entry is shared."""
    world = World()
    world.create(changes={"spec.replicas": 3})
    world.settle()
    beat(world)
    return world


def root_not_mounted() -> World:
    """The disk lacks on one node, and the other's agent builds."""
    world = World()
    world.agents["node-2"].storage = "RootNotMounted"
    world.agents["node-1"].idle = True
    world.create(changes={"spec.cache.prewarm": {"minReadyNodes": 2}})
    world.settle()
    beat(world)
    return world


def gate_deadline() -> World:
    """A rolled-out engine restarts on a node whose entry went bad."""
    world = World()
    causes.with_()(world)
    world.settle()
    message = (
        "DeadlinePassed: not ready after 3600 s: transformer 1/2: IntegrityFailed: block 3 has another digest"
        " — see the status of this node's NodeWeightCache\n"
    )
    ended = {"terminated": {"exitCode": 75, "message": message}}
    gate = {"name": "cache-gate", "restartCount": 2, "state": {"running": {}}, "lastState": ended}
    pod_status(world, ("digits-1",), {"phase": "Pending", "initContainerStatuses": [gate]})

    def spoil(cache: dict[str, Any]) -> None:
        entry = cache["status"]["entries"][0]
        entry.update(phase="Quarantined", reason="IntegrityFailed", message="block 3 has another digest")

    world.cluster.edit(NODE_WEIGHT_CACHE, "node-2", spoil)
    world.cluster.edit(DEPLOYMENT, "digits", lambda o: o["status"].update(readyReplicas=1), NAMESPACE)
    world.hear()
    world.operate()
    beat(world)
    return world


@pytest.mark.parametrize("world", [ready, root_not_mounted, gate_deadline])
def test_text_is_word_for_word(world: Any) -> None:
    """Readable at 80 columns; after a change on purpose, store what stands in the failure."""
    said = text(explained(world()))
    file = GOLDEN / f"{world.__name__}.txt"
    assert said == file.read_text(), said
    assert max(map(len, said.splitlines())) <= 80


def test_narrow_terminals_and_long_names_keep_their_columns() -> None:
    """Names lose their middle in tables, never their end; sentences are wrapped."""
    world = World(nodes=0)
    world.add_node("ip-10-0-12-34.very-long-zone-of-a-region.compute.internal")
    world.create("digits", {"spec.replicas": 1})
    world.settle()
    beat(world)
    found = explained(world)
    for width in (80, 60):
        said = text(found, width)
        assert max(map(len, said.splitlines())) <= max(width, 72)
    assert "…" in text(found, 60)


def test_colours_only_where_a_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain on a pipe; on a terminal the same words with colours, and none where NO_COLOR is set."""
    found = explained(root_not_mounted())
    show(found, Form.TEXT, Console())
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    assert plain == text(found)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(found, Form.TEXT, Console())
    assert "\x1b[" in capsys.readouterr().out


def test_what_the_cluster_says_cannot_write_on_the_terminal() -> None:
    """Escape sequences in a message are spelled out."""
    world = ready()
    edit(world, lambda o: o["status"]["conditions"][0].update(status="False", message="a\x1b[31mb\nc"))
    said = "\n".join(line.plain for line in lines(explained(world), 80))
    assert "\x1b" not in said
    assert "a\\x1b[31mb\\nc" in said


def document(found: Explanation, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `-o json` prints, and nothing else."""
    show(found, Form.JSON, Console())
    said = capsys.readouterr()
    assert said.err == ""
    value: dict[str, Any] = json.loads(said.out)
    return value


def test_json_has_a_stable_form(capsys: pytest.CaptureFixture[str]) -> None:
    """The fields, their names and their types; what is not known is absent."""
    value = document(explained(ready()), capsys)
    assert value["schema"] == SCHEMA == "dlo.dev/explain/v1"
    assert {name: type(item).__name__ for name, item in value.items()} == {
        "schema": "str",
        "name": "str",
        "namespace": "str",
        "ready": "bool",
        "summary": "str",
        "generation": "int",
        "observedGeneration": "int",
        "revision": "dict",
        "replicas": "int",
        "readyReplicas": "int",
        "nodes": "list",
        "engines": "list",
        "backing": "dict",
        "unread": "list",
        "causes": "list",
    }
    assert set(value["nodes"][0]) == {"name", "agent", "root", "freeBytes", "entries"}
    assert set(value["nodes"][0]["entries"][0]) == {"id", "what", "revision", "phase", "bytes"}
    assert set(value["engines"][0]) == {"pod", "node", "revision", "state", "backing", "verified"}
    assert value["backing"] == {
        "kind": "MappedCache",
        "entries": ["transformer 0/2", "transformer 1/2", "rest of the pipeline"],
        "bytesPerNode": 12 * 2**20,
        "savedBytesPerNode": 8 * 2**20,
        "nodes": ["node-1", "node-2"],
        "engines": ["node-2", "node-1"],
    }


def test_json_of_causes(capsys: pytest.CaptureFixture[str]) -> None:
    """A root has a remedy, what follows has none; there is no backing while it is not ready."""
    value = document(explained(root_not_mounted()), capsys)
    assert "backing" not in value
    first, *rest = value["causes"]
    assert set(first) == {"subject", "names", "reason", "message", "follows", "remedy"}
    assert (first["subject"], first["names"], first["follows"]) == ("Node", ["node-2"], False)
    assert all("remedy" not in cause for cause in rest if cause["follows"])
    assert any(cause["follows"] for cause in rest)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("Deployment", "its Deployment"),
        ("Pod", "its pods"),
        ("Node", "nodes"),
        ("NodeWeightCache", "node weight caches"),
        ("Lease", "heartbeats (Leases)"),
    ],
)
def test_a_denied_read_is_one_line(kind: str, what: str) -> None:
    """The rest is explained all the same."""
    world = root_not_mounted()
    deny(world, kind)
    found = explained(world)
    assert [each.what for each in found.unread] == [what]
    assert 'User "jane" cannot' in found.unread[0].why
    assert f"Not looked at: {what}: " in " ".join(text(found).split())
    assert ("Node", "RootNotMounted") in roots(found)


def test_with_the_least_rights_the_operators_own_list_is_told() -> None:
    """Who may read nothing but the object gets its problems and conditions."""
    world = root_not_mounted()
    deny(world, "Deployment", "Pod", "Node", "NodeWeightCache", "Lease")
    found = explained(world)
    assert len(found.unread) == 5
    assert found.nodes == ()
    assert found.causes[0].names == ("node-2",)
    assert not found.ready


def test_leases_of_one_namespace_are_enough() -> None:
    """Named, the operator's namespace alone is read; a wrong one is told."""
    world = ready()
    assert explained(world, named=SYSTEM).causes == ()
    found = explained(world, named="elsewhere")
    assert roots(found) == [("Operator", "OperatorNotRunning")]
    assert "in namespace elsewhere" in found.causes[0].message


def test_engines_are_asked_until_one_refuses_and_not_without_end() -> None:
    """Without the right to ask pods one is tried, and the operator's own report stands in."""
    world = ready()
    engines = Engines(world)
    engines.refused = True
    found = explained(world, engines=engines)
    assert engines.asked == ["digits-1"]
    assert [each.what for each in found.unread] == ["engines (pods/proxy)"]
    assert found.backing is not None
    assert found.backing.kind == "MappedCache"
    (pod,) = [p for p in world.cluster.objects(POD) if p["metadata"]["name"] == "digits-1"]
    for number in range(40):
        meta = {**pod["metadata"], "name": f"more-{number:02}", "namespace": NAMESPACE}
        world.cluster.put({**pod, "metadata": meta})
    asked = Engines(world)
    found = explained(world, engines=asked)
    assert len(asked.asked) == MOST_ASKED
    assert len(found.engines) == 43
    assert "and 31 more engines" in text(found)


def test_silent_engines_are_told_only_where_nobody_spoke() -> None:
    """The operator could not ask, and we could: then there is nothing to do."""
    world = World()
    world.reports.said = None
    world.create()
    world.settle()
    beat(world)
    assert roots(explained(world)) == [("DiffusionDeployment", "Unreported")]
    world.reports.said = Engines(World()).world.reports.said
    assert roots(explained(world)) == []
