"""The reference that "bit-identical" is measured against, as the engine's design states it.

The diffusers pipeline whose streamed component is made from its config and filled by
`load_state_dict(strict=True, assign=True)` of the files, every parameter cloned so that it is aligned. The
other components are loaded by diffusers in the type of their files. Nothing of the engine is used here.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch


def reference_pipeline(folder: Path, device: str = "cpu") -> Any:
    """FluxPipeline of a folder, all of it resident on `device`."""
    from diffusers import FluxPipeline, FluxTransformer2DModel
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "transformer").glob("*.safetensors")):
        state.update(load_file(path))
    with torch.device("meta"):
        transformer: Any = FluxTransformer2DModel.from_config(
            FluxTransformer2DModel.load_config(folder / "transformer")
        )
    transformer.load_state_dict(state, strict=True, assign=True)
    dtype = max((t.dtype for t in state.values()), key=lambda d: sum(t.dtype == d for t in state.values()))
    pipe: Any = FluxPipeline.from_pretrained(
        folder, transformer=transformer.eval(), dtype=dtype, low_cpu_mem_usage=False
    )
    for name in ("transformer", "text_encoder", "text_encoder_2", "vae"):
        part = getattr(pipe, name).requires_grad_(False).to(device)
        for parameter in part.parameters():
            parameter.data = parameter.data.clone()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def reference_latents(
    pipe: Any, *, prompt: str, n: int, width: int, height: int, steps: int, seed: int, **options: Any
) -> torch.Tensor:
    """Final latents of one request."""
    latents: torch.Tensor = _call(pipe, prompt, n, width, height, steps, seed, "latent", options)
    return latents.cpu()


def reference_png(
    pipe: Any, *, prompt: str, n: int, width: int, height: int, steps: int, seed: int, **options: Any
) -> tuple[bytes, ...]:
    """PNG files of one request, from the pipeline's own "pil" output."""
    files = []
    for image in _call(pipe, prompt, n, width, height, steps, seed, "pil", options):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        files.append(buffer.getvalue())
    return tuple(files)


def _call(
    pipe: Any,
    prompt: str,
    n: int,
    width: int,
    height: int,
    steps: int,
    seed: int,
    output_type: str,
    options: dict[str, Any],
) -> Any:
    generators = [torch.Generator("cpu").manual_seed(seed + index) for index in range(n)]
    return pipe(
        prompt=prompt,
        num_images_per_prompt=n,
        width=width,
        height=height,
        num_inference_steps=steps,
        generator=generators,
        output_type=output_type,
        **options,
    ).images
