"""The parts of a pipeline that do not stream: which files they are loaded from, and what is never loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dlo_cache.errors import BadHeader
from dlo_engine.errors import BadEntry
from dlo_engine.families.loading import file_dtype, load_part, variant_of
from dlo_engine.protocol import GenerateRequest
from dlo_engine.runtime import Runtime
from fakes.engine_entries import prepare
from fakes.engine_model import Model
from transformers import CLIPTextModel, T5EncoderModel
from unit.engine.stream.test_checkpoint import prepare_files

CPU = torch.device("cpu")
MakeRequest = Callable[..., GenerateRequest]


def as_variant(folder: Path, into: Path) -> Path:
    """A copy of a pipeline whose weights are of variant fp16 throughout, T5's and the transformer's in shards."""
    shutil.copytree(folder, into)
    encoder = T5EncoderModel.from_pretrained(
        into / "text_encoder_2", dtype=file_dtype(into / "text_encoder_2")
    )
    for path in into.glob("text_encoder_2/*.safetensors"):
        path.unlink()
    encoder.save_pretrained(into / "text_encoder_2", variant="fp16", max_shard_size=20_000)
    for path in into.glob("*/*.safetensors*"):
        if "fp16" not in path.name:
            plain = path.name
            for end in (".safetensors.index.json", ".safetensors"):
                if plain.endswith(end):
                    stem = plain.removesuffix(end)
                    index = end.endswith(".json")
                    path.rename(
                        path.with_name(f"{stem}{end[:-5]}.fp16.json" if index else f"{stem}.fp16{end}")
                    )
                    break
    for index_path in into.glob("transformer/*.index.fp16.json"):
        index = json.loads(index_path.read_text())
        placed = index["weight_map"].items()
        index["weight_map"] = {
            name: shard.replace(".safetensors", ".fp16.safetensors") for name, shard in placed
        }
        index_path.write_text(json.dumps(index))
    return into


@pytest.mark.parametrize("cached", [True, False], ids=["entry", "checkpoint"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_variant_is_served_like_its_plain_form(
    dtype: str, cached: bool, request: pytest.FixtureRequest, request_of: MakeRequest, tmp_path: Path
) -> None:
    """One file and shards, with a layout entry and straight from the checkpoint: the same pictures."""
    model: Model = request.getfixturevalue(dtype)
    folder = as_variant(model.folder, tmp_path / "pipeline")
    assert not [path for path in folder.glob("*/*safetensors*") if "fp16" not in path.name]
    if cached:
        config = model.config(handover=prepare(folder, tmp_path / "work" / "cache", variant="fp16"))
    else:
        handover = prepare_files(folder, tmp_path, variant="fp16")
        config = model.config(handover=handover, cache_policy="Disabled")
    runtime = Runtime.start(config, 0, "", lambda *_: None)
    asked = request_of()
    assert runtime.generate(asked, lambda: False).images == model.png(asked)
    runtime.close()


@pytest.mark.parametrize(
    ("names", "variant"),
    [
        (["model.safetensors"], None),
        (["model.fp16.safetensors"], "fp16"),
        (["model.safetensors", "model.fp16.safetensors"], None),
        (["diffusion_pytorch_model.safetensors.index.json"], None),
        (
            [
                "diffusion_pytorch_model.safetensors.index.fp16.json",
                "diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
                "diffusion_pytorch_model.fp16-00002-of-00002.safetensors",
            ],
            "fp16",
        ),
        (["config.json"], None),
    ],
)
def test_the_variant_is_told_by_the_files(names: list[str], variant: str | None, tmp_path: Path) -> None:
    """A plain set counts where there is one; names of shards say nothing."""
    for name in names:
        (tmp_path / name).touch()
    assert variant_of(tmp_path) == variant


def test_a_pickle_is_never_loaded(float32: Model, tmp_path: Path) -> None:
    """Whatever a Files entry holds: with a pickle in the place of safetensors the part has no weights."""
    folder = tmp_path / "text_encoder"
    shutil.copytree(float32.folder / "text_encoder", folder)
    (weights,) = folder.glob("*.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(BadEntry, match="text_encoder has no weights"):
        load_part(CLIPTextModel, tmp_path, "text_encoder", CPU)
    shutil.copy(float32.folder / "vae" / "diffusion_pytorch_model.safetensors", folder / "other.safetensors")
    with pytest.raises(OSError, match=r"no file named .*safetensors"):
        load_part(CLIPTextModel, tmp_path, "text_encoder", CPU)


@pytest.mark.parametrize(
    "stated",
    [
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": "paged|someone/kernel:function"},
        {"text_config": {"experts_implementation": {"": "someone/kernel"}}},
    ],
    ids=["attention", "private", "nested"],
)
def test_a_config_cannot_name_code_to_fetch(stated: dict[str, Any], float32: Model, tmp_path: Path) -> None:
    """Transformers would fetch and run a hub's kernel that the checkpoint's config names."""
    shutil.copytree(float32.folder / "text_encoder", tmp_path / "text_encoder")
    path = tmp_path / "text_encoder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stated}))
    with pytest.raises(BadEntry, match=r"text_encoder/config\.json asks for code from a model hub"):
        load_part(CLIPTextModel, tmp_path, "text_encoder", CPU)


def test_a_lying_header_is_not_believed(tmp_path: Path) -> None:
    """Its length sizes no allocation: the file is damaged, and is named."""
    (tmp_path / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{" + b" " * 600)
    with pytest.raises(BadHeader, match=r"model\.safetensors claims a header"):
        file_dtype(tmp_path)


def test_a_vae_without_its_channels_is_refused(float32: Model, tmp_path: Path) -> None:
    """By name, on every rank, not as a missing key."""
    folder = tmp_path / "pipeline"
    shutil.copytree(float32.folder, folder)
    path = folder / "vae" / "config.json"
    config = json.loads(path.read_text())
    del config["block_out_channels"]
    path.write_text(json.dumps(config))
    handover = prepare(folder, tmp_path / "work" / "cache")
    with pytest.raises(BadEntry, match="no block_out_channels"):
        Runtime.start(float32.config(handover=handover), 0, "", lambda *_: None)


def test_a_loader_is_kept_to_the_folder_and_its_memory_is_aligned(float32: Model) -> None:
    """No network, no pickle, the files' own type; parameters left at odd addresses get memory of their own."""
    asked: dict[str, Any] = {}
    values = torch.arange(16, dtype=torch.float32)

    class Loader:
        @staticmethod
        def from_pretrained(folder: Path, **options: Any) -> torch.nn.Module:
            asked.update(options, folder=folder)
            memory = torch.frombuffer(bytearray(4 * 64), dtype=torch.float32)
            start = next(at for at in range(16) if memory[at:].data_ptr() % 64)
            memory[start : start + 16] = values
            part = torch.nn.Module().train()
            part.register_parameter("weight", torch.nn.Parameter(memory[start : start + 16]))
            return part

    part = load_part(Loader, float32.folder, "text_encoder", CPU, more=1)
    assert asked == {
        "folder": float32.folder / "text_encoder",
        "dtype": torch.float32,
        "variant": None,
        "use_safetensors": True,
        "local_files_only": True,
        "more": 1,
    }
    assert part.weight.data_ptr() % 64 == 0
    assert torch.equal(part.weight, values)
    assert not part.training
    assert not part.weight.requires_grad
