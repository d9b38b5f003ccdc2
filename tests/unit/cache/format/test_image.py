"""Block images: ordinary safetensors files whose data section is byte for byte a device slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dlo_cache.dtypes import WORDS
from dlo_cache.errors import Invalid
from dlo_cache.header import ALIGNMENT, PAGE, parse_header, render_image_header, tensor_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from unit.cache.format.entries import BLOCK, Shaped, tensor_data

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def image(tensors: list[Shaped] | tuple[Shaped, ...]) -> bytes:
    """A whole image with bytes that belong to the names."""
    header, placements = render_image_header(tensors)
    return header + b"".join(
        bytes(placed.nbytes) if placed.is_pad else tensor_data(placed.name, placed.nbytes)
        for placed in placements
    )


def test_any_library_can_read_it() -> None:
    """The safetensors library opens an image and finds every tensor, and the fillers zero."""
    data = image(BLOCK)
    tensors = load(data)
    assert list(tensors["scale"].shape) == []
    assert list(tensors["nothing"].shape) == [0, 16]
    assert tensors["weight"].dtype == torch.bfloat16
    for tensor in BLOCK:
        if tensor.shape and 0 not in tensor.shape:
            raw = tensors[tensor.name].contiguous().view(torch.uint8).numpy().tobytes()
            assert raw == tensor_data(tensor.name, len(raw))
    fillers = [name for name in tensors if name.startswith("__dlo_pad.")]
    assert fillers
    assert not any(tensors[name].any() for name in fillers)


def test_order_is_the_given_one() -> None:
    """Neither names nor sizes change the order."""
    _, placements = render_image_header(BLOCK)
    assert [placed.name for placed in placements if not placed.is_pad] == [tensor.name for tensor in BLOCK]


def test_equal_input_gives_equal_bytes() -> None:
    """Nothing of the time or the process is in an image; this digest is part of format version 1."""
    header, _ = render_image_header(BLOCK)
    assert header == render_image_header(list(BLOCK))[0]
    assert header[8:].rstrip(b" ") == (
        b'{"__metadata__":{"format":"pt"},'
        b'"weight":{"dtype":"BF16","shape":[16,33],"data_offsets":[0,1056]},'
        b'"__dlo_pad.0":{"dtype":"U8","shape":[224],"data_offsets":[1056,1280]},'
        b'"scale":{"dtype":"F32","shape":[],"data_offsets":[1280,1284]},'
        b'"__dlo_pad.1":{"dtype":"U8","shape":[252],"data_offsets":[1284,1536]},'
        b'"nothing":{"dtype":"F32","shape":[0,16],"data_offsets":[1536,1536]},'
        b'"island":{"dtype":"F32","shape":[1,6,16],"data_offsets":[1536,1920]},'
        b'"__dlo_pad.2":{"dtype":"U8","shape":[128],"data_offsets":[1920,2048]},'
        b'"quantised":{"dtype":"F8_E4M3","shape":[5],"data_offsets":[2048,2053]}}'
    )


@pytest.mark.parametrize("count", [0, 1, 40, 200])
def test_the_data_section_starts_at_a_page(count: int) -> None:
    """Whatever the header's length, exactly up to the next page and no page more."""
    header, _ = render_image_header([Shaped(f"tensor.{at}", "U8", (1,)) for at in range(count)])
    assert len(header) % PAGE == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert len(header) - len(header.rstrip(b" ")) < PAGE


@pytest.mark.parametrize("name", ["__metadata__", "__dlo_pad.0", "__dlo_pad.x"])
def test_names_of_the_format_are_refused(name: str) -> None:
    """A checkpoint cannot bring in fillers of its own."""
    with pytest.raises(Invalid, match=name):
        render_image_header([Shaped(name, "U8", (1,))])


def test_a_name_twice_is_refused() -> None:
    """Two tensors of one name make no image."""
    with pytest.raises(Invalid, match="twice"):
        render_image_header([Shaped("a", "U8", (1,)), Shaped("a", "U8", (2,))])


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(WORDS - {"F8_E8M0"})), SHAPES), max_size=12))
def test_every_image_keeps_its_promises(shaped: list[tuple[str, tuple[int, ...]]]) -> None:
    """Alignment, order, tiling and the reader's agreement, for any dtypes and shapes."""
    tensors = [Shaped(f"t.{at}", dtype, shape) for at, (dtype, shape) in enumerate(shaped)]
    data = image(tensors)
    header = parse_header(lambda offset, length: data[offset : offset + length], len(data), "x")
    assert header.data_offset % PAGE == 0
    found = [tensor for tensor in header.tensors if not tensor.is_pad]
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in found] == [
        (tensor.name, tensor.dtype, tensor.shape) for tensor in tensors
    ]
    for tensor in found:
        assert tensor.begin % ALIGNMENT == 0
        assert tensor.nbytes == tensor_bytes(tensor.dtype, tensor.shape)
    assert all(
        tensor.dtype == "U8" and tensor.nbytes < ALIGNMENT for tensor in header.tensors if tensor.is_pad
    )
    load(data)


def test_a_float32_tensor_is_aligned_for_any_kernel() -> None:
    """The address of each tensor in a page-aligned buffer is a multiple of 256."""
    data = image(BLOCK)
    header = parse_header(lambda offset, length: data[offset : offset + length], len(data), "x")
    buffer = np.zeros(header.data_bytes + PAGE, np.uint8)
    start = -buffer.ctypes.data % PAGE
    assert all(
        (buffer.ctypes.data + start + tensor.begin) % 256 == 0
        for tensor in header.tensors
        if not tensor.is_pad
    )
