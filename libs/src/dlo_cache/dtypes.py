"""The dtype words of safetensors headers, their numpy types, and casts between them.

Pure: values in, values out. Every word here stores whole bytes; those that pack several elements into one
byte are unknown on purpose, because such a tensor cannot be cut at element boundaries.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from dlo_cache.errors import Invalid

_NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "C64": np.dtype(np.complex64),
}
_WORDS: Final[dict[np.dtype[Any], str]] = {dtype: word for word, dtype in _NUMPY.items()}
_FLOATING: Final = frozenset(word for word in _NUMPY if word.startswith(("F", "BF")))

WORDS: Final = frozenset(_NUMPY)
SOURCE: Final = "Source"
_POLICY_WORDS: Final[dict[str, str]] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
POLICIES: Final = (SOURCE, *_POLICY_WORDS)
_CAST_TARGETS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_LARGEST_E4M3: Final = 448.0


def numpy_dtype(word: str) -> np.dtype[Any]:
    """The numpy type of a header's dtype word; raises Invalid for a word that is not known."""
    try:
        return _NUMPY[word]
    except KeyError:
        raise Invalid(
            f"unknown dtype {word!r}", hint=f"known are {', '.join(sorted(_NUMPY))}", dtype=word
        ) from None


def word_of(dtype: np.dtype[Any]) -> str:
    """The header's word for a numpy type; raises Invalid if there is none."""
    try:
        return _WORDS[dtype]
    except KeyError:
        raise Invalid(f"numpy type {dtype} has no safetensors dtype", dtype=str(dtype)) from None


def itemsize(word: str) -> int:
    """Bytes of one element."""
    return numpy_dtype(word).itemsize


def is_floating(word: str) -> bool:
    """Whether a dtype policy casts tensors of this word: real floating types, fp8 among them."""
    return word in _FLOATING


def target_dtype(policy: str, word: str, keep_fp32: bool) -> str:
    """The dtype word that a tensor of dtype ``word`` gets under ``policy``.

    ``Source`` changes nothing. Other policies cast floating tensors, to float32 where the layout says
    ``keepFp32``.
    """
    if policy not in POLICIES:
        raise Invalid(
            f"unknown dtype policy {policy!r}", hint=f"use one of {', '.join(POLICIES)}", policy=policy
        )
    numpy_dtype(word)
    if policy == SOURCE or not is_floating(word):
        return word
    return "F32" if keep_fp32 else _POLICY_WORDS[policy]


def cast(array: np.ndarray[Any, Any], to_word: str) -> np.ndarray[Any, Any]:
    """``array`` in the dtype ``to_word``, rounded to nearest even as torch does; the same array if it has
    it already.

    Out of range becomes infinity, except for E4M3, which has none: there it becomes the largest finite
    value. NaN stays NaN. Raises Invalid for anything but a cast between floating types.
    """
    from_word, target = word_of(array.dtype), numpy_dtype(to_word)
    if from_word == to_word:
        return array
    if not is_floating(from_word) or to_word not in _CAST_TARGETS:
        raise Invalid(f"no cast from {from_word} to {to_word}", dtype=from_word)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        narrow = array.astype(np.float32) if from_word == "F64" else array  # as torch does, rounding twice
        if to_word == "F8_E4M3":
            narrow = np.clip(narrow.astype(np.float32), -_LARGEST_E4M3, _LARGEST_E4M3)
        return narrow.astype(target)
