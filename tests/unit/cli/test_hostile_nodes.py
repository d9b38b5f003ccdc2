"""Files of nodes that nobody has checked, and texts that would draw on a terminal."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from dlo_cli.causes import cause
from dlo_cli.cluster import Seen
from dlo_cli.errors import UsageError, error_line, printable
from dlo_cli.explain_text import lines, wrapped
from dlo_cli.explanation import explain
from dlo_cli.manifest import open_manifest_model, read_manifest
from dlo_cli.node_file import NodeFile, read_nodes
from dlo_cli.nodes import cluster_time
from dlo_cli.on_node import judge_node
from dlo_cli.plan import plan_of
from dlo_cli.samples import samples_root
from unit.cli.test_plan_node import CUDA, Manifest, cache, node

ODD: tuple[Any, ...] = (
    None,
    True,
    7,
    -1,
    1.5,
    "text",
    "",
    [],
    [7],
    ["a"],
    [None],
    [{}],
    {},
    {"a": 1},
    {"a": [1]},
)
WHOLE_NODE = node(
    spec={"unschedulable": False, "taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}
)
WHOLE_CACHE = cache(
    entries=[{"id": "aa", "phase": "Ready", "bytes": 7}],
    conditions=[{"type": "StorageHealthy", "status": "False", "reason": "RootNotMounted", "message": "m"}],
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value, however deep."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*at, key))
    return found


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """The same with another value there."""
    made = copy.deepcopy(value)
    holder = made
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = new
    return made


def read(file: Path, said: list[str]) -> NodeFile | None:
    """What is in the file; where it is refused, None, and what was said."""
    try:
        return read_nodes(file)
    except UsageError as error:
        said.append(str(error))
        return None


def test_every_field_of_another_kind(tmp_path: Path, manifest: Manifest) -> None:
    """Each place of a Node and of a NodeWeightCache with each odd value: judged, or one line that names the file."""
    asked = read_manifest(manifest(CUDA))
    plan = plan_of(asked, open_manifest_model(asked, tmp_path, {"samples": samples_root()}, None))
    file, said, judged = tmp_path / "nodes.yaml", list[str](), 0
    for whole in (WHOLE_NODE, WHOLE_CACHE):
        for place in places(whole):
            for odd in ODD:
                obj = changed(whole, place, odd)
                file.write_text(
                    json.dumps({"kind": "List", "items": [obj] if whole is WHOLE_NODE else [WHOLE_NODE, obj]})
                )
                found = read(file, said)
                if found is None:
                    continue
                for each in found.nodes:
                    about = found.caches.get(each["metadata"]["name"])
                    judge_node(asked.spec, "default", plan, each, about).to_json()
                judged += 1
    assert judged > 100
    assert len(said) > 100
    assert all(str(file) in each and "\n" not in each for each in said)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 8)}]\n" for at in range(1, 30)
)


@pytest.mark.parametrize(
    "text",
    [
        "kind: *a29\napiVersion: v1\nmetadata: {name: n}\n",
        "kind: Node\napiVersion: *a29\nmetadata: {name: n}\n",
        "kind: Node\napiVersion: v1\nmetadata: {name: *a29}\n",
        "kind: Node\napiVersion: v1\nmetadata: {name: n, labels: *a29}\n",
        "kind: Node\napiVersion: v1\nmetadata: {name: n}\nstatus: {allocatable: {cpu: *a29}}\n",
        "kind: Node\napiVersion: v1\nmetadata: {name: n}\nspec: {taints: *a29}\n",
    ],
)
def test_a_bomb_of_aliases(tmp_path: Path, text: str) -> None:
    """Wherever it stands, it is never written out."""
    file = tmp_path / "nodes.yaml"
    file.write_text(BOMB + text)
    with pytest.raises(UsageError) as caught:
        read_nodes(file)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{a: " * 50_000,
        "a: \x00",
        "!!python/object/apply:os.system [id]",
        "a: !!timestamp 2026-99-99",
    ],
    ids=["lists", "maps", "nul", "tag", "date"],
)
def test_what_is_no_yaml(tmp_path: Path, text: str) -> None:
    """One line."""
    file = tmp_path / "nodes.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_nodes(file)
    assert "\n" not in str(caught.value)


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp\u2066\u200b\x00\r\ud800\u2028"


def test_nothing_that_a_terminal_would_obey() -> None:
    """Escapes, bells, turned text, half characters: spelled out in every line of any origin, and sendable."""
    shown = [
        printable(HOSTILE),
        *wrapped(cause("Pod", "p", HOSTILE, HOSTILE).text, 80, "", ""),
        error_line(UsageError(HOSTILE, hint=HOSTILE)),
        error_line(ValueError(HOSTILE)),
    ]
    for line in shown:
        line.encode()
        assert all(letter.isprintable() or letter == " " for letter in line), repr(line)


DEEP: Any = "x"
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize("odd", [*ODD, DEEP, "x" * (1 << 20), HOSTILE], ids=lambda odd: type(odd).__name__)
def test_what_an_engine_says_of_itself(odd: Any) -> None:
    """It is a pod's own word: of any kind, any length, any depth, and shown as a short word or not at all."""
    pod = {"metadata": {"name": "p", "namespace": "default"}, "status": {}}
    deployment = {"metadata": {"name": "d", "namespace": "default", "generation": 1}, "spec": {}}
    for said in ({"backing": odd}, {"backing": {"kind": odd, "fallbackCode": odd, "verified": odd}}):
        seen = Seen("d", "default", deployment, datetime.now(UTC), pods=(pod,), said={"p": said})
        found = explain(seen)
        json.dumps(found.to_json())
        shown = "\n".join(line.plain for line in lines(found, 80))
        shown.encode()
        assert len(shown) < 2000


@pytest.mark.parametrize(
    ("ahead", "time"),
    [
        ([0], 0),
        ([0, -3600], 0),
        ([0, -5, 3600], 0),
        ([0, -5, -9, 86_400], 0),
        ([0, -5, -7200, -7300, 3600], 0),
        ([100, -100, -300], 100),
    ],
)
def test_a_node_whose_clock_is_ahead(ahead: list[int], time: int) -> None:
    """Its heartbeat is not the time by which all others are late, where two others agree."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    leases = tuple(
        {
            "metadata": {"name": f"n{at}", "namespace": "kube-node-lease"},
            "spec": {"renewTime": (now + timedelta(seconds=each)).isoformat()},
        }
        for at, each in enumerate(ahead)
    )
    deployment = {"metadata": {"name": "d", "namespace": "default"}}
    seen = Seen("d", "default", deployment, now + timedelta(hours=5), leases=leases)
    assert cluster_time(seen) == now + timedelta(seconds=time)
