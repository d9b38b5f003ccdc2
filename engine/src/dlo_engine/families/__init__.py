"""Model families: what the engine must know of one diffusers architecture and its pipeline.

One module per family, imported only when its architecture is served. Must not import torch or diffusers
itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dlo_engine.errors import Unsupported

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import nn

    from dlo_engine.protocol import GenerateRequest, Limits

_MODULES = {"FluxTransformer2DModel": "dlo_engine.families.flux"}


class Family(Protocol):
    """One architecture: how its streamed component is built and how its pipeline is driven.

    `pipe` is what `pipeline` returned; the engine hands it back without looking inside.
    """

    architecture: str

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """The component on `meta` from its diffusers config, in evaluation mode, in full size."""

    def adapt(self, model: nn.Module, tensor_size: int) -> None:
        """What tensor parallelism changes beyond linears: head counts and the like. In place."""

    def pipeline(self, directory: Path, model: nn.Module, device: torch.device, *, first: bool) -> Any:
        """The pipeline of a folder in diffusers layout around `model`. Only the `first` tensor rank of a
        replica gets text encoders and an image decoder."""

    def limits(self, pipe: Any) -> Limits:
        """Size limits and defaults of the loaded model; the same on every rank."""

    def encode(self, pipe: Any, prompt: str, max_sequence_length: int | None) -> tuple[torch.Tensor, ...]:
        """First tensor rank only: the prompt's embeddings, batch of one."""

    def denoise(
        self,
        pipe: Any,
        embeddings: tuple[torch.Tensor, ...],
        request: GenerateRequest,
        stop: Callable[[int], bool],
    ) -> torch.Tensor | None:
        """Final latents of all `request.n` images, or None when `stop(step)` was true after a step (0, 1, …).

        `stop` is asked after every step but the last, alike on all ranks.
        """

    def decode(self, pipe: Any, latents: torch.Tensor, request: GenerateRequest) -> list[Image]:
        """First tensor rank only: the pictures, exactly as the pipeline itself would return them."""


def family_of(architecture: str) -> Family:
    """The family that serves a diffusers class. Raises Unsupported naming those that are."""
    module = _MODULES.get(architecture)
    if module is None:
        raise Unsupported(
            f"Architecture {architecture} has no family in this engine",
            hint=f"served are: {', '.join(sorted(_MODULES))}",
        )
    family: Family = importlib.import_module(module).FAMILY
    return family
