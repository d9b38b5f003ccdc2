"""What each action does to the root, with ``dlo_cache`` and ``dlo_sources``: one function an action.

Returns what became true, or raises the library's error; whether to try again is not decided here. Runs in the
executor's threads and touches no shared state but the board.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from dlo_api.v1alpha1.node_weight_cache import NodeEntry, NodeSource
from dlo_cache import store
from dlo_cache.build import MOST_COORDINATES, build_layout_entries
from dlo_cache.entry import open_entry
from dlo_cache.errors import Corrupt, NoSpace, NotFound
from dlo_cache.files_entry import Selection, build_files_entry
from dlo_cache.image_plan import ImagePlan, plan_images
from dlo_cache.keys import files_key
from dlo_cache.layout import Layout
from dlo_cache.layout_manifest import layout_keys
from dlo_cache.presence import Built
from dlo_cache.progress import Cancel, ProgressEvent
from dlo_cache.reserve import allocated
from dlo_cache.root import Root
from dlo_cache.verify import verify_entry
from dlo_sources.digests import DigestCache
from dlo_sources.fetch import SMALL_BYTES
from dlo_sources.stage import Stage

from dlo_agent.actions import (
    Action,
    Build,
    BuildFiles,
    Evict,
    Forget,
    Quarantine,
    Resolve,
    Sweep,
    Verify,
    Warm,
)
from dlo_agent.board import Board
from dlo_agent.errors import AgentError
from dlo_agent.inventory import look_at_disk
from dlo_agent.notes import Note
from dlo_agent.origins import Opened, Origins
from dlo_agent.reads import Reads, reads_of
from dlo_agent.references import Resolution
from dlo_agent.resolve import check_digest, check_pin, layout_for, resolution_of
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
    origins: Origins
    board: Board
    producer: Mapping[str, object]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    headroom_bytes: int = 0
    verify_threads: int = 2
    lock_waited: Callable[[float], None] | None = None
    source_read: Callable[[NodeSource, int], None] | None = None
    stage: Stage = field(init=False)

    def __post_init__(self) -> None:
        stage = Stage(self.root.ingest_dir, headroom_bytes=self.headroom_bytes)
        object.__setattr__(self, "stage", stage)

    def run(self, action: Action, cancel: Cancel) -> Result:
        """Carries out one action. Raises CacheError, SourceError, AgentError; Cancelled once ``cancel()``
        says so."""
        if isinstance(action, Resolve):
            with self._opened(action.source, (), cancel) as opened:
                check_pin(action.source, opened)
                return Resolved(action.source.id, resolution_of(action.source, opened, self.layouts))
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
            self.stage.sweep()  # what was fetched for it; a build at work holds its own
            return None
        if isinstance(action, Sweep):
            self.stage.sweep(older_than_seconds=action.idle_seconds)
            return None
        raise AgentError(f"no way to carry out {type(action).__name__}")

    @contextmanager
    def _opened(
        self, source: NodeSource, entries: Sequence[NodeEntry], cancel: Cancel, revision: str = ""
    ) -> Iterator[Opened]:
        """The source; what was fetched of it goes when the block has done its work, and else stays to be
        taken up."""
        ids = tuple(entry.id for entry in entries)
        seen: dict[str, int] = {}

        def progress(event: ProgressEvent) -> None:
            if self.source_read is not None:
                self.source_read(source, max(0, event.done - seen.get(event.phase, 0)))
                seen[event.phase] = event.done
            if event.phase == "read":
                self.board.advance(ids, "Fetching", event.done, event.total)
                return
            for entry in entries:
                self.board.post(replace(_note(entry, "Fetching"), done=event.done, total=event.total))

        digests = DigestCache(self.root.digests_dir)
        opened = self.origins.open(
            source, digests, self.stage, revision=revision, progress=progress, cancel=cancel
        )
        try:
            yield opened
        except BaseException:
            opened.close()
            raise
        opened.close(done=bool(entries))

    def _build(self, action: Build, cancel: Cancel) -> Made:
        with self._opened(action.source, action.entries, cancel, action.revision) as opened:
            check_digest(action.source, opened, action.digest)
            first = action.entries[0]
            component = opened.pipeline.component(first.component or "")
            layout = layout_for(component, first.layout, self.layouts)
            ranks = [entry.tensor_rank for entry in action.entries]

            def planned(some: Sequence[int]) -> tuple[ImagePlan, ...]:
                return plan_images(
                    component.tensors,
                    layout,
                    dtype=first.dtype,
                    tensor_size=first.tensor_size,
                    tensor_ranks=some,
                    config=component.config,
                )

            keys = layout_keys(
                component,
                layout,
                dtype=first.dtype,
                quantization=first.quantization,
                tensor_size=first.tensor_size,
                tensor_ranks=ranks,
            )
            plans = planned(ranks)
            sizes = [sum(allocated(plan.images[at].nbytes) for plan in plans) for at in range(len(ranks))]
            lacking = [each.rank for each in keys if store.find(self.root, each.key) is None]
            batches = [lacking[at : at + MOST_COORDINATES] for at in range(0, len(lacking), MOST_COORDINATES)]
            reads = reads_of(map(planned, batches)) if opened.fetcher is not None else None
            with self._room(action.entries, [each.key for each in keys], sizes, opened, reads):
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
                    waited=self.lock_waited,
                )
            return self._made(action.source, opened, action.entries, built)

    def _build_files(self, action: BuildFiles, cancel: Cancel) -> Made:
        entry = action.entry
        with self._opened(action.source, [entry], cancel, action.revision) as opened:
            check_digest(action.source, opened, action.digest)
            select: Selection = entry.select or "All"
            streamed = entry.streamed if select == "PipelineRest" else ()
            files = opened.pipeline.rest_files(streamed) if streamed else opened.pipeline.all_files()
            key, _ = files_key(files)
            sizes = [sum(allocated(file.size) for file in files)]
            lacking = files if store.find(self.root, key) is None else ()
            reads = Reads({}, tuple(lacking), 0) if opened.fetcher is not None else None
            with self._room([entry], [key], sizes, opened, reads):
                built = build_files_entry(
                    self.root,
                    files,
                    select=select,
                    streamed=streamed,
                    progress=self._building([entry.id]),
                    cancel=cancel,
                    producer=self.producer,
                    waited=self.lock_waited,
                )
            return self._made(action.source, opened, [entry], [built])

    def _made(
        self, source: NodeSource, opened: Opened, entries: Sequence[NodeEntry], built: Sequence[Built]
    ) -> Made:
        by_id = {entry.id: each for entry, each in zip(entries, built, strict=True)}
        return Made(by_id, source.id, resolution_of(source, opened, self.layouts))

    @contextmanager
    def _room(
        self,
        entries: Sequence[NodeEntry],
        keys: Sequence[str],
        sizes: Sequence[int],
        opened: Opened,
        reads: Reads | None,
    ) -> Iterator[None]:
        """Refuses, before the first byte, what does not fit beside the agent's head-room; says on the board
        what is coming; and puts the bytes that lack room on an error that does not say them."""
        for entry, key, size in zip(entries, keys, sizes, strict=True):
            self.board.post(replace(_note(entry, "Building"), key=key, total=size))
        missing = sum(
            size for key, size in zip(keys, sizes, strict=True) if store.find(self.root, key) is None
        )
        needed = missing + (self._fetching(opened, reads, missing) if reads is not None else 0)
        free = self._free()
        if needed > free:
            # What lies there for other entries can be fetched again.
            self.stage.sweep(keep=[file.sha256 or "" for file in reads.files] if reads is not None else ())
            free = self._free()
        if needed > free:
            names = ", ".join(entry.id for entry in entries)
            raise NoSpace(
                f"building {names} needs {needed} bytes; {free} are free beside the head-room",
                hint="free space on the cache's file system, or use a larger one",
                code="InsufficientDisk",
                needed_bytes=needed,
            )
        try:
            yield
        except NoSpace as error:
            opened.close()
            self.stage.sweep()
            if not hasattr(error, "needed_bytes"):
                error.needed_bytes = needed  # type: ignore[attr-defined]
            raise

    def _fetching(self, opened: Opened, reads: Reads, missing: int) -> int:
        """Bytes of disk for fetched files beside the entries. Where there is room, all stay until the entries
        are there, so that a failure costs little; else each of a Layout goes after its last use, and those of
        ``Files`` entries are read straight through."""
        assert opened.fetcher is not None  # noqa: S101 - the caller has asked
        ours = {file.sha256 or "": file.size for file in reads.files if file.size > SMALL_BYTES}
        whole = sum(size - self.stage.have(key, size) for key, size in ours.items())
        if missing + whole > self._free():
            self.stage.sweep(keep=ours.keys())
        if missing + whole <= self._free():
            return whole
        if not reads.nbytes:
            opened.fetcher.straight = True
            return 0
        opened.fetcher.expect(reads.nbytes)
        return min(whole, reads.peak)

    def _free(self) -> int:
        return look_at_disk(self.root, None, self.headroom_bytes).free

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
