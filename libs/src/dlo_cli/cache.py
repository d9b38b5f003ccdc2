"""``dlo cache …``: looking after a host weight cache."""

import json
import threading
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from dlo_cache.entry import open_entry
from dlo_cache.errors import CacheError, Cancelled
from dlo_cache.recovery import recover
from dlo_cache.root import init_root
from dlo_cache.store import EntryInfo, list_entries, remove, resolve
from dlo_cache.store import inspect as inspect_entry
from dlo_cache.verify import verify_entry
from rich.table import Table

from dlo_cli.console import SHORT, Console, human_bytes
from dlo_cli.errors import CliError
from dlo_cli.roots import cache_root


class Listing(StrEnum):
    """How entries are printed."""

    TABLE = "table"
    JSON = "json"


def init(path: Path, console: Console) -> None:
    """Make a root, or find that it is one."""
    root = init_root(path)
    console.step("Cache", f"{root.path} is ready (root id {root.id})")


def ls(named: Path | None, output: Listing, console: Console) -> None:
    """All entries, one a row; what cannot be used says why."""
    root = cache_root(named)
    entries = list_entries(root)
    if output is Listing.JSON:
        console.result(json.dumps([_row(info) for info in entries], indent=2))
        return
    if not entries:
        console.step("Cache", f"{root.path} has no entries")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("KEY", "KIND", "COMPONENT", "COORDINATE", "DTYPE"):
        table.add_column(title, no_wrap=True)
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("PUBLISHED", no_wrap=True)
    table.add_column("STATE")
    for info in entries:
        cells = (info.kind, info.component, info.coordinate, info.dtype)
        table.add_row(
            info.key[:SHORT],
            *(cell or "–" for cell in cells),
            human_bytes(info.bytes),
            _time(info.published_time) if info.published_time else "–",
            _state(info),
        )
    console.table(table)


def inspect(named: Path | None, key: str, output: Listing, console: Console) -> None:
    """One entry in full."""
    found = inspect_entry(cache_root(named), key)
    manifest = found.manifest
    document = {
        **_row(found.info),
        "producer": dict(found.producer),
        "preimage": dict(manifest.preimage) if manifest else None,
        "fileList": [asdict(file) for file in manifest.files] if manifest else [],
        "tensors": [asdict(tensor) for tensor in manifest.tensors] if manifest else [],
    }
    if output is Listing.JSON:
        console.result(json.dumps(document, indent=2))
        return
    info = found.info
    for name, value in (
        ("Key", info.key),
        ("Path", str(info.path)),
        ("Kind", info.kind),
        ("Component", info.component),
        ("Coordinate", info.coordinate),
        ("Dtype", info.dtype),
        ("Size", f"{human_bytes(info.bytes)} in {info.files} files"),
        ("Manifest", info.manifest_sha256),
        ("Content", info.content_digest),
        ("Published", _time(info.published_time) if info.published_time else None),
        ("Producer", " ".join(f"{k}={v}" for k, v in found.producer.items()) or None),
        ("State", _state(info)),
    ):
        if value:
            console.result(f"{name:<11} {value}")
    if manifest is not None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title, justify in (("FILE", "left"), ("SIZE", "right"), ("TENSORS", "right"), ("DIGEST", "left")):
            table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=True)
        counts: dict[str, int] = {}
        for tensor in manifest.tensors:
            counts[tensor.file] = counts.get(tensor.file, 0) + 1
        for file in manifest.files:
            table.add_row(
                file.name, human_bytes(file.nbytes), str(counts.get(file.name, 0)), file.digest[:SHORT]
            )
        console.result("")
        console.table(table)


def verify(named: Path | None, key: str | None, console: Console, stopping: threading.Event) -> None:
    """Re-hash every byte of the entries. Bad ones are named; the exit status says whether there were any."""
    root = cache_root(named)
    entries = list_entries(root)
    if key is not None:
        wanted = resolve(root, key)
        entries = [info for info in entries if info.key == wanted]
    bad = 0
    for info in entries:
        try:
            if info.problem:
                raise CliError(info.problem, code=info.code or "Corrupt")
            with open_entry(info.path) as entry:
                checked = verify_entry(entry, progress=console.progress, cancel=stopping.is_set)
        except Cancelled:
            raise
        except (CacheError, CliError) as error:
            bad += 1
            console.step("Bad", f"{info.key[:SHORT]}  {error.code}: {error.message}")
        else:
            console.step("Good", f"{info.key[:SHORT]}  {human_bytes(checked)} checked")
    if bad:
        raise CliError(
            f"{bad} of {len(entries)} entries are bad",
            hint="remove them with `dlo cache rm KEY`; the next run builds them again",
            code="Corrupt",
        )


def rm(named: Path | None, keys: list[str], console: Console) -> None:
    """Remove entries; those that somebody uses stay, with an error that names them. The others go all the same."""
    root = cache_root(named)
    kept: list[CacheError] = []
    for key in dict.fromkeys([resolve(root, key) for key in keys]):
        try:
            remove(root, key)
        except CacheError as error:
            kept.append(error)
            console.step("Kept", f"{key[:SHORT]}  {error.code}: {error.message}")
        else:
            console.step("Removed", key[:SHORT])
    if kept:
        raise kept[0]


def gc(named: Path | None, console: Console) -> None:
    """Sweep what dead builders and interrupted evictions left."""
    root = cache_root(named)
    recovered = recover(root)
    swept = sum(len(value) for value in asdict(recovered).values() if isinstance(value, tuple | list))
    console.step(
        "Cache",
        f"{root.path}: {swept} leftovers removed" if swept else f"{root.path}: nothing was left behind",
    )


def _row(info: EntryInfo) -> dict[str, object]:
    return {
        "key": info.key,
        "path": str(info.path),
        "kind": info.kind,
        "component": info.component,
        "coordinate": info.coordinate,
        "dtype": info.dtype,
        "bytes": info.bytes,
        "files": info.files,
        "manifestSha256": info.manifest_sha256,
        "contentDigest": info.content_digest,
        "published": _time(info.published_time) if info.published_time else None,
        "inUse": info.leased,
        "problem": info.problem or None,
        "code": info.code or None,
    }


def _state(info: EntryInfo) -> str:
    if info.problem:
        return f"{info.code}: {info.problem}"
    return "in use" if info.leased else "ready"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")
