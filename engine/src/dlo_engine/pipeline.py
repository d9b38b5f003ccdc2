"""One rank's pipeline: the family's diffusers pipeline around a component whose blocks stream.

Builds it from open entries and runs requests on it. Must not parse settings, read the hand-over file or keep
time of the start; that is `runtime.py`'s part.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from dlo_engine.assembly import NO_ENTRY, build_model, host_source, plan, the_component, weights_of
from dlo_engine.config import Backing, EngineConfig
from dlo_engine.errors import EngineError, RankDied
from dlo_engine.groups import Groups
from dlo_engine.mapping import Entries
from dlo_engine.placement import Placed, place
from dlo_engine.protocol import GenerateRequest, GenerateResult, Limits
from dlo_engine.slots import DeviceMemory
from dlo_engine.streams import Streams, streams_for
from dlo_engine.transfer import CopyEngine, Recorder

WARM_UP_UNITS = 8
"""Side of the warm-up picture in smallest units; the pass over the blocks counts, not the picture."""
WARM_UP_STEPS = 2


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

        Raises BadEntry, Unsupported, or InvalidConfiguration for a budget or degree that does not fit.
        """
        component, opened = the_component(entries)
        component_config = entries.config(component)
        self._config = config
        self._groups = groups
        self._device = device
        self._streams: Streams = streams_for(device)
        self.family, model = build_model(component_config, opened, groups)
        self.memory = DeviceMemory(device)
        blocks, rest, backing = weights_of(entries, component, opened, component_config, groups)
        source = host_source(config, device, self._streams)
        self.backing: Backing = "Resident" if config.mode == "None" else backing or source.kind
        self.fallback_code = NO_ENTRY if backing is not None and config.cache_policy != "Disabled" else None
        engine = CopyEngine(self._streams, source, gather=groups.weights, recorder=recorder, poison=poison)
        try:
            residency = plan(config, blocks, groups)
            self.placed: Placed = place(model, blocks, rest, residency, engine, self.memory)
            self.pipe: Any = self.family.pipeline(
                entries.rest.entry.directory, model, device, first=groups.first
            )
        except BaseException:
            engine.abandon() if groups.world > 1 else engine.close()
            raise

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
            self._recover(request, error)
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

    def abandon(self) -> None:
        """Let go without waiting for other ranks; this process must end soon."""
        self.placed.engine.abandon()

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

    def _recover(self, request: GenerateRequest, error: Exception) -> None:
        """Make this rank usable after a failed step. Raises RankDied where it cannot be."""
        where = f"request {request.id} failed in a step: {error}"
        if self._groups.tensor_size > 1 or self._waves:
            raise RankDied(
                f"Ranks may have lost step with each other, {where}", rank=self._groups.rank
            ) from error
        try:
            self.placed.reset()
        except Exception as again:
            raise RankDied(
                f"The device could not go on ({again}), {where}", rank=self._groups.rank
            ) from error

    def _stop(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> bool:
        """Whether all who could want the result have given up. The same answer on all ranks concerned."""
        mine = not self._groups.first or cancelled() or (self._waves and request.discard)
        return self._groups.all_true(mine, wave=self._waves)


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
