"""The sample model in examples/digits: its files, its architecture, and that it draws the digit asked for."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples" / "digits"
CLASSIFIER = ROOT / "tests" / "data" / "samples" / "digit_classifier.safetensors"
PARTS = ("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae")


def read(*names: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(MODEL.joinpath(*names).read_text())
    return content


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sample_digits", MODEL / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pipeline() -> Any:
    import torch
    from diffusers import FluxPipeline

    loaded = FluxPipeline.from_pretrained(MODEL, dtype=torch.bfloat16, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_index_names_the_flux_classes() -> None:
    index = read("model_index.json")
    assert index["_class_name"] == "FluxPipeline"
    assert {name: index[name] for name in PARTS} == {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def test_transformer_has_double_and_single_blocks() -> None:
    config = read("transformer", "config.json")
    assert config["num_layers"] >= 3
    assert config["num_single_layers"] >= 4
    assert config["num_attention_heads"] % 4 == 0
    assert sum(config["axes_dims_rope"]) == config["attention_head_dim"]
    assert config["guidance_embeds"] is False


def test_transformer_lies_in_two_shards_that_the_index_describes() -> None:
    folder = MODEL / "transformer"
    index = read("transformer", "diffusion_pytorch_model.safetensors.index.json")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    found = {}
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as content:
            found.update(dict.fromkeys(content.keys(), shard))
    assert found == index["weight_map"]


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "text_encoder_2", "vae"])
def test_weights_are_bfloat16(part: str) -> None:
    kinds = set()
    for path in (MODEL / part).glob("*.safetensors"):
        with safe_open(path, framework="pt") as content:
            kinds |= {content.get_slice(name).get_dtype() for name in content.keys()}  # noqa: SIM118
    assert kinds == {"BF16"}


def test_model_stays_small() -> None:
    files = [path for part in PARTS for path in (MODEL / part).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 16 * 2**20
    assert CLASSIFIER.stat().st_size <= 300 * 1024


def test_defaults_have_exactly_the_documented_keys() -> None:
    defaults = read("defaults.json")
    assert set(defaults) == {"height", "width", "steps", "guidance", "max_sequence_length"}
    assert (defaults["height"], defaults["width"]) == (32, 32)


def test_classifier_reads_real_digits(digits: ModuleType) -> None:
    _, accuracy = digits.load_classifier(CLASSIFIER)
    assert accuracy >= 0.98


def test_pipeline_loads_and_draws_a_picture(pipeline: Any) -> None:
    defaults = read("defaults.json")
    picture = pipeline(
        "a handwritten seven",
        height=defaults["height"],
        width=defaults["width"],
        num_inference_steps=2,
        max_sequence_length=defaults["max_sequence_length"],
    ).images[0]
    assert picture.size == (32, 32)
    assert picture.mode == "RGB"


def test_pictures_are_read_as_the_digit_asked_for(digits: ModuleType, pipeline: Any) -> None:
    classifier, _ = digits.load_classifier(CLASSIFIER)
    accuracy, pictures = digits.measure(
        pipeline, classifier, digits.load_defaults(MODEL), digits.EVALUATION_PROMPTS[:2], first_seed=0
    )
    assert pictures.shape == (20, 3, 32, 32)
    assert accuracy.right >= 19, accuracy.misread
