"""Open and verify the entries that one rank uses, before torch is there.

Reads the hand-over file, maps the entries of this rank's coordinate (their leases are held until `close`) and
hashes this rank's part of them. Must not import torch: mapping and hashing hide behind that import.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlo_cache.entry import Entry, open_entry
from dlo_cache.errors import CacheError
from dlo_cache.handover import Handover, HandoverEntry, read_handover
from dlo_cache.keys import FILES_KIND, LAYOUT_KIND
from dlo_cache.verify import verify_entry

from dlo_engine.errors import BadEntry


@dataclass(frozen=True, eq=False)
class OpenEntry:
    """An entry this rank maps, as the hand-over file names it."""

    record: HandoverEntry
    entry: Entry

    @property
    def nbytes(self) -> int:
        """Bytes of the entry's data files."""
        return int(self.entry.manifest.total_bytes)


class Entries:
    """All entries of one rank: per streamed component its coordinate's, and the rest of the pipeline.

    A component may be None: no entry was prepared for it, its weights are in the rest as the source has them.
    """

    def __init__(self, components: dict[str, OpenEntry | None], rest: OpenEntry) -> None:
        self.components = components
        self.rest = rest

    def all(self) -> tuple[OpenEntry, ...]:
        """Components first."""
        return (*(opened for opened in self.components.values() if opened is not None), self.rest)

    def config(self, component: str) -> dict[str, Any]:
        """A component's config.json. Raises BadEntry without one."""
        return read_config(self.rest.entry.directory, component)

    def close(self) -> None:
        """Unmap and give the leases back. Idempotent; nothing may use the mappings any more."""
        for opened in self.all():
            opened.entry.close()


def read_config(directory: Path, component: str) -> dict[str, Any]:
    """The config.json of a component in a pipeline's folder. Raises BadEntry without one."""
    try:
        config = json.loads((directory / component / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadEntry(f"The pipeline has no readable {component}/config.json") from error
    if not isinstance(config, dict):
        raise BadEntry(f"{component}/config.json is not an object")
    return config


def open_entries(
    path: Path, components: Iterable[str], tensor_rank: int, tensor_size: int, *, required: bool = True
) -> Entries:
    """Opens what the hand-over file at `path` names for a tensor rank.

    Unless `required`, a component that the file does not name at all is None in the result. Raises BadEntry
    where the file lacks an entry or names one of another coordinate, and dlo_cache's errors.
    """
    handover = read_handover(path)
    opened: dict[str, OpenEntry | None] = {}
    named = {record.component for record in handover.entries}
    try:
        for component in components:
            opened[component] = None
            if required or component in named:
                record = _layout_record(handover, component, tensor_rank, tensor_size)
                opened[component] = _open(handover, record)
        rest = [found for found in handover.entries if found.kind == FILES_KIND]
        if len(rest) != 1:
            raise BadEntry(
                f"The hand-over file names {len(rest)} Files entries instead of 1",
                hint="prepare the rest of the pipeline (PipelineRest) and hand it over",
            )
        return Entries(opened, _open(handover, rest[0]))
    except BaseException:
        for one in opened.values():
            if one is not None:
                one.entry.close()
        raise


def _layout_record(handover: Handover, component: str, rank: int, size: int) -> HandoverEntry:
    for record in handover.entries:
        if (record.kind, record.component, record.rank) == (LAYOUT_KIND, component, rank):
            if record.coordinate != f"{rank}/{size}":
                raise BadEntry(
                    f"The hand-over file has {component} for {record.coordinate}, not {rank}/{size}",
                    hint="prepare the entries for this engine's tensor degree",
                )
            return record
    raise BadEntry(
        f"The hand-over file has no entry of {component} for tensor rank {rank}",
        hint="prepare the entries for this engine's tensor degree and components",
    )


def _open(handover: Handover, record: HandoverEntry) -> OpenEntry:
    entry = open_entry(handover.directory(record), manifest_sha256=record.manifest_sha256)
    manifest = entry.manifest
    place = None if manifest.coordinate is None else "{}/{}".format(*manifest.coordinate)
    if (manifest.kind, manifest.component, place) != (record.kind, record.component, record.coordinate):
        entry.close()
        raise BadEntry(
            f"Entry {record.dir} is {manifest.kind} {manifest.component} {place}, not as handed over"
        )
    return OpenEntry(record, entry)


class Verification:
    """Hashing of this rank's part of its entries, in a thread of its own from the moment it is made."""

    def __init__(self, parts: Iterable[tuple[Entry, tuple[int, int]]], threads: int | None = None) -> None:
        """`parts`: entries, and which part (index, count) of each this rank checks."""
        self.seconds = 0.0
        self.checked_bytes = 0
        self._parts = list(parts)
        self._threads = threads
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="dlo-verify", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            for entry, part in self._parts:
                self.checked_bytes += verify_entry(
                    entry, part=part, threads=self._threads, cancel=lambda: self._stopped
                )
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - begin

    def stop(self) -> None:
        """Give up what is left, and wait until nothing is hashed any more."""
        self._stopped = True
        self._thread.join()

    def failure(self) -> CacheError | BadEntry | None:
        """Waits until all is hashed. What is wrong, or None. Raises what is no finding about an entry."""
        self._thread.join()
        if self._error is None or isinstance(self._error, CacheError | BadEntry):
            return self._error
        raise self._error


def pss_bytes(smaps: str, paths: Iterable[str]) -> int:
    """Proportional bytes of the mappings of some files, out of the text of /proc/PID/smaps.

    `paths` as the kernel shows them: absolute, without links. A page that N processes map counts 1/N in each.
    """
    wanted = set(paths)
    total, counting = 0, False
    for line in smaps.splitlines():
        word, _, rest = line.partition(" ")
        if word == "Pss:":
            total += int(rest.split()[0]) * 1024 if counting else 0
        elif not word.endswith(":"):
            fields = line.split(maxsplit=5)
            counting = len(fields) > 5 and fields[5] in wanted
    return total
