"""Sizes: Kubernetes quantity strings to bytes and back. Pure.

Only what a size needs: no sign, no exponent, no fractions below one byte (`m`, `u`, `n`).
"""

from __future__ import annotations

import re
from fractions import Fraction

from dlo_api.errors import QuantityInvalid

#: What a size looks like; RE2 syntax, used in the CRD as it is.
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?$"
SIZE_MAX_LENGTH = 32

_LARGEST = 2**63 - 1
_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("k", "M", "G", "T", "P", "E")
_FACTOR: dict[str, int] = (
    {"": 1}
    | {word: 1024 ** (power + 1) for power, word in enumerate(_BINARY)}
    | {word: 1000 ** (power + 1) for power, word in enumerate(_DECIMAL)}
)


def parse_quantity(text: str) -> int:
    """Bytes of a size such as `64Gi`, `1.5G` or `4096`; a fraction of a byte counts as a whole one.

    Raises:
        QuantityInvalid: not a size, or more than 2**63 - 1 bytes.
    """
    if len(text) > SIZE_MAX_LENGTH or re.fullmatch(SIZE_PATTERN[1:-1], text, re.ASCII) is None:
        raise QuantityInvalid(
            f"{text[:SIZE_MAX_LENGTH]!r} is not a size", hint="write it like 64Gi, 500M or 4096"
        )
    number = text.rstrip("KMGTPEki")
    exact = Fraction(number) * _FACTOR[text[len(number) :]]
    size = -(-exact.numerator // exact.denominator)
    if size > _LARGEST:
        raise QuantityInvalid(f"{text!r} is more than 8Ei", hint="give a smaller size")
    return size


def format_quantity(size: int) -> str:
    """The shortest exact quantity of `size` bytes with binary suffixes: 68719476736 -> `64Gi`."""
    if size < 0:
        raise QuantityInvalid(f"{size} bytes is not a size", hint="a size is zero or more")
    power = 0
    while size and size % 1024 == 0 and power < len(_BINARY):
        size //= 1024
        power += 1
    return f"{size}{_BINARY[power - 1] if power else ''}"
