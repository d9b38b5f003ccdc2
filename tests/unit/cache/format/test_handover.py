"""The hand-over file: what is written is read, and reader and published schema give the same verdict."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from dlo_cache.errors import Denied, Invalid, NewerFormat, NotFound
from dlo_cache.handover import SCHEMA_FILE, Handover, HandoverEntry, read_handover, write_handover

FIXTURE = Path(__file__).parents[3] / "data" / "handover" / "tensor-2.json"
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "null": lambda value: value is None,
}
Document = dict[str, Any]


def document() -> Document:
    """The fixture, to be changed."""
    found: Document = json.loads(FIXTURE.read_text())
    return found


def allows(schema: Document, value: Any) -> bool:
    """Whether the value satisfies the part of JSON Schema that the published schema uses."""
    kinds = schema.get("type", [])
    answers = [
        not kinds or any(TYPES[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)),
        "const" not in schema or (value == schema["const"] and type(value) is type(schema["const"])),
        "enum" not in schema or value in schema["enum"],
    ]
    if isinstance(value, str):
        answers += [
            len(value) >= schema.get("minLength", 0),
            bool(re.search(schema.get("pattern", ""), value)),
        ]
    if type(value) is int:
        answers.append(value >= schema.get("minimum", value))
    if isinstance(value, list):
        answers += [allows(schema.get("items", {}), item) for item in value]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        answers += [key in value for key in schema.get("required", [])]
        answers += [key in properties for key in value if not schema.get("additionalProperties", True)]
        answers += [allows(properties[key], item) for key, item in value.items() if key in properties]
    if "if" in schema:
        answers.append(allows(schema["then" if allows(schema["if"], value) else "else"], value))
    return all(answers)


@pytest.fixture(scope="module")
def schema() -> Document:
    """The schema that ships with the package."""
    found: Document = json.loads(resources.files("dlo_cache").joinpath(SCHEMA_FILE).read_text())
    return found


def test_the_fixture_is_read() -> None:
    """Every field of the published example, for tensor ranks and for the rest of the pipeline."""
    handover = read_handover(FIXTURE)
    assert handover.root == "/var/lib/dlo/cache"
    first, second, rest = handover.entries
    assert (first.rank, first.component, first.coordinate, first.kind) == (0, "transformer", "0/2", "Layout")
    assert (second.rank, second.coordinate) == (1, "1/2")
    assert (rest.rank, rest.component, rest.coordinate, rest.kind) == (None, None, None, "Files")
    assert handover.directory(first) == Path("/var/lib/dlo/cache/v1/entries") / first.input_key
    assert handover.directory(rest) == Path("/mnt/rest")


def test_what_is_written_is_read(tmp_path: Path, schema: Document) -> None:
    """Written, it is the same document, satisfies the schema, and may be replaced."""
    path = tmp_path / "handover.json"
    handover = read_handover(FIXTURE)
    write_handover(path, handover)
    assert json.loads(path.read_text()) == document()
    assert allows(schema, json.loads(path.read_text()))
    write_handover(path, Handover("/other", handover.entries[:1]))
    assert read_handover(path) == Handover("/other", handover.entries[:1])
    assert [item.name for item in tmp_path.iterdir()] == ["handover.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_nothing_wrong_is_written(tmp_path: Path) -> None:
    """The writer refuses what the reader would."""
    entry = read_handover(FIXTURE).entries[0]
    for wrong in (replace(entry, rank=None), replace(entry, input_key="x"), replace(entry, coordinate="2/2")):
        with pytest.raises(Invalid):
            write_handover(tmp_path / "handover.json", Handover("/cache", (wrong,)))
    assert not list(tmp_path.iterdir())


def entry_change(key: str, value: Any, at: int = 0) -> Callable[[Document], None]:
    """Sets one key of one entry."""

    def apply(found: Document) -> None:
        found["entries"][at][key] = value

    return apply


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(version=0),
        lambda found: found.update(version=True),
        lambda found: found.update(version="1"),
        lambda found: found.update(root="relative"),
        lambda found: found.update(root=None),
        lambda found: found.update(entries={}),
        lambda found: found.update(extra=1),
        lambda found: found.pop("root"),
        lambda found: found["entries"].append(3),
        lambda found: found["entries"][0].pop("dir"),
        entry_change("extra", 1),
        entry_change("kind", "Layer"),
        entry_change("kind", "Files"),
        entry_change("kind", "Layout", at=2),
        entry_change("rank", None),
        entry_change("rank", "0"),
        entry_change("rank", True),
        entry_change("rank", -1),
        entry_change("component", None),
        entry_change("component", ""),
        entry_change("coordinate", None),
        entry_change("coordinate", "0-2"),
        entry_change("coordinate", "00/2"),
        entry_change("coordinate", "0/0"),
        entry_change("rank", 0, at=2),
        entry_change("component", "vae", at=2),
        entry_change("inputKey", "E" * 64),
        entry_change("inputKey", None),
        entry_change("manifestSha256", "0" * 63),
        entry_change("dir", ""),
        entry_change("dir", 3),
    ],
)
def test_reader_and_schema_refuse_the_same(
    change: Callable[[Document], Any], tmp_path: Path, schema: Document
) -> None:
    """Each wrong document is refused by both, and the error names the file."""
    found = copy.deepcopy(document())
    change(found)
    path = tmp_path / "handover.json"
    path.write_text(json.dumps(found))
    with pytest.raises(Invalid, match=r"handover\.json"):
        read_handover(path)
    assert not allows(schema, found)


def test_a_rank_is_the_one_of_its_coordinate(tmp_path: Path) -> None:
    """What no schema can say: rank and coordinate agree, and the error says in which entry not."""
    found = document()
    found["entries"][1]["rank"] = 0
    path = tmp_path / "handover.json"
    path.write_text(json.dumps(found))
    with pytest.raises(Invalid, match=r"entries\[1\]: rank 0 is not the place 1/2"):
        read_handover(path)


def test_a_later_version_is_told_apart(tmp_path: Path) -> None:
    """The gate of a later release."""
    path = tmp_path / "handover.json"
    path.write_text(json.dumps({"version": 2, "whatever": []}))
    with pytest.raises(NewerFormat, match="version 2"):
        read_handover(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version":1,"version":1}'])
def test_a_broken_file(tmp_path: Path, text: str) -> None:
    """No JSON, no object, a key twice."""
    path = tmp_path / "handover.json"
    path.write_text(text)
    with pytest.raises(Invalid, match=r"handover\.json"):
        read_handover(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    """A missing file, a missing folder, and no bare operating-system error."""
    with pytest.raises(NotFound, match=r"handover\.json"):
        read_handover(tmp_path / "handover.json")
    with pytest.raises((NotFound, Denied, Invalid)):
        write_handover(tmp_path / "absent" / "handover.json", Handover("/cache", ()))


def test_entry_order_is_kept(tmp_path: Path) -> None:
    """The file is a list, not a set."""
    entries = tuple(
        HandoverEntry(rank, "transformer", f"{rank}/3", "Layout", f"{rank}" * 64, f"d{rank}", "0" * 64)
        for rank in (2, 0, 1)
    )
    write_handover(tmp_path / "h.json", Handover("/cache", entries))
    assert read_handover(tmp_path / "h.json").entries == entries
