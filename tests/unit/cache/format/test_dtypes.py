"""Dtype words and casts: the same values as torch gives, for every bit pattern of the narrow types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dlo_cache.dtypes import WORDS, cast, is_floating, itemsize, numpy_dtype, target_dtype, word_of
from dlo_cache.errors import Invalid
from numpy.typing import NDArray

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NARROW = ("BF16", "F16", "F8_E4M3", "F8_E5M2")


def every_pattern(word: str) -> NDArray[np.uint8]:
    """All bit patterns of a type of one or two bytes, as bytes."""
    kind = np.uint8 if itemsize(word) == 1 else np.uint16
    return np.arange(2 ** (8 * itemsize(word)), dtype=np.uint32).astype(kind).view(np.uint8)


def awkward_floats(word: str) -> NDArray[np.uint8]:
    """Values around every rounding and range limit, and a sample of all others, as bytes."""
    random = np.random.default_rng(5)
    edges = [
        0.0,
        448.0,
        463.9,
        464.0,
        465.0,
        480.0,
        57344.0,
        61439.0,
        61440.0,
        65504.0,
        65519.9,
        65520.0,
        3.3e38,
        1e-45,
    ]
    edges += [
        2.0**-9,
        2.0**-10,
        1.5 * 2.0**-10,
        2.0**-16,
        2.0**-17,
        2.0**-24,
        2.0**-25,
        1e-38,
        np.inf,
        np.nan,
    ]
    values = np.array([sign * edge for edge in edges for sign in (1, -1)])
    values = np.concatenate([values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf)])
    with np.errstate(over="ignore"):
        listed = values.astype(numpy_dtype(word))
    sample = random.integers(0, 2**32, 200_000 * itemsize(word) // 4, np.uint32).view(np.uint8)
    return np.concatenate([listed.view(np.uint8), sample])


def same_values(ours: NDArray[Any], theirs: torch.Tensor) -> bool:
    """Bit for bit, except that any NaN equals any other."""
    raw = theirs.contiguous().view(torch.uint8).numpy()
    with np.errstate(invalid="ignore"):
        ours_nan = np.isnan(ours.astype(np.float64))
    theirs_nan = theirs.double().isnan().numpy()
    bits = ours.view(np.uint8).reshape(-1, ours.itemsize) == raw.reshape(-1, ours.itemsize)
    return bool((ours_nan == theirs_nan).all() and (bits.all(axis=1) | ours_nan).all())


@pytest.mark.parametrize("target", [*NARROW, "F32"])
@pytest.mark.parametrize("word", NARROW)
def test_casts_equal_torch_on_every_bit_pattern(word: str, target: str) -> None:
    """From each of the narrow types to each type a policy or quantisation may ask for."""
    raw = every_pattern(word)
    ours = cast(raw.view(numpy_dtype(word)), target)
    theirs = torch.from_numpy(raw.copy()).view(TORCH[word]).to(TORCH[target])
    assert word_of(ours.dtype) == target
    assert same_values(ours, theirs)


@pytest.mark.parametrize("target", [*NARROW, "F32"])
@pytest.mark.parametrize("word", ["F32", "F64"])
def test_casts_from_wide_types_equal_torch(word: str, target: str) -> None:
    """Ties, limits, subnormals, infinities and a large sample."""
    raw = awkward_floats(word)
    ours = cast(raw.view(numpy_dtype(word)), target)
    theirs = torch.from_numpy(raw.copy()).view(TORCH[word]).to(TORCH[target])
    assert same_values(ours, theirs)


def test_e4m3_saturates_and_keeps_nan() -> None:
    """E4M3 has no infinity: what is too large becomes the largest value, NaN stays NaN."""
    out = cast(np.array([1e9, -1e9, np.inf, -np.inf, np.nan, 464.0], np.float32), "F8_E4M3").astype(
        np.float32
    )
    assert out[:4].tolist() == [448.0, -448.0, 448.0, -448.0]
    assert np.isnan(out[4])
    assert out[5] == 448.0


def test_a_cast_to_the_same_word_is_the_same_array() -> None:
    """Nothing is copied where nothing changes."""
    array = np.zeros(3, numpy_dtype("BF16"))
    assert cast(array, "BF16") is array


def test_a_cast_keeps_the_shape() -> None:
    """0-d, empty and transposed arrays too."""
    for array in (np.zeros((), np.float32), np.zeros((0, 4), np.float32), np.ones((3, 5), np.float32).T):
        assert cast(array, "BF16").shape == array.shape


@pytest.mark.parametrize(
    ("word", "target"), [("I64", "F32"), ("F32", "I64"), ("BOOL", "BF16"), ("F32", "F8_E8M0")]
)
def test_only_floating_types_are_cast(word: str, target: str) -> None:
    """An index or a mask never becomes a number of another kind."""
    with pytest.raises(Invalid, match=target):
        cast(np.zeros(2, numpy_dtype(word)), target)


@pytest.mark.parametrize("word", sorted(WORDS))
def test_words_and_numpy_types_belong_together(word: str) -> None:
    """Each word leads to one type and back, and its size is whole bytes."""
    assert word_of(numpy_dtype(word)) == word
    assert itemsize(word) >= 1


def test_words_know_their_torch_size() -> None:
    """The element sizes are torch's."""
    assert {word: itemsize(word) for word in TORCH} == {word: dtype.itemsize for word, dtype in TORCH.items()}


@pytest.mark.parametrize("word", ["F4", "F6_E2M3", "bfloat16", ""])
def test_unknown_words_are_refused(word: str) -> None:
    """A packed or misspelt dtype is named."""
    with pytest.raises(Invalid, match="unknown dtype"):
        numpy_dtype(word)


@pytest.mark.parametrize(
    ("policy", "word", "keep_fp32", "wanted"),
    [
        ("Source", "F8_E4M3", False, "F8_E4M3"),
        ("Source", "BF16", True, "BF16"),
        ("bfloat16", "F32", False, "BF16"),
        ("bfloat16", "F32", True, "F32"),
        ("bfloat16", "BF16", True, "F32"),
        ("float16", "BF16", False, "F16"),
        ("float32", "F16", False, "F32"),
        ("bfloat16", "F8_E4M3", False, "BF16"),
        ("bfloat16", "I64", False, "I64"),
        ("bfloat16", "I64", True, "I64"),
        ("float16", "BOOL", False, "BOOL"),
        ("float16", "C64", False, "C64"),
    ],
)
def test_policy(policy: str, word: str, keep_fp32: bool, wanted: str) -> None:
    """Source changes nothing; other policies cast what is floating, and to float32 what the layout keeps."""
    assert target_dtype(policy, word, keep_fp32) == wanted


def test_unknown_policies_are_refused() -> None:
    """A policy is one of four words."""
    with pytest.raises(Invalid, match="bf16"):
        target_dtype("bf16", "F32", False)


def test_floating_is_what_torch_calls_floating() -> None:
    """Torch's own answer for each type that torch has."""
    assert {word: is_floating(word) for word in TORCH} == {
        word: dtype.is_floating_point for word, dtype in TORCH.items()
    }
    assert not is_floating("I32")
    assert not is_floating("C64")
