"""FLUX.1: `FluxTransformer2DModel` in `FluxPipeline`, text to image.

Image i of a request starts from the noise of seed + i, so it is the picture that a request for that seed
alone gives, up to the effect of batching on rounding. Must not know about slots, files or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.image_processor import VaeImageProcessor
from PIL.Image import Image
from torch import nn

from dlo_engine.errors import BadEntry
from dlo_engine.families.loading import load_part
from dlo_engine.mapping import read_config
from dlo_engine.protocol import GenerateRequest, Limits

DEFAULT_SEQUENCE_LENGTH = 512
DEFAULT_STEPS = 28
DEFAULT_GUIDANCE = 3.5
MOST_NATIVE_SIDES = 4
"""A side may be this many times the native one: attention grows with the fourth power of it."""


class FluxFamily:
    """FLUX.1-dev, FLUX.1-schnell and models of their architecture."""

    architecture = "FluxTransformer2DModel"

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """The transformer on `meta`."""
        with torch.device("meta"):
            model: nn.Module = FluxTransformer2DModel.from_config(dict(config))
        return model.eval().requires_grad_(False)

    def adapt(self, model: nn.Module, tensor_size: int) -> None:
        """Attention runs on this rank's heads. Query and key norms are per head, so they stay as they are."""
        for module in model.modules():
            if type(module).__name__ == "FluxAttention":
                attention: Any = module
                attention.heads //= tensor_size
                attention.inner_dim //= tensor_size

    def pipeline(self, directory: Path, model: nn.Module, device: torch.device, *, first: bool) -> Any:
        """A FluxPipeline; on the other tensor ranks without text encoders, tokenizers and VAE."""
        channels = read_config(directory, "vae").get("block_out_channels")
        if not isinstance(channels, list) or not channels:
            raise BadEntry("vae/config.json has no block_out_channels")
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
            directory / "scheduler", local_files_only=True
        )
        parts = _encoders_and_vae(directory, device) if first else dict.fromkeys(_PARTS)
        pipe = FluxPipeline(scheduler=scheduler, transformer=model, **parts)
        # Without a VAE the pipeline assumes 8.
        pipe.vae_scale_factor = 2 ** (len(channels) - 1)
        pipe.image_processor = VaeImageProcessor(vae_scale_factor=pipe.vae_scale_factor * 2)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def limits(self, pipe: Any) -> Limits:
        """Sides are multiples of two latent pixels."""
        side = pipe.default_sample_size * pipe.vae_scale_factor
        return Limits(
            pixel_multiple=2 * pipe.vae_scale_factor,
            max_side=MOST_NATIVE_SIDES * side,
            default_width=side,
            default_height=side,
            default_steps=DEFAULT_STEPS,
            default_guidance=DEFAULT_GUIDANCE if pipe.transformer.config.guidance_embeds else None,
        )

    def encode(self, pipe: Any, prompt: str, max_sequence_length: int | None) -> tuple[torch.Tensor, ...]:
        """T5 embeddings [1, length, width] and CLIP's pooled ones [1, width]."""
        with torch.no_grad():
            embeddings, pooled, _ = pipe.encode_prompt(
                prompt=prompt,
                prompt_2=None,
                device=pipe._execution_device,
                max_sequence_length=max_sequence_length or DEFAULT_SEQUENCE_LENGTH,
            )
        return embeddings, pooled

    def denoise(
        self,
        pipe: Any,
        embeddings: tuple[torch.Tensor, ...],
        request: GenerateRequest,
        stop: Callable[[int], bool],
    ) -> torch.Tensor | None:
        """Packed latents [n, tokens, channels]."""
        stopped = False

        def after_step(pipeline: Any, step: int, _timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
            nonlocal stopped
            if step + 1 < request.steps and stop(step):
                pipeline._interrupt = stopped = True
            return kept

        batch, pooled = (tensor.repeat_interleave(request.n, dim=0) for tensor in embeddings)
        guidance = {} if request.guidance is None else {"guidance_scale": request.guidance}
        latents: torch.Tensor = pipe(
            prompt_embeds=batch,
            pooled_prompt_embeds=pooled,
            width=request.width,
            height=request.height,
            num_inference_steps=request.steps,
            generator=[
                torch.Generator("cpu").manual_seed(request.seed + index) for index in range(request.n)
            ],
            output_type="latent",
            return_dict=False,
            callback_on_step_end=after_step,
            callback_on_step_end_tensor_inputs=[],
            **guidance,
        )[0]
        return None if stopped else latents

    def decode(self, pipe: Any, latents: torch.Tensor, request: GenerateRequest) -> list[Image]:
        """The last part of `FluxPipeline.__call__`, in its words."""
        with torch.no_grad():
            unpacked = pipe._unpack_latents(latents, request.height, request.width, pipe.vae_scale_factor)
            unpacked = (unpacked / pipe.vae.config.scaling_factor) + pipe.vae.config.shift_factor
            decoded = pipe.vae.decode(unpacked.to(pipe.vae.device), return_dict=False)[0]
            images: list[Image] = pipe.image_processor.postprocess(decoded, output_type="pil")
        return images


_PARTS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def _encoders_and_vae(directory: Path, device: torch.device) -> dict[str, Any]:
    """Loaded as diffusers loads them, each in the type its files have."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()

    return {
        "vae": load_part(AutoencoderKL, directory, "vae", device, low_cpu_mem_usage=False),
        "text_encoder": load_part(CLIPTextModel, directory, "text_encoder", device),
        "text_encoder_2": load_part(T5EncoderModel, directory, "text_encoder_2", device),
        "tokenizer": CLIPTokenizer.from_pretrained(directory / "tokenizer", local_files_only=True),
        "tokenizer_2": T5TokenizerFast.from_pretrained(directory / "tokenizer_2", local_files_only=True),
    }


FAMILY = FluxFamily()
