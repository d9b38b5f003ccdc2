"""Views of a block's tensors inside a buffer of bytes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from dlo_cache import dtypes
from dlo_engine.errors import BadEntry
from dlo_engine.slots import DeviceMemory
from dlo_engine.specs import DTYPES, block_image
from fakes.block_images import block_image as image_of


class Stored(NamedTuple):
    """A tensor as an entry states it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def test_every_dtype_and_shape_comes_back_from_the_bytes() -> None:
    """Mixed types in one block, a 0-d tensor that stays 0-d and empty ones (case 11)."""
    tensors = {
        "weight": torch.randn(3, 5).to(torch.bfloat16),
        "table": torch.randn(1, 6),
        "scale": torch.tensor(0.25),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
        "none": torch.empty(0, 16),
        "count": torch.tensor(7),
    }
    image = image_of("blocks.0", tensors)
    buffer = DeviceMemory(torch.device("cpu")).allocate(image.nbytes, "slots")
    buffer.copy_(torch.frombuffer(bytearray(image.segments[0].data), dtype=torch.uint8))
    views = image.views(buffer)
    assert list(views) == list(tensors)
    for name, tensor in tensors.items():
        assert views[name].dtype == tensor.dtype
        assert views[name].shape == tensor.shape
        assert torch.equal(views[name].float(), tensor.float())
        if tensor.numel():
            assert views[name].data_ptr() % 256 == 0
            assert views[name].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_every_type_that_an_entry_may_hold_can_be_viewed() -> None:
    """What the builder accepts the engine must load: no word of the cache is unknown here, sizes agree."""
    assert {word: dtype.itemsize for word, dtype in DTYPES.items()} == {
        word: dtypes.itemsize(word) for word in dtypes.WORDS
    }


def test_names_are_those_within_the_block() -> None:
    """The block's name is cut off; the resident rest keeps full names."""
    stored = Stored("blocks.3.up.weight", "F32", (2,), 0, 8)
    assert block_image("blocks.3", memoryview(bytes(8)), [stored]).tensors[0].name == "up.weight"
    assert block_image("", memoryview(bytes(8)), [stored]).tensors[0].name == "blocks.3.up.weight"


@pytest.mark.parametrize(
    "stored",
    [
        Stored("blocks.3.w", "F4", (2,), 0, 2),
        Stored("blocks.3.w", "F32", (2,), 4, 8),
        Stored("blocks.3.w", "F32", (2,), -8, 8),
        Stored("blocks.3.w", "F32", (2,), 0, 4),
        Stored("blocks.33.w", "F32", (2,), 0, 8),
    ],
    ids=["dtype", "past-the-end", "before-the-start", "length", "other-block"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(stored: Stored) -> None:
    """Never a view past the end of the data, never a guess at a type."""
    with pytest.raises(BadEntry, match=stored.name):
        block_image("blocks.3", memoryview(bytes(8)), [stored])
