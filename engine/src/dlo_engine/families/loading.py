"""Loading the parts of a pipeline that do not stream: their type as stored, their memory aligned.

From safetensors only, from the folder only. Must not run code that a checkpoint brings or names, and must not
reach a network.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from dlo_cache.header import Header, parse_header
from torch import nn

from dlo_engine.errors import BadEntry
from dlo_engine.mapping import read_config
from dlo_engine.specs import DTYPES

ALIGNMENT = 64
# A whole set of weights by its one file or by its index; shards have numbers in their names.
_SET = re.compile(
    r"[A-Za-z_]+(?:\.(?P<single>\w+))?\.safetensors|[A-Za-z_]+\.safetensors\.index(?:\.(?P<index>\w+))?\.json"
)


def load_part(kind: Any, directory: Path, name: str, device: torch.device, **options: Any) -> Any:
    """The component `name` as its class `kind` loads it, in the type and variant that its files have.

    Raises BadEntry for one without weights and for a config that asks for code from a model hub.
    """
    folder = directory / name
    _refuse_hub_code(name, read_config(directory, name))
    part = kind.from_pretrained(
        folder,
        dtype=file_dtype(folder),
        variant=variant_of(folder),
        use_safetensors=True,
        local_files_only=True,
        **options,
    )
    part.eval().requires_grad_(False).to(device)
    realign(part)
    return part


def file_dtype(folder: Path) -> torch.dtype:
    """The floating type that most bytes of a component's weight files have. Reads headers only."""
    weights: Counter[torch.dtype] = Counter()
    for path in sorted(folder.rglob("*.safetensors")):
        for tensor in _header(path).tensors:
            dtype = DTYPES.get(tensor.dtype)
            if dtype is not None and dtype.is_floating_point:
                weights[dtype] += tensor.nbytes
    if not weights:
        raise BadEntry(f"Component folder {folder.name} has no weights", hint="build the Files entry again")
    return weights.most_common(1)[0][0]


def variant_of(folder: Path) -> str | None:
    """The variant of a component's weights ("fp16" of `model.fp16.safetensors`), None for a plain set."""
    sets = [found for path in sorted(folder.iterdir()) if (found := _SET.fullmatch(path.name))]
    variants = {found["single"] or found["index"] for found in sets}
    return None if None in variants else min(variants, default=None)


def realign(module: nn.Module) -> None:
    """Give every parameter whose memory is not aligned memory of its own.

    A loader may leave parameters as views into a file at any offset, and kernels are chosen by pointer
    alignment: the same weights would give other last bits.
    """
    for parameter in module.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def _header(path: Path) -> Header:
    with path.open("rb") as stream:
        fd = stream.fileno()
        size = os.fstat(fd).st_size
        return parse_header(lambda offset, length: os.pread(fd, length, offset), size, path.name)


def _refuse_hub_code(name: str, config: Any) -> None:
    """Transformers takes the name of an implementation with a slash for a repository of code to run."""
    if isinstance(config, dict):
        for key, value in config.items():
            if key.endswith("_implementation") and "/" in str(value):
                raise BadEntry(
                    f"{name}/config.json asks for code from a model hub: {key} is {str(value)[:100]!r}",
                    hint=f"take {key} out of it, or get the checkpoint from its origin",
                )
            _refuse_hub_code(name, value)
