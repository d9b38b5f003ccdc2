"""Tiny checkpoints in the diffusers folder form, written byte by byte."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from dlo_cache.header import tensor_bytes
from dlo_cache.source import Component

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Tensor:
    """A tensor as it stands in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def renamed(self, name: str) -> Tensor:
        """The same bytes under another name."""
        return replace(self, name=name)


Seen = dict[str, tuple[str, tuple[int, ...], bytes]]


def tensor(name: str, dtype: str = "BF16", shape: tuple[int, ...] = (4, 4), seed: int = 0) -> Tensor:
    """A tensor whose bytes belong to its name and the seed."""
    data = np.random.default_rng([seed, *name.encode()]).bytes(tensor_bytes(dtype, shape))
    return Tensor(name, dtype, shape, data)


def tiny_dit(seed: int = 0, dtype: str = "BF16") -> list[Tensor]:
    """Two blocks and something around them."""
    names = ["x_embedder.weight", "proj_out.weight", "proj_out.bias"]
    for block in (0, 1):
        names += [
            f"transformer_blocks.{block}.{part}"
            for part in ("attn.to_q.weight", "attn.to_q.bias", "ff.weight")
        ]
    return [tensor(name, dtype, (16,) if name.endswith("bias") else (16, 8), seed) for name in names]


def file_bytes(tensors: Sequence[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file."""
    head: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for each in tensors:
        head[each.name] = {
            "dtype": each.dtype,
            "shape": each.shape,
            "data_offsets": [at, at + len(each.data)],
        }
        at += len(each.data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(each.data for each in tensors)


def put(path: Path, content: bytes | str | object) -> Path:
    """Writes bytes, text, or anything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def put_index(folder: Path, placed: Mapping[str, Sequence[Tensor]], name: str = INDEX) -> None:
    """The index over shards that need not exist."""
    where = {each.name: file for file, tensors in placed.items() for each in tensors}
    put(folder / name, {"metadata": {"total_size": 0}, "weight_map": where})


def put_shards(
    folder: Path, tensors: Sequence[Tensor], count: int, index: str | None = INDEX
) -> dict[str, list[Tensor]]:
    """Numbered shards, dealt in turn, and their index."""
    placed = {
        f"{STEM}-{place + 1:05d}-of-{count:05d}.safetensors": list(tensors[place::count])
        for place in range(count)
    }
    for name, held in placed.items():
        put(folder / name, file_bytes(held, {"format": "pt"}))
    if index is not None:
        put_index(folder, placed, index)
    return placed


def shell(root: Path, **more: Any) -> Path:
    """What is around the weights of one transformer; returns the component's folder."""
    listed = {"_class_name": "TinyPipeline", "_diffusers_version": "0.40.0", **more}
    put(root / "model_index.json", {**listed, "transformer": ["diffusers", "CaseTransformer"]})
    put(root / "transformer" / "config.json", {"_class_name": "CaseTransformer", "num_attention_heads": 4})
    return root / "transformer"


def whole_pipeline(root: Path) -> Path:
    """A pipeline of every kind of component, with files lying about that belong to none."""
    folder = shell(
        root,
        text_encoder=["transformers", "T5EncoderModel"],
        tokenizer=["transformers", "T5TokenizerFast"],
        scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"],
        vae=["diffusers", "AutoencoderKL"],
        safety_checker=[None, None],
        requires_safety_checker=False,
    )
    put_shards(folder, tiny_dit(), 2)
    put(root / "text_encoder" / "config.json", {"architectures": ["T5EncoderModel"]})
    put(root / "text_encoder" / "model.safetensors", file_bytes([tensor("shared.weight")]))
    put(root / "text_encoder" / "model.fp16.safetensors", file_bytes([tensor("shared.weight", "F16")]))
    put(root / "text_encoder" / "pytorch_model.bin", b"pickle")
    put(root / "text_encoder" / "generation_config.json", {})
    put(root / "tokenizer" / "tokenizer.json", {})
    put(root / "tokenizer" / "spiece.model", b"vocabulary")
    put(root / "tokenizer" / "special_tokens_map.json", {})
    put(root / "scheduler" / "scheduler_config.json", {})
    put(root / "vae" / "config.json", {})
    put(root / "vae" / f"{STEM}.safetensors", file_bytes([tensor("decoder.weight", "F32")]))
    put(root / "flux1-dev.safetensors", file_bytes([tensor("double_blocks.0.weight")]))
    put(root / "README.md", "# A model")
    put(root / ".gitattributes", "*.safetensors filter=lfs")
    return root


def hub_cache(root: Path, files: Mapping[str, bytes], revision: str = REVISION) -> Path:
    """The files as the hub's cache keeps them, blobs and a snapshot of links; returns the snapshot."""
    repo = root / "models--acme--tiny-dit"
    snapshot = repo / "snapshots" / revision
    for name, content in files.items():
        blob = put(repo / "blobs" / hashlib.sha256(content).hexdigest(), content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def tree(root: Path) -> dict[str, bytes]:
    """Relative name to content of every file below."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def wanted(tensors: Sequence[Tensor]) -> Seen:
    """What a reader must see of these."""
    return {each.name: (each.dtype, each.shape, each.data) for each in tensors}


def seen(component: Component) -> Seen:
    """What the component says, with the bytes read through its files."""
    found = {}
    for each in component.tensors.values():
        buffer = bytearray(each.nbytes)
        assert each.file.readinto(buffer, each.offset) == each.nbytes
        found[each.name] = (each.dtype, each.shape, bytes(buffer))
    return found
