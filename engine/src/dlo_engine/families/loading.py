"""Loading the parts of a pipeline that do not stream: their type as stored, their memory aligned."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from dlo_engine.errors import BadEntry
from dlo_engine.specs import DTYPES

ALIGNMENT = 64
_LENGTH_BYTES = 8


def file_dtype(folder: Path) -> torch.dtype:
    """The floating type that most bytes of a component's weight files have. Reads headers only."""
    weights: Counter[torch.dtype] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            dtype = DTYPES.get(tensor.get("dtype", "")) if name != "__metadata__" else None
            if dtype is not None and dtype.is_floating_point:
                begin, end = tensor["data_offsets"]
                weights[dtype] += end - begin
    if not weights:
        raise BadEntry(f"Component folder {folder.name} has no weights", hint="build the Files entry again")
    return weights.most_common(1)[0][0]


def realign(module: nn.Module) -> None:
    """Give every parameter whose memory is not aligned memory of its own.

    A loader may leave parameters as views into a file at any offset, and kernels are chosen by pointer
    alignment: the same weights would give other last bits.
    """
    for parameter in module.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()
