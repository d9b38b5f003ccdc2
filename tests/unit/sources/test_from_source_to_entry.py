"""The whole way: a checkpoint's folder, its digests, its entries, and the bytes an engine maps."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from dlo_cache.build import build_layout_entries
from dlo_cache.entry import open_entry
from dlo_cache.files_entry import build_files_entry
from dlo_cache.layout import Layout
from dlo_cache.layouts import builtin_layout
from dlo_cache.presence import Built
from dlo_cache.root import Root, init_root
from dlo_cache.verify import verify_entry
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.pipeline import Pipeline, open_directory
from unit.sources.checkpoints import (
    STEM,
    Seen,
    Tensor,
    file_bytes,
    put,
    put_shards,
    seen,
    shell,
    tensor,
    tiny_dit,
    wanted,
    whole_pipeline,
)


def opened(root: Path, variant: str = "") -> Pipeline:
    """A pipeline whose files are hashed."""
    pipeline = open_directory(root, variant=variant)
    return pipeline.with_files(hash_files(pipeline.all_files(), DigestCache(None)))


def replicated(groups: tuple[str, ...] = ("transformer_blocks",)) -> Layout:
    """A layout as a user writes it for a model that is never divided."""
    document = {"id": "case", "architecture": "CaseTransformer", "groups": groups}
    return Layout.from_json(json.dumps({**document, "rules": [{"pattern": "**", "role": "replicated"}]}))


def built(root: Root, pipeline: Pipeline, layout: Layout) -> Built:
    """The one entry of the transformer at tensor size 1."""
    (entry,) = build_layout_entries(
        root, pipeline.component("transformer"), layout, tensor_size=1, producer={}
    )
    return entry


def mapped(built: Built) -> Seen:
    """Dtype, shape and bytes of every tensor of the entry, verified."""
    with open_entry(built.path, manifest_sha256=built.manifest_sha256) as entry:
        assert verify_entry(entry) == entry.nbytes
        return {
            view.name: (view.dtype, view.shape, bytes(file.view(view.name)))
            for file in entry.files
            for view in file.tensors.values()
        }


@pytest.mark.parametrize(
    ("case", "extra", "groups"),
    [
        ("11", [("transformer_blocks.0.pad", "F32", (0,)), ("transformer_blocks.1.scale", "F32", ())], ()),
        ("17", [("transformer_blocks.0.scale_shift_table", "F32", (1, 6, 16))], ()),
        ("35", [("token_refiner.blocks.0.w", "BF16", (96, 16)), ("token_refiner.blocks.1.w", "BF16", (8, 16))],
         ("token_refiner.blocks",)),
        ("37", [("transformer_blocks.0.shared", "BF16", (8, 4)), ("transformer_blocks.1.shared", "BF16", (8, 4))], ()),
    ],
)  # fmt: skip
def test_case_what_is_stored_is_exactly_what_the_files_hold(
    tmp_path: Path, case: str, extra: list[tuple[str, str, tuple[int, ...]]], groups: tuple[str, ...]
) -> None:
    """Cases 11, 17, 35 and 37 through builder, entry and mapping, bit for bit, dtype by dtype."""
    tensors: list[Tensor] = [*tiny_dit(), *(tensor(name, dtype, shape) for name, dtype, shape in extra)]
    put_shards(shell(tmp_path / "ckpt"), tensors, 2)
    entry = built(
        init_root(tmp_path / "cache"), opened(tmp_path / "ckpt"), replicated(("transformer_blocks", *groups))
    )
    assert mapped(entry) == wanted(tensors), case


def test_case_01_no_stale_byte_reaches_an_entry(tmp_path: Path) -> None:
    """Shards of another revision lie beside the index."""
    folder = shell(tmp_path / "ckpt")
    put_shards(folder, tiny_dit(2), 3, index=None)
    put_shards(folder, tiny_dit(1), 2)
    assert mapped(built(init_root(tmp_path / "cache"), opened(tmp_path / "ckpt"), replicated())) == wanted(
        tiny_dit(1)
    )


def test_an_entry_is_the_same_wherever_it_is_built(tmp_path: Path) -> None:
    """Two copies, two roots, two umasks, other file times: equal keys, manifests and bytes."""
    put_shards(shell(tmp_path / "one"), tiny_dit(), 2)
    shutil.copytree(tmp_path / "one", tmp_path / "deep" / "two")
    entries = [built(init_root(tmp_path / "cache"), opened(tmp_path / "one"), replicated())]
    before = os.umask(0o077)
    try:
        os.utime(tmp_path / "deep" / "two" / "transformer" / "config.json", (1, 1))
        entries.append(built(init_root(tmp_path / "other"), opened(tmp_path / "deep" / "two"), replicated()))
    finally:
        os.umask(before)
    first, second = (Path(entry.path) for entry in entries)
    assert first.name == second.name
    names = [
        sorted(path.name for path in place.iterdir() if path.name != "producer.json")
        for place in (first, second)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (first / name).stat().st_mode == (second / name).stat().st_mode
    assert first.stat().st_mode == second.stat().st_mode


def test_the_rest_of_a_pipeline_is_a_folder_to_load_from(tmp_path: Path) -> None:
    """A Files entry holds the rest byte for byte under the same names."""
    pipeline = opened(whole_pipeline(tmp_path / "ckpt"))
    rest = pipeline.rest_files(["transformer"])
    made = build_files_entry(
        init_root(tmp_path / "cache"), rest, select="PipelineRest", streamed=["transformer"], producer={}
    )
    with open_entry(made.path) as entry:
        assert {file.name: bytes(file.data) for file in entry.files} == {
            file.name: (tmp_path / "ckpt" / file.name).read_bytes() for file in rest
        }
        assert verify_entry(entry) == sum(file.size for file in rest)


@pytest.mark.parametrize("variant", ["", "fp16"])
def test_what_diffusers_itself_saves(tmp_path: Path, variant: str) -> None:
    """Shards, index and variant names as the library writes them; the FLUX layout knows every tensor."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        in_channels=8,
        axes_dims_rope=(2, 2, 4),
    )
    for word, scale in ((None, 1), ("fp16", 2)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        model.save_pretrained(tmp_path / "ckpt" / "transformer", max_shard_size="30KB", variant=word)
        if (word or "") == variant:
            state = {name: value.clone() for name, value in model.state_dict().items()}
    put(
        tmp_path / "ckpt" / "model_index.json",
        {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]},
    )
    pipeline = opened(tmp_path / "ckpt", variant)
    layout = builtin_layout("FluxTransformer2DModel")
    assert layout is not None
    assert len(pipeline.component("transformer").weights) == 3
    found = mapped(built(init_root(tmp_path / "cache"), pipeline, layout))
    assert found == seen(pipeline.component("transformer"))
    assert {name: data for name, (_, _, data) in found.items()} == {
        name: value.numpy().tobytes() for name, value in state.items()
    }


def test_one_file_without_index(tmp_path: Path) -> None:
    """The plain case."""
    put(shell(tmp_path / "ckpt") / f"{STEM}.safetensors", file_bytes(tiny_dit()))
    assert mapped(built(init_root(tmp_path / "cache"), opened(tmp_path / "ckpt"), replicated())) == wanted(
        tiny_dit()
    )
