"""One rank's pipeline: the family's diffusers pipeline around a component whose blocks stream.

Builds it from open entries and runs requests on it. Must not parse settings, read the hand-over file or keep
time of the start; that is `runtime.py`'s part.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import torch
from dlo_cache.layout import Layout
from dlo_cache.layouts import builtin_layout

from dlo_engine.config import Backing, EngineConfig
from dlo_engine.errors import BadEntry, EngineError, RankDied, Unsupported
from dlo_engine.families import Family, family_of
from dlo_engine.groups import Groups
from dlo_engine.host_source import HostSource, MappedSource, StagedSource
from dlo_engine.mapping import Entries, OpenEntry
from dlo_engine.placement import Placed, Plan, place, plan_residency
from dlo_engine.protocol import GenerateRequest, GenerateResult, Limits
from dlo_engine.slots import DeviceMemory
from dlo_engine.specs import BlockImage, block_image
from dlo_engine.streams import Streams, streams_for
from dlo_engine.tp import shard
from dlo_engine.transfer import CopyEngine, Recorder

WARM_UP_UNITS = 8
"""Side of the warm-up picture in smallest units; the pass over the blocks counts, not the picture."""
WARM_UP_STEPS = 2
STAGING_THREADS = 8
"""Most host threads that fill one rank's pinned pieces."""


def import_families(entries: Entries) -> None:
    """Import what the components' families need, so that it counts as import and not as building."""
    for component in entries.components:
        family_of(_architecture(entries.config(component)))


class StreamedPipeline:
    """Runs requests on this rank. Every rank of a replica (of a wave, with AllGather) runs the same ones."""

    def __init__(
        self,
        config: EngineConfig,
        groups: Groups,
        entries: Entries,
        device: torch.device,
        *,
        recorder: Recorder | None = None,
        poison: bool = False,
    ) -> None:
        """Builds on `meta`, loads what stays and begins to stream. `recorder` and `poison` as in transfer.py.

        Raises BadEntry, Unsupported, or dlo_cache's NotDivisible.
        """
        if len(entries.components) != 1:
            raise Unsupported(
                f"Components {', '.join(entries.components)} cannot be streamed together by this engine",
                hint="stream the transformer alone",
            )
        (component, opened), *_ = entries.components.items()
        self._config = config
        self._groups = groups
        self._device = device
        self._streams: Streams = streams_for(device)
        self.family, model = _build(entries.config(component), opened, groups)
        self.memory = DeviceMemory(device)
        source = _host_source(config, device, self._streams)
        self.backing: Backing = "Resident" if config.mode == "None" else source.kind
        engine = CopyEngine(self._streams, source, gather=groups.weights, recorder=recorder, poison=poison)
        try:
            blocks, rest = _images(opened)
            plan = _plan(config, blocks, rest, groups)
            self.placed: Placed = place(model, blocks, rest, plan, engine, self.memory)
        except BaseException:
            engine.close()
            raise
        self.pipe: Any = self.family.pipeline(entries.rest.entry.directory, model, device, first=groups.first)

    @property
    def limits(self) -> Limits:
        """Of the loaded model."""
        return self.family.limits(self.pipe)

    def warm_up(self) -> None:
        """Two steps at a small size on all ranks: corrects the predicted order, loads kernels."""
        side = WARM_UP_UNITS * self.limits.pixel_multiple
        request = GenerateRequest("warm-up", "", 1, side, side, WARM_UP_STEPS, None, 0, discard=True)
        self.generate(request, lambda: False)

    def latents(
        self, request: GenerateRequest, cancelled: Callable[[], bool]
    ) -> tuple[torch.Tensor | None, dict[str, float]]:
        """Final latents of a request (None: stopped between steps) and the timings of its denoising.

        Raises EngineError where the rank can go on, RankDied where ranks may have lost step with each other.
        """
        embeddings = self._embeddings(request)
        self.placed.engine.take_timings()
        compute = self._streams.compute()
        begin = self._streams.record(compute)
        try:
            latents = self.family.denoise(
                self.pipe, embeddings, request, lambda _: self._stop(request, cancelled)
            )
        except Exception as error:
            if self._groups.world > 1:
                raise RankDied(
                    f"A step of request {request.id} failed between collectives: {error}",
                    rank=self._groups.rank,
                ) from error
            self.placed.reset()
            raise
        end = self._streams.record(compute)
        timings = self.placed.engine.take_timings()
        total = self._streams.elapsed_ms(begin, end)
        return latents, {
            "steps": float(request.steps),
            "computeMs": max(0.0, total - timings.wait_ms),
            "copyMs": timings.copy_ms,
            "waitMs": timings.wait_ms,
            "copiedBytes": float(timings.copied_bytes),
        }

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> GenerateResult:
        """A request from prompt to PNG files (first tensor rank) or to nothing (the others)."""
        latents, timings = self.latents(request, cancelled)
        given_up = latents is None or (self._groups.first and cancelled())
        images: tuple[bytes, ...] = ()
        if latents is not None and not given_up and self._groups.first and not request.discard:
            images = tuple(_png(image) for image in self.family.decode(self.pipe, latents, request))
        return GenerateResult(request.id, images, given_up, timings)

    def close(self) -> None:
        """Finish copies and take the hooks off; afterwards nothing refers to the mappings. Idempotent."""
        self.placed.close()

    # ---- parts of a request ------------------------------------------------------------------------------

    @property
    def _waves(self) -> bool:
        return self._groups.weights is not None

    def _embeddings(self, request: GenerateRequest) -> tuple[torch.Tensor, ...]:
        """Encoded on the replica's first rank, handed to the others; all know if it failed anywhere."""
        encoded: tuple[torch.Tensor, ...] | None = None
        failure: Exception | None = None
        if self._groups.first:
            try:
                encoded = self.family.encode(self.pipe, request.prompt, self._config.max_sequence_length)
            except Exception as error:
                failure = error
        if not self._groups.all_true(failure is None, wave=self._waves):
            raise failure or EngineError(
                f"Another rank could not encode its prompt; request {request.id} was not run",
                code="WaveFailed",
            )
        return self._groups.share_tensors(encoded, self._device)

    def _stop(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> bool:
        """Whether all who could want the result have given up. The same answer on all ranks concerned."""
        mine = not self._groups.first or cancelled() or (self._waves and request.discard)
        return self._groups.all_true(mine, wave=self._waves)


def _build(config: dict[str, Any], opened: OpenEntry, groups: Groups) -> tuple[Family, torch.nn.Module]:
    family = family_of(_architecture(config))
    model = family.build(config)
    if groups.tensor_size > 1:
        layout = _layout(family.architecture, opened)
        layout.check(config, groups.tensor_size)
        shard(model, layout, config, groups.replica)
        family.adapt(model, groups.tensor_size)
    return family, model


def _architecture(config: dict[str, Any]) -> str:
    return str(config.get("_class_name"))


def _layout(architecture: str, opened: OpenEntry) -> Layout:
    """The layout that cut the entry. Raises BadEntry when this engine has another one."""
    layout = builtin_layout(architecture)
    cut_by = opened.entry.manifest.preimage["layout"]
    if layout is None or layout.digest != cut_by["digest"]:
        raise BadEntry(
            f"Entry {opened.record.dir} was cut by layout {cut_by['id']}, which is not this engine's",
            hint="build the entries with the release that runs them",
            code="LayoutMismatch",
        )
    return layout


def _host_source(config: EngineConfig, device: torch.device, streams: Streams) -> HostSource:
    """The best way from the mapping to this device."""
    if device.type == "cpu":
        return MappedSource()
    cores = len(os.sched_getaffinity(0)) // config.world
    return StagedSource(streams, threads=config.threads or max(1, min(STAGING_THREADS, cores)))


def _images(opened: OpenEntry) -> tuple[list[BlockImage], BlockImage | None]:
    entry = opened.entry
    blocks = [block_image(str(file.group), file.data, file.tensors.values()) for file in entry.blocks]
    rest = entry.resident
    return blocks, None if rest is None else block_image("", rest.data, rest.tensors.values())


def _plan(config: EngineConfig, blocks: list[BlockImage], rest: BlockImage | None, groups: Groups) -> Plan:
    resident: int | None = len(blocks) if config.mode == "None" else 0
    if config.mode != "None":
        resident = None if config.resident_layers == "Auto" else config.resident_layers
    budget = config.device_memory_budget
    return plan_residency(
        [block.nbytes for block in blocks],
        resident=resident,
        budget=None if budget is None else max(0, budget - (rest.nbytes if rest else 0)),
        slots=config.slots,
        group_size=config.data if groups.weights is not None else 1,
    )


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
