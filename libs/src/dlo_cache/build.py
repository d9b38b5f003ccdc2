"""Builds the ``Layout`` entries of a component: one streaming pass over the source for all coordinates asked
for.

    digests → keys → locks → what is there is kept → room → per tensor: read, cast, cut, hash, write → publish

Memory does not grow with the model: a few read pieces, and two buffers for each coordinate.
Must not parse source headers (``dlo_sources`` did that) and must not take a half entry for an entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Final

from dlo_cache.dtypes import cast, itemsize, numpy_dtype
from dlo_cache.errors import Invalid
from dlo_cache.image_plan import ImagePlan, TensorPlan, plan_images
from dlo_cache.image_writer import ImageWriter, preferred_buffer_bytes
from dlo_cache.ingest import Ingest, begin, hold_keys
from dlo_cache.layout import Layout
from dlo_cache.layout_manifest import LayoutKey, layout_keys, render_manifest
from dlo_cache.oserrors import os_errors
from dlo_cache.piece_reader import Bytes, ReadJob, read_pieces
from dlo_cache.presence import Built, built, present
from dlo_cache.progress import Cancel, Progress, check_cancel, report
from dlo_cache.reserve import allocated, reserve
from dlo_cache.root import Root
from dlo_cache.source import Component

WRITE_BUDGET_BYTES: Final = 256 << 20
PIECE_BYTES: Final = 16 << 20
MOST_COORDINATES: Final = 8  # in one pass: with 16 MiB buffers, two each, more would break the budget
_MANIFEST_ROOM_BYTES: Final = 1 << 20  # manifest, lease and producer's note, generously
_MANIFEST_ROOM_FILES: Final = 4
_SYNC_THREADS: Final = 2


def build_layout_entries(
    root: Root,
    component: Component,
    layout: Layout,
    *,
    dtype: str = "Source",
    quantization: str = "None",
    tensor_size: int,
    tensor_ranks: Sequence[int] | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    producer: Mapping[str, object],
    lock_timeout_seconds: float = 600.0,
    waited: Callable[[float], None] | None = None,
) -> list[Built]:
    """The entries of ``tensor_ranks`` (all below ``tensor_size`` by default), in that order; built where not
    there.

    The component's weight files need their sha256. Valid entries that are there are kept, broken ones set
    aside and built again. Raises UnknownTensor, NotDivisible, Invalid before anything is written; NoSpace
    (InsufficientDisk before the first byte, DiskFull at a write); Busy when another builder keeps a key for
    ``lock_timeout_seconds``; Unavailable (SourceChanged); Denied; Cancelled. Whatever is raised, nothing
    unfinished is left. ``waited`` is told the seconds until the writers' locks were had.
    """
    ranks = _checked_ranks(tensor_size, tensor_ranks)
    if quantization != "None":
        raise Invalid(
            f"quantization {quantization!r} is not built yet", code="UnsupportedQuantization", hint="use None"
        )
    keys = layout_keys(
        component,
        layout,
        dtype=dtype,
        quantization=quantization,
        tensor_size=tensor_size,
        tensor_ranks=ranks,
    )
    held = hold_keys(
        root, [each.key for each in keys], timeout_seconds=lock_timeout_seconds, cancel=cancel, waited=waited
    )
    with held:
        found = {each.key: present(root, each.key) for each in keys}
        missing = [each for each in keys if found[each.key] is None]
        batches = [missing[at : at + MOST_COORDINATES] for at in range(0, len(missing), MOST_COORDINATES)]
        passes = [
            Pass(
                root=root,
                component=component,
                keys=batch,
                plans=plan_images(
                    component.tensors,
                    layout,
                    dtype=dtype,
                    tensor_size=tensor_size,
                    tensor_ranks=[each.rank for each in batch],
                    config=component.config,
                ),
                progress=progress,
                cancel=cancel,
                producer=producer,
            )
            for batch in batches
        ]
        reserve(
            root,
            sum(each.needed_bytes for each in passes),
            sum(each.needed_files for each in passes),
            subject=f"building {len(missing)} entries of {component.name}",
        )
        for each in passes:
            found.update({done.key: done for done in each.run()})
    return [done for each in keys if (done := found[each.key]) is not None]


class Pass:
    """One pass over the source that builds the entries of up to eight coordinates."""

    def __init__(
        self,
        *,
        root: Root,
        component: Component,
        keys: Sequence[LayoutKey],
        plans: Sequence[ImagePlan],
        progress: Progress | None,
        cancel: Cancel | None,
        producer: Mapping[str, object],
    ) -> None:
        self._root = root
        self._component = component
        self._keys = keys
        self._plans = plans
        self._progress = progress
        self._cancel = cancel
        self._producer = producer
        self._total = sum(job.nbytes for job in self._jobs())
        self._done = 0
        self._digests: list[dict[str, Mapping[str, str]]] = [{} for _ in keys]

    @property
    def needed_bytes(self) -> int:
        """Bytes of disk that the entries will take."""
        images = sum(allocated(image.nbytes) for plan in self._plans for image in plan.images)
        return images + len(self._keys) * _MANIFEST_ROOM_BYTES

    @property
    def needed_files(self) -> int:
        """Inodes that the entries will take."""
        return len(self._keys) * (len(self._plans) + _MANIFEST_ROOM_FILES)

    def run(self) -> list[Built]:
        """Builds and publishes; the caller holds the locks of all keys."""
        with (
            os_errors(f"building entries of {self._component.name}"),
            ThreadPoolExecutor(_SYNC_THREADS, "dlo-sync") as syncer,
            ThreadPoolExecutor(len(self._keys) + 2, "dlo-build") as pool,
            ExitStack() as stack,
        ):
            ingests = [stack.enter_context(begin(self._root, each.key, syncer=syncer)) for each in self._keys]
            largest = max(image.nbytes for plan in self._plans for image in plan.images)
            size = min(preferred_buffer_bytes(len(self._keys), WRITE_BUDGET_BYTES), max(largest, 1))
            writers = [ImageWriter(pool, size) for _ in self._keys]
            for writer in writers:
                stack.callback(writer.drop)
            pieces = stack.enter_context(closing(read_pieces(self._jobs(), pool=pool)))
            for plan in self._plans:
                self._write_images(plan, ingests, writers, pieces)
            for writer in writers:
                writer.wait()
            check_cancel(self._cancel, f"building {self._component.name}")
            return [self._publish(index, ingest) for index, ingest in enumerate(ingests)]

    def _write_images(
        self,
        plan: ImagePlan,
        ingests: Sequence[Ingest],
        writers: Sequence[ImageWriter],
        pieces: Iterator[Bytes],
    ) -> None:
        files = [ingest.create(plan.name) for ingest in ingests]
        for fd, writer, image in zip(files, writers, plan.images, strict=True):
            writer.start(fd, image.header)
        places = [iter([spot for spot in image.placements if not spot.is_pad]) for image in plan.images]
        for tensor in plan.tensors:
            for writer, place in zip(writers, places, strict=True):
                spot = next(place)
                writer.pad_to(spot.begin)
                writer.begin_tensor(spot.name, spot.nbytes)
            self._write_tensor(tensor, writers, pieces)
        for fd, writer, ingest, digests in zip(files, writers, ingests, self._digests, strict=True):
            writer.finish(partial(_written, plan.name, fd, ingest, digests))

    def _write_tensor(
        self, tensor: TensorPlan, writers: Sequence[ImageWriter], pieces: Iterator[Bytes]
    ) -> None:
        source = tensor.source
        for rows in tensor.cut.pieces(itemsize(source.dtype), PIECE_BYTES):
            check_cancel(self._cancel, f"building {self._component.name}")
            elements = cast(next(pieces).view(numpy_dtype(source.dtype)), tensor.word)
            for index, writer in enumerate(writers):
                for part in tensor.cut.take(elements, rows, index):
                    writer.append(part)
            self._done += rows.nbytes
            report(self._progress, "build", self._component.name, self._done, self._total)

    def _publish(self, index: int, ingest: Ingest) -> Built:
        each = self._keys[index]
        manifest = render_manifest(each, self._plans, index, self._digests[index])
        data = manifest.to_bytes()
        path = ingest.commit(data, self._producer)
        report(self._progress, "publish", self._component.name, index + 1, len(self._keys))
        return built(path, manifest, hashlib.sha256(data).hexdigest(), reused=False)

    def _jobs(self) -> Iterator[ReadJob]:
        for plan in self._plans:
            for tensor in plan.tensors:
                source = tensor.source
                for rows in tensor.cut.pieces(itemsize(source.dtype), PIECE_BYTES):
                    yield ReadJob(source.file, source.offset + rows.offset, rows.nbytes)


def _written(
    name: str, fd: int, ingest: Ingest, into: dict[str, Mapping[str, str]], digests: Mapping[str, str]
) -> None:
    """Takes over a written file: its tensors' digests, and the file itself to be synced."""
    into[name] = digests
    ingest.seal(fd)


def _checked_ranks(tensor_size: int, tensor_ranks: Sequence[int] | None) -> tuple[int, ...]:
    if tensor_size < 1:
        raise Invalid(f"a tensor-parallel size is at least 1, not {tensor_size}")
    ranks = tuple(range(tensor_size)) if tensor_ranks is None else tuple(tensor_ranks)
    if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < tensor_size for rank in ranks):
        raise Invalid(f"tensor ranks {list(ranks)} are not distinct ranks below {tensor_size}")
    return ranks
