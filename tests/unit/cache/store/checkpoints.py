"""A checkpoint in memory with every kind of tensor the builder must treat in its own way, and its layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dlo_cache.dtypes import numpy_dtype, word_of
from dlo_cache.layout import BlockGroup, Layout, Role, Rule, Section
from dlo_cache.source import Component, SourceFile, SourceTensor
from numpy.typing import NDArray

Array = NDArray[Any]
HEADS = 4
WIDTH = 32


@dataclass(frozen=True)
class MemoryFile:
    """A source file held in memory; ``on_read`` is called before every read."""

    name: str
    data: bytes
    on_read: Callable[[], None] | None = field(default=None, compare=False)
    claimed_sha256: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.data)

    @property
    def sha256(self) -> str:
        """The digest that the file claims to have: by default the true one."""
        return self.claimed_sha256 or hashlib.sha256(self.data).hexdigest()

    def readinto(self, buffer: memoryview | bytearray, offset: int) -> int:
        """Fills ``buffer`` from ``offset`` as far as there is anything."""
        if self.on_read is not None:
            self.on_read()
        view = memoryview(buffer)
        part = self.data[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)


def layout() -> Layout:
    """Column, row, fused, gathered and replicated rules over two groups of blocks."""
    return Layout(
        id="tiny-1",
        architecture="TinyTransformer",
        groups=(BlockGroup("blocks"), BlockGroup("single")),
        rules=(
            Rule("*.*.q.weight", Role.COLUMN, heads="heads"),
            Rule("*.*.q.bias", Role.COLUMN, heads="heads"),
            Rule("*.*.qkv.weight", Role.COLUMN, sections=(Section(share=1),) * 3),
            Rule("*.*.out.weight", Role.ROW),
            Rule("*.*.out.bias", Role.REPLICATED),
            Rule("*.*.fused.weight", Role.ROW, sections=(Section(share=1), Section(share=4))),
            Rule("*.*.mod.weight", Role.COLUMN_GATHERED),
            Rule("*.*.scale", Role.REPLICATED),
            Rule("*.*.none", Role.REPLICATED),
            Rule("embed.*", Role.REPLICATED),
            Rule("steps", Role.REPLICATED),
        ),
        keep_fp32=("**.out.bias",),
    )


def arrays(blocks: int = 2, seed: int = 0) -> dict[str, Array]:
    """Named tensors of a tiny model: several dtypes, a fused one, one of no elements, one of no
    dimensions."""
    random = np.random.default_rng(seed)
    bf16, fp8 = numpy_dtype("BF16"), numpy_dtype("F8_E4M3")

    def normal(*shape: int) -> Array:
        return np.asarray(random.standard_normal(shape, np.float32))

    found: dict[str, Array] = {"embed.weight": normal(10, WIDTH).astype(bf16)}
    for block in range(blocks):
        found |= {
            f"blocks.{block}.q.weight": normal(WIDTH, WIDTH).astype(bf16),
            f"blocks.{block}.q.bias": normal(WIDTH).astype(bf16),
            f"blocks.{block}.qkv.weight": normal(3 * WIDTH, WIDTH).astype(bf16),
            f"blocks.{block}.out.weight": normal(WIDTH, WIDTH).astype(fp8),
            f"blocks.{block}.out.bias": normal(WIDTH),
            f"blocks.{block}.scale": normal(),
            f"blocks.{block}.none": normal(0, 16),
            f"blocks.{block}.mod.weight": normal(6 * WIDTH, WIDTH).astype(bf16),
        }
    found["single.0.fused.weight"] = normal(WIDTH, 5 * WIDTH).astype(bf16)
    found["steps"] = np.arange(7, dtype=np.int64)
    return found


def component(
    tensors: Mapping[str, Array] | None = None,
    *,
    shards: int = 2,
    name: str = "transformer",
    on_read: Callable[[], None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Component:
    """A component that holds ``tensors`` spread over ``shards`` safetensors files, in order."""
    tensors = arrays() if tensors is None else tensors
    config = {"heads": HEADS} if config is None else config
    names = list(tensors)
    weights: list[MemoryFile] = []
    found: dict[str, SourceTensor] = {}
    per_shard = -(-len(names) // shards)
    for shard in range(shards):
        part = {key: tensors[key] for key in names[shard * per_shard : (shard + 1) * per_shard]}
        file = shard_file(f"{name}/model-{shard + 1}.safetensors", part, on_read)
        weights.append(file)
        found |= _located(file, part)
    files: tuple[SourceFile, ...] = (
        MemoryFile(f"{name}/config.json", json.dumps(dict(config)).encode()),
        *weights,
    )
    return Component(name, "diffusers", "TinyTransformer", config, files, tuple(weights), found)


def shard_file(name: str, part: Mapping[str, Array], on_read: Callable[[], None] | None = None) -> MemoryFile:
    """A plain safetensors file of ``part``, written by hand."""
    header: dict[str, Any] = {}
    at = 0
    for key, array in part.items():
        header[key] = {
            "dtype": word_of(array.dtype),
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in part.values())
    return MemoryFile(name, len(text).to_bytes(8, "little") + text + data, on_read)


def _located(file: MemoryFile, part: Mapping[str, Array]) -> dict[str, SourceTensor]:
    at = 8 + int.from_bytes(file.data[:8], "little")
    found = {}
    for key, array in part.items():
        found[key] = SourceTensor(key, file, word_of(array.dtype), array.shape, at, array.nbytes)
        at += array.nbytes
    return found


def expected(tensors: Mapping[str, Array], size: int, rank: int) -> dict[str, Array]:
    """What coordinate ``rank`` of ``size`` must hold, cut with plain numpy and no help of the code under
    test."""
    return {name: _expected(name, array, size, rank) for name, array in tensors.items()}


def _expected(name: str, array: Array, size: int, rank: int) -> Array:
    leaf = name.split(".", 2)[-1]
    if leaf in ("q.weight", "q.bias", "mod.weight"):
        return np.split(array, size, axis=0)[rank]
    if leaf == "out.weight":
        return np.split(array, size, axis=1)[rank]
    if leaf == "qkv.weight":
        return np.concatenate([np.split(part, size, axis=0)[rank] for part in np.split(array, 3, axis=0)])
    if leaf == "fused.weight":
        parts = np.split(array, [array.shape[1] // 5], axis=1)
        return np.concatenate([np.split(part, size, axis=1)[rank] for part in parts], axis=1)
    return array
