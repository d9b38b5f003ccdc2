"""A tiny FLUX pipeline folder with random weights, in diffusers layout, made offline in about a second.

For tests that need a checkpoint whose meaning does not matter. The folder loads with
`FluxPipeline.from_pretrained(folder)`; its transformer has 4 attention heads (cuts at 2 and 4) and may be
written in several shards. The same arguments always give the same bytes.

It must not reach the network and must not be used to judge pictures: the weights are noise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEADS = 4
HEAD_DIM = 16
WIDTH = HEADS * HEAD_DIM
TEXT_WIDTH = 32
CLIP_LENGTH = 77
T5_LENGTH = 512
LATENT_CHANNELS = 4
VAE_SCALE = 2
"""Pixels per latent pixel along one axis; image sizes are multiples of twice this."""


def _clip_tokenizer() -> Any:
    """Byte-level tokenizer without merges: one token a byte, as CLIP orders its vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_LENGTH)


def _t5_tokenizer() -> Any:
    """Unigram tokenizer of single characters with T5's special tokens in T5's places."""
    from transformers import T5TokenizerFast

    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    characters = [(chr(code), -3.0 - index / 100) for index, code in enumerate(range(33, 127))]
    return T5TokenizerFast(vocab=[*specials, *characters], extra_ids=0, model_max_length=T5_LENGTH)


def _randomize(module: Any, generator: Any, scale: float) -> None:
    """Gives every parameter distinct small noise, so that no swap or omission of tensors goes unseen."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * scale
            parameter.copy_(noise + 1.0 if "norm" in name and parameter.ndim == 1 else noise)


def transformer_config(
    *,
    double_blocks: int = 2,
    single_blocks: int = 2,
    guidance_embeds: bool = False,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
) -> dict[str, Any]:
    """Arguments of `FluxTransformer2DModel` for the tiny transformer, or a larger one of the same form."""
    quarter = head_dim // 4
    return {
        "patch_size": 1,
        "in_channels": 4 * LATENT_CHANNELS,
        "num_layers": double_blocks,
        "num_single_layers": single_blocks,
        "attention_head_dim": head_dim,
        "num_attention_heads": heads,
        "joint_attention_dim": TEXT_WIDTH,
        "pooled_projection_dim": TEXT_WIDTH,
        "guidance_embeds": guidance_embeds,
        "axes_dims_rope": (quarter, (head_dim - quarter) // 2, (head_dim - quarter) // 2),
    }


def make_tiny_flux(
    folder: Path,
    *,
    dtype: str = "float32",
    double_blocks: int = 2,
    single_blocks: int = 2,
    seed: int = 0,
    guidance_embeds: bool = False,
    max_shard_bytes: int | None = None,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
) -> Path:
    """Writes the pipeline into `folder` (made if absent) and returns it.

    `dtype`: "float32", "bfloat16" or "float16", for all components. `max_shard_bytes` splits the
    transformer's weights into shards with an index.
    """
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip_tokenizer, t5_tokenizer = _clip_tokenizer(), _t5_tokenizer()
    eos = int(clip_tokenizer.eos_token_id)
    clip_config = CLIPTextConfig(
        vocab_size=len(clip_tokenizer), hidden_size=TEXT_WIDTH, intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH, bos_token_id=eos - 1, eos_token_id=eos, pad_token_id=eos,
    )  # fmt: skip
    t5_config = T5Config(
        vocab_size=len(t5_tokenizer), d_model=TEXT_WIDTH, d_kv=16, d_ff=2 * TEXT_WIDTH, num_layers=2,
        num_heads=2, feed_forward_proj="gated-gelu", dropout_rate=0.0, tie_word_embeddings=False,
        is_encoder_decoder=False,
    )  # fmt: skip
    config = transformer_config(
        double_blocks=double_blocks, single_blocks=single_blocks, guidance_embeds=guidance_embeds,
        heads=heads, head_dim=head_dim,
    )  # fmt: skip
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    # Constructors draw from the global generator; fork it so that making a folder leaves no trace in a test.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: dict[str, Any] = {
            "text_encoder": CLIPTextModel(clip_config),
            "text_encoder_2": T5EncoderModel(t5_config),
            "vae": AutoencoderKL(
                latent_channels=LATENT_CHANNELS, block_out_channels=(8, 8), norm_num_groups=2, sample_size=32,
                down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                layers_per_block=1, use_quant_conv=False, use_post_quant_conv=False,
                scaling_factor=0.5, shift_factor=0.1,
            ),
            "transformer": FluxTransformer2DModel(**config),
        }  # fmt: skip
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, part in parts.items():
            _randomize(part, generator, 0.2 if name == "vae" else 0.12)
            part.to(torch_dtype).eval()
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
            tokenizer=clip_tokenizer,
            tokenizer_2=t5_tokenizer,
            **parts,
        )
        folder.mkdir(parents=True, exist_ok=True)
        pipeline.save_pretrained(folder)
        if max_shard_bytes is not None:
            for single in (folder / "transformer").glob("*.safetensors"):
                single.unlink()
            parts["transformer"].save_pretrained(folder / "transformer", max_shard_size=max_shard_bytes)
    for weights in folder.glob("*/*.safetensors"):
        weights.chmod(0o644)
    index_path = folder / "model_index.json"
    index = json.loads(index_path.read_text())
    index["tokenizer_2"][1] = "T5TokenizerFast"
    index_path.write_text(json.dumps(index, indent=2) + "\n")
    return folder
