"""A tiny pipeline with its entries, its engine configurations and its reference results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dlo_engine.config import EngineConfig
from dlo_engine.protocol import GenerateRequest
from fakes.engine_entries import prepare
from fakes.reference import reference_latents, reference_png

LENGTH = 32
"""Text tokens: the tiny encoders take more, the tests need no more."""


@dataclass
class Model:
    """A pipeline folder, and hand-over files of its entries by tensor degree."""

    folder: Path
    work: Path
    pipe: Any
    handovers: dict[int, Path]

    def handover(self, tensor: int = 1) -> Path:
        """The hand-over file for a tensor degree; its entries are built when first asked for."""
        if tensor not in self.handovers:
            self.handovers[tensor] = prepare(
                self.folder, self.work / f"tensor-{tensor}" / "cache", tensor=tensor
            )
        return self.handovers[tensor]

    def config(self, **options: Any) -> EngineConfig:
        """A CPU engine on this model."""
        fixed: dict[str, Any] = {
            "handover": self.handover(options.get("tensor", 1)),
            "model_name": "tiny",
            "device": "cpu",
            "max_sequence_length": LENGTH,
            "threads": 1,
        }
        return EngineConfig(**{**fixed, **options})

    def latents(self, request: GenerateRequest) -> torch.Tensor:
        """The reference's final latents."""
        return reference_latents(self.pipe, **_options(request))

    def png(self, request: GenerateRequest) -> tuple[bytes, ...]:
        """The reference's pictures."""
        return reference_png(self.pipe, **_options(request))


def _options(request: GenerateRequest) -> dict[str, Any]:
    return {
        "prompt": request.prompt,
        "n": request.n,
        "width": request.width,
        "height": request.height,
        "steps": request.steps,
        "seed": request.seed,
        "max_sequence_length": LENGTH,
        **({} if request.guidance is None else {"guidance_scale": request.guidance}),
    }
