"""Canonical JSON and strict reading: one value, one text."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_cache.canonical import canonical_json, strict_json
from dlo_cache.errors import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def test_canonical_text() -> None:
    """Sorted keys, no white space, ASCII only."""
    assert (
        canonical_json({"b": [1, "ü\n"], "a": None, "é": True})
        == b'{"a":null,"b":[1,"\\u00fc\\n"],"\\u00e9":true}'
    )


@settings(derandomize=True, max_examples=200, deadline=None)
@given(VALUES)
def test_reads_back_and_is_its_own_canonical_form(value: Any) -> None:
    """The text of a value reads back to it and is ASCII."""
    text = canonical_json(value)
    assert text.isascii()
    assert strict_json(text, "value") == value
    assert canonical_json(strict_json(text, "value")) == text


@pytest.mark.parametrize("value", [1.5, [float("nan")], {"a": {"b": 0.0}}, {"a": b"x"}, {1, 2}])
def test_values_without_one_text_are_refused(value: Any) -> None:
    """Floating point numbers, bytes and sets have no canonical text."""
    with pytest.raises(Invalid):
        canonical_json(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a":1,"a":1}', "'a' stands twice"),
        (b'{"x":{"a":1,"b":2,"a":1}}', "'a' stands twice"),
        (b"[Infinity]", "Infinity"),
        (b"{", "no valid JSON"),
        (b"\xff\xfe{", "no valid JSON"),
        (b"[" * 200_000, "nested too deep"),
        ("[" + "9" * 5000 + "]", "no valid JSON"),
    ],
)
def test_strict_reading_names_what_is_wrong(text: bytes | str, words: str) -> None:
    """Whatever is wrong with a text, the error is ours and names the document."""
    with pytest.raises(Invalid, match=words) as caught:
        strict_json(text, "the file x")
    assert "the file x" in caught.value.message


def test_the_last_of_many_keys_that_stands_twice_is_named() -> None:
    """Finding it takes one pass: with one pass a key, this document of a stranger would hold us for hours."""
    keys = ",".join(f'"k{index}":1' for index in range(300_000))
    with pytest.raises(Invalid, match="key 'k299999' stands twice"):
        strict_json(f'{{{keys},"k299999":2}}', "it")
