"""Tokenizers and trainable networks of the sample model, with FLUX's architecture at a small width."""

from __future__ import annotations

import json

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from digits import SIZE
from tokenizers import AddedToken, Tokenizer, trainers
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

CLIP_LENGTH = 77
# The pipeline's own default for max_sequence_length: some batches are padded to it, so that both work.
LONG_LENGTH = 512
LATENT_CHANNELS = 4
WIDTH_TEXT = 64
END = "<|endoftext|>"


def clip_tokenizer(corpus: list[str], merges: int = 400) -> CLIPTokenizer:
    """A byte-level BPE tokenizer in CLIP's order: bytes, bytes that end a word, merges, two specials."""
    base = CLIPTokenizer().backend_tokenizer
    learner = Tokenizer(BPE(end_of_word_suffix="</w>", unk_token=END))
    learner.normalizer, learner.pre_tokenizer = base.normalizer, base.pre_tokenizer
    alphabet = sorted(ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2 * len(alphabet) + merges,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    learner.train_from_iterator(corpus, trainer)
    learned = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), *("".join(pair) for pair in learned)]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", END]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=learned, model_max_length=CLIP_LENGTH)


def t5_tokenizer(corpus: list[str], size: int = 512) -> T5TokenizerFast:
    """A unigram tokenizer trained on the prompts, with T5's special tokens at T5's places."""
    learner = Tokenizer(Unigram())
    learner.pre_tokenizer = T5TokenizerFast(extra_ids=0).backend_tokenizer.pre_tokenizer
    names = ("<pad>", "</s>", "<unk>")
    specials = [AddedToken(token, special=True) for token in names]
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=specials,
        unk_token=names[2],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    learner.train_from_iterator(corpus, trainer)
    vocabulary = [(token, score) for token, score in json.loads(learner.to_str())["model"]["vocab"]]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=LONG_LENGTH)


class Models(nn.Module):
    """The trainable denoising part of the pipeline: both text encoders and the transformer."""

    def __init__(self, clip_vocabulary: int, t5_vocabulary: int, clip_eos: int) -> None:
        super().__init__()
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=clip_vocabulary, hidden_size=WIDTH_TEXT, intermediate_size=2 * WIDTH_TEXT,
                projection_dim=WIDTH_TEXT, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=CLIP_LENGTH, bos_token_id=clip_eos - 1, eos_token_id=clip_eos,
                pad_token_id=clip_eos,
            )
        )  # fmt: skip
        self.t5 = T5EncoderModel(
            T5Config(
                vocab_size=t5_vocabulary, d_model=WIDTH_TEXT, d_kv=16, d_ff=2 * WIDTH_TEXT, num_layers=2,
                num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0, tie_word_embeddings=False,
                is_encoder_decoder=False,
            )
        )  # fmt: skip
        self.transformer = FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS, num_layers=4, num_single_layers=8, attention_head_dim=32,
            num_attention_heads=4, joint_attention_dim=WIDTH_TEXT, pooled_projection_dim=WIDTH_TEXT,
            guidance_embeds=False, axes_dims_rope=(8, 12, 12),
        )  # fmt: skip
        # Modulations and output start at zero, so that every block starts as the identity.
        parts = [
            part for part in self.transformer.modules() if type(part).__name__.startswith("AdaLayerNorm")
        ]
        for layer in [*(part.linear for part in parts), self.transformer.proj_out]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        side = SIZE // 4
        image_ids = FluxPipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.bfloat16)
        self.register_buffer("image_ids", image_ids, persistent=False)

    def forward(self, noisy: Tensor, sigma: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=noisy.bfloat16(),
            timestep=sigma.bfloat16(),
            pooled_projections=self.clip(clip_ids).pooler_output,
            encoder_hidden_states=self.t5(t5_ids)[0],
            img_ids=self.image_ids,
            txt_ids=torch.zeros(t5_ids.shape[1], 3, device=noisy.device, dtype=torch.bfloat16),
            return_dict=False,
        )[0]
        return velocity.float()
