"""What each action does to the root, with ``dlo_cache`` and ``dlo_sources``: one function an action.

Returns what became true, or raises the library's error; whether to try again is not decided here. Runs in the
executor's threads and touches no shared state but the board.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource
from dlo_cache import store
from dlo_cache.build import build_layout_entries
from dlo_cache.entry import open_entry
from dlo_cache.errors import Corrupt, NoSpace, NotFound
from dlo_cache.files_entry import Selection, build_files_entry
from dlo_cache.image_plan import plan_images
from dlo_cache.keys import files_key
from dlo_cache.layout_manifest import layout_keys
from dlo_cache.presence import Built
from dlo_cache.progress import Cancel, ProgressEvent
from dlo_cache.reserve import allocated
from dlo_cache.root import Root
from dlo_cache.verify import verify_entry
from dlo_sources.digests import DigestCache

from dlo_agent.actions import (
    Action,
    Build,
    BuildFiles,
    Evict,
    Forget,
    Quarantine,
    Resolve,
    Verify,
    Warm,
)
from dlo_agent.board import Board
from dlo_agent.errors import AgentError
from dlo_agent.inventory import look_at_disk
from dlo_agent.notes import Note
from dlo_agent.references import Resolution
from dlo_agent.resolve import Opened, check_digest, check_pin, layout_for, open_source, resolution_of
from dlo_agent.warm import Warmed, warm_entry
from dlo_agent.world import coordinate


@dataclass(frozen=True, slots=True)
class Resolved:
    """A source was resolved."""

    source_id: str
    resolution: Resolution


@dataclass(frozen=True, slots=True)
class Made:
    """Entries are there: by entry id, what stands for them; and what the source was found to be."""

    built: Mapping[str, Built]
    source_id: str
    resolution: Resolution


@dataclass(frozen=True, slots=True)
class Verified:
    """Every byte of an entry is right."""

    key: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Entries went: evicted, or set aside."""

    keys: tuple[str, ...]


Result = Resolved | Made | Verified | Warmed | Removed | None


@dataclass(frozen=True)
class Worker:
    """The hands of the agent on one root."""

    root: Root
    source_roots: Mapping[str, Path]
    board: Board
    producer: Mapping[str, object]
    headroom_bytes: int = 0
    verify_threads: int = 2

    def run(self, action: Action, cancel: Cancel) -> Result:
        """Carries out one action. Raises CacheError, SourceError, AgentError; Cancelled once ``cancel()``
        says so."""
        if isinstance(action, Resolve):
            opened = self._open(action.source, (), cancel)
            check_pin(action.source, opened)
            return Resolved(action.source.id, resolution_of(action.source, opened))
        if isinstance(action, Build):
            return self._build(action, cancel)
        if isinstance(action, BuildFiles):
            return self._build_files(action, cancel)
        if isinstance(action, Verify):
            return self._verify(action, cancel)
        if isinstance(action, Warm):
            return warm_entry(self.root, action.key, cancel=cancel)
        return self._tidy(action)

    def _tidy(self, action: Action) -> Result:
        if isinstance(action, Quarantine):
            try:
                return Removed(store.quarantine(self.root, action.key, action.message))
            except NotFound:
                return Removed((action.key,))
        if isinstance(action, Evict):
            try:
                return Removed((store.remove(self.root, action.key),))
            except NotFound:
                return Removed((action.key,))
        if isinstance(action, Forget):
            self.board.drop([action.entry_id])
            return None
        raise AgentError(f"no way to carry out {type(action).__name__}")

    def _open(self, source: NodeSource, entries: Sequence[NodeEntry], cancel: Cancel) -> Opened:
        def progress(event: ProgressEvent) -> None:
            for entry in entries:
                self.board.post(replace(_note(entry, "Fetching"), done=event.done, total=event.total))

        return open_source(
            source, self.source_roots, DigestCache(self.root.digests_dir), progress=progress, cancel=cancel
        )

    def _build(self, action: Build, cancel: Cancel) -> Made:
        opened = self._open(action.source, action.entries, cancel)
        check_digest(action.source, opened, action.digest)
        first = action.entries[0]
        component = opened.pipeline.component(first.component or "")
        layout = layout_for(component, first.layout)
        ranks = [entry.tensor_rank for entry in action.entries]
        keys = layout_keys(
            component,
            layout,
            dtype=first.dtype,
            quantization=first.quantization,
            tensor_size=first.tensor_size,
            tensor_ranks=ranks,
        )
        plans = plan_images(
            component.tensors,
            layout,
            dtype=first.dtype,
            tensor_size=first.tensor_size,
            tensor_ranks=ranks,
            config=component.config,
        )
        sizes = [sum(allocated(plan.images[at].nbytes) for plan in plans) for at in range(len(ranks))]
        with self._room(action.entries, [each.key for each in keys], sizes):
            built = build_layout_entries(
                self.root,
                component,
                layout,
                dtype=first.dtype,
                quantization=first.quantization,
                tensor_size=first.tensor_size,
                tensor_ranks=ranks,
                progress=self._building(action.entry_ids),
                cancel=cancel,
                producer=self.producer,
            )
        return self._made(action.source, opened, action.entries, built)

    def _build_files(self, action: BuildFiles, cancel: Cancel) -> Made:
        entry = action.entry
        opened = self._open(action.source, [entry], cancel)
        check_digest(action.source, opened, action.digest)
        select: Selection = entry.select or "All"
        streamed = entry.streamed if select == "PipelineRest" else ()
        files = opened.pipeline.rest_files(streamed) if streamed else opened.pipeline.all_files()
        key, _ = files_key(files)
        with self._room([entry], [key], [sum(allocated(file.size) for file in files)]):
            built = build_files_entry(
                self.root,
                files,
                select=select,
                streamed=streamed,
                progress=self._building([entry.id]),
                cancel=cancel,
                producer=self.producer,
            )
        return self._made(action.source, opened, [entry], [built])

    def _made(
        self, source: NodeSource, opened: Opened, entries: Sequence[NodeEntry], built: Sequence[Built]
    ) -> Made:
        by_id = {entry.id: each for entry, each in zip(entries, built, strict=True)}
        return Made(by_id, source.id, resolution_of(source, opened))

    @contextmanager
    def _room(
        self, entries: Sequence[NodeEntry], keys: Sequence[str], sizes: Sequence[int]
    ) -> Iterator[None]:
        """Refuses, before the first byte, what does not fit beside the agent's head-room; says on the board
        what is coming; and puts the bytes that lack room on an error that does not say them."""
        for entry, key, size in zip(entries, keys, sizes, strict=True):
            self.board.post(replace(_note(entry, "Building"), key=key, total=size))
        missing = sum(
            size for key, size in zip(keys, sizes, strict=True) if store.find(self.root, key) is None
        )
        disk = look_at_disk(self.root, None, self.headroom_bytes)
        if missing > disk.free:
            names = ", ".join(entry.id for entry in entries)
            raise NoSpace(
                f"building {names} needs {missing} bytes; {disk.free} are free beside the head-room",
                hint="free space on the cache's file system, or use a larger one",
                code="InsufficientDisk",
                needed_bytes=missing,
            )
        try:
            yield
        except NoSpace as error:
            if not hasattr(error, "needed_bytes"):
                error.needed_bytes = missing  # type: ignore[attr-defined]
            raise

    def _building(self, entry_ids: Sequence[str]) -> Posting:
        return Posting(self.board, tuple(entry_ids), "Building")

    def _verify(self, action: Verify, cancel: Cancel) -> Verified:
        try:
            with open_entry(self.root.entries_dir / action.key) as entry:
                for entry_id in action.ids:
                    self.board.post(Note(entry_id, "Verifying", total=entry.nbytes, key=action.key))
                posting = Posting(self.board, action.ids, "Verifying")
                checked = verify_entry(entry, threads=self.verify_threads, progress=posting, cancel=cancel)
        except Corrupt as error:
            bad = [error.subject["file"]] if "file" in error.subject else []
            store.quarantine(self.root, action.key, error.message, files=bad)
            raise
        return Verified(action.key, checked)


@dataclass(frozen=True, slots=True)
class Posting:
    """A progress callback that moves entries on the board."""

    board: Board
    entry_ids: tuple[str, ...]
    phase: str

    def __call__(self, event: ProgressEvent) -> None:
        if event.phase in ("build", "verify"):
            self.board.advance(self.entry_ids, self.phase, event.done, event.total)


def producer(agent_version: str, node: str) -> dict[str, object]:
    """Who builds, for ``producer.json``; no part of any digest."""
    return {
        "program": "dlo-agent",
        "version": agent_version,
        "node": node,
        "python": platform.python_version(),
    }


def _note(entry: NodeEntry, phase: str) -> Note:
    return Note(
        entry=entry.id,
        phase=phase,
        component=entry.component or "",
        coordinate=coordinate(entry) or "",
    )
