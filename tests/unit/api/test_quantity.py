"""Sizes as quantity strings."""

from __future__ import annotations

import pytest
import re2  # type: ignore[import-untyped]
from dlo_api.errors import QuantityInvalid
from dlo_api.quantity import SIZE_PATTERN, format_quantity, parse_quantity
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1000),
        ("1Ki", 1024),
        ("64Gi", 64 * 2**30),
        ("1.5G", 1_500_000_000),
        ("0.5Ki", 512),
        ("0.3", 1),
        ("0.1Ki", 103),
        ("7Ei", 7 * 2**60),
        ("9E", 9 * 10**18),
        ("00012M", 12_000_000),
    ],
)
def test_parse(text: str, size: int) -> None:
    """Whole bytes, rounded up."""
    assert parse_quantity(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Gi",
        "64GB",
        "64gi",
        "-1Gi",
        "+1",
        "1e3",
        "1m",
        ".5Gi",
        "1.Gi",
        "1 Gi",
        "1Gi\n",
        "8Ei",
        "९Gi",
        "1" * 40,
        "1KI",
    ],
)
def test_what_is_not_a_size(text: str) -> None:
    """Signs, exponents, other suffixes, other digits, and more than 2**63 - 1."""
    with pytest.raises(QuantityInvalid) as caught:
        parse_quantity(text)
    assert caught.value.code == "QuantityInvalid"
    assert caught.value.hint


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_format_is_exact_and_accepted(size: int) -> None:
    """What is written is read back, and the schema's pattern takes it."""
    text = format_quantity(size)
    assert parse_quantity(text) == size
    assert re2.fullmatch(SIZE_PATTERN, text)


def test_format_refuses_negative_sizes() -> None:
    """There is no such size."""
    with pytest.raises(QuantityInvalid):
        format_quantity(-1)
