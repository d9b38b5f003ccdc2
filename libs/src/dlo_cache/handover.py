"""The hand-over file: which entries an engine's ranks shall use, written by whoever prepared them.

The gate of the agent and ``dlo run`` write it, the engine reads it; ``handover.schema.json`` beside this
module describes it for others. It names entries and the digest of their manifests, and holds no settings
and no secrets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dlo_cache import atomic
from dlo_cache.canonical import strict_json
from dlo_cache.errors import Invalid, NewerFormat
from dlo_cache.keys import FILES_KIND, LAYOUT_KIND
from dlo_cache.oserrors import os_errors

VERSION: Final = 1
SCHEMA_FILE: Final = "handover.schema.json"

_SIZE_LIMIT: Final = 16 * 2**20
_MODE: Final = 0o644
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_COORDINATE: Final = re.compile(r"(0|[1-9][0-9]*)/([1-9][0-9]*)")
_KEYS: Final = ("rank", "component", "coordinate", "kind", "inputKey", "dir", "manifestSha256")


@dataclass(frozen=True, slots=True)
class HandoverEntry:
    """One entry for one tensor-parallel ``rank``; rank, component and coordinate are None for kind Files.

    ``coordinate`` is rank and size as text ("0/2"). ``dir`` is the entry's folder, absolute or relative to
    the root.
    """

    rank: int | None
    component: str | None
    coordinate: str | None
    kind: str
    input_key: str
    dir: str
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class Handover:
    """The cache root as the engine sees it, and its entries."""

    root: str
    entries: tuple[HandoverEntry, ...]

    def directory(self, entry: HandoverEntry) -> Path:
        """The folder of ``entry``."""
        return Path(self.root) / entry.dir


def read_handover(path: Path) -> Handover:
    """The hand-over file at ``path``; raises NotFound, NewerFormat, or Invalid naming entry and key."""
    with os_errors(f"reading the hand-over file {path}"):
        data = _read(path)
    document = strict_json(data, f"hand-over file {path}")
    if not isinstance(document, dict):
        raise Invalid(f"hand-over file {path} is no JSON object")
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise NewerFormat(
            f"hand-over file {path} has version {version}; this version reads {VERSION}",
            hint="use the same release for the gate and the engine",
        )
    if type(version) is not int or version != VERSION or document.keys() != {"version", "root", "entries"}:
        raise Invalid(f"hand-over file {path} needs exactly the keys version (= {VERSION}), root and entries")
    root, entries = document["root"], document["entries"]
    if not isinstance(root, str) or not Path(root).is_absolute() or not isinstance(entries, list):
        raise Invalid(f"hand-over file {path}: root must be an absolute path and entries a list")
    return Handover(
        root, tuple(_entry(stated, f"{path}: entries[{at}]") for at, stated in enumerate(entries))
    )


def write_handover(path: Path, handover: Handover) -> None:
    """Writes the hand-over file so that a reader sees the old one or the new one, whole."""
    entries = [dict(zip(_KEYS, _values(entry), strict=True)) for entry in handover.entries]
    for at, stated in enumerate(entries):
        _entry(stated, f"{path}: entries[{at}]")
    document = {"version": VERSION, "root": handover.root, "entries": entries}
    data = json.dumps(document, indent=2).encode() + b"\n"
    with os_errors(f"writing the hand-over file {path}"):
        parent = atomic.open_directory(path.parent)
        try:
            atomic.replace_file(path.name, data, _MODE, dir_fd=parent)
        finally:
            os.close(parent)


def _read(path: Path) -> bytes:
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return atomic.read_file(path.name, dir_fd=parent, limit=_SIZE_LIMIT)
    finally:
        os.close(parent)


def _values(entry: HandoverEntry) -> tuple[Any, ...]:
    return (
        entry.rank,
        entry.component,
        entry.coordinate,
        entry.kind,
        entry.input_key,
        entry.dir,
        entry.manifest_sha256,
    )


def _entry(stated: Any, where: str) -> HandoverEntry:
    if not isinstance(stated, dict) or stated.keys() != set(_KEYS):
        raise Invalid(f"hand-over file {where} needs exactly the keys {', '.join(_KEYS)}")
    if stated["kind"] not in (LAYOUT_KIND, FILES_KIND):
        raise Invalid(f"hand-over file {where}: kind {stated['kind']!r} is not {LAYOUT_KIND} or {FILES_KIND}")
    for key in ("inputKey", "manifestSha256"):
        if not isinstance(stated[key], str) or not _DIGEST.fullmatch(stated[key]):
            raise Invalid(f"hand-over file {where}: {key} is not 64 hexadecimal digits")
    if not isinstance(stated["dir"], str) or not stated["dir"] or "\0" in stated["dir"]:
        raise Invalid(f"hand-over file {where}: dir is not a path")
    _check_coordinate(stated, where)
    return HandoverEntry(
        rank=stated["rank"],
        component=stated["component"],
        coordinate=stated["coordinate"],
        kind=stated["kind"],
        input_key=stated["inputKey"],
        dir=stated["dir"],
        manifest_sha256=stated["manifestSha256"],
    )


def _check_coordinate(stated: Mapping[str, Any], where: str) -> None:
    rank, component, coordinate = stated["rank"], stated["component"], stated["coordinate"]
    if stated["kind"] == FILES_KIND:
        if (rank, component, coordinate) != (None, None, None):
            raise Invalid(f"hand-over file {where}: kind Files has no rank, component or coordinate")
        return
    found = _COORDINATE.fullmatch(coordinate) if isinstance(coordinate, str) else None
    if type(rank) is not int or not isinstance(component, str) or not component or found is None:
        raise Invalid(
            f"hand-over file {where}: kind Layout needs a rank, a component and a coordinate like 0/2"
        )
    if rank != int(found[1]) or rank >= int(found[2]):
        raise Invalid(f"hand-over file {where}: rank {rank} is not the place {coordinate}")
