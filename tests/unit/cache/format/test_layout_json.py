"""Layouts as users write them: every slip is named, and equal layouts have equal digests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dlo_cache.errors import Invalid
from dlo_cache.layout import Layout, Role

GOOD: dict[str, Any] = {
    "id": "acme-1",
    "architecture": "AcmeTransformer",
    "groups": ["transformer_blocks"],
    "rules": [
        {"pattern": "transformer_blocks.*.attn.to_qkv.weight", "role": "column",
         "sections": [{"size": 64, "heads": 8}, {"share": 1, "heads": "kv_heads"}, {"share": 1}]},
        {"pattern": "transformer_blocks.*.ff.weight", "role": "row", "heads": "num_heads"},
        {"pattern": "**", "role": "replicated"},
    ],
    "keepFp32": ["**.scale_shift_table"],
}  # fmt: skip


def with_change(path: list[str | int], value: object) -> str:
    """The good layout with one place changed."""
    document = json.loads(json.dumps(GOOD))
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(document)


def test_reads_and_writes_back() -> None:
    """What is read is what stands there, and the canonical text reads back to the same layout."""
    layout = Layout.from_json(json.dumps(GOOD, indent=3))
    assert layout.rules[0].role is Role.COLUMN
    assert layout.rules[0].sections[0] == (None, 64, 8)
    assert layout.rules[1].heads == "num_heads"
    assert layout.keep_fp32 == ("**.scale_shift_table",)
    assert json.loads(layout.to_json()) == GOOD
    assert Layout.from_json(layout.to_json()) == layout


def test_the_digest_is_that_of_the_meaning() -> None:
    """White space and key order do not count; any change of a rule does. The digest is part of the format."""
    layout = Layout.from_json(json.dumps(GOOD))
    assert layout.digest == Layout.from_json(json.dumps(dict(reversed(GOOD.items())), indent=1)).digest
    assert layout.digest == "2cfe86241206bc314d1afb6080f6f53c3d210c560b7bb802b59e4f13a816c3ea"
    assert layout.digest != Layout.from_json(with_change(["rules", 1, "role"], "column")).digest
    assert layout.digest != Layout.from_json(with_change(["rules", 0, "sections", 0, "size"], 32)).digest


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["keepfp32"], [], "unknown key 'keepfp32' (did you mean 'keepFp32'?)"),
        (["rules", 1, "head"], 3, "rules[1]: unknown key 'head' (did you mean 'heads'?)"),
        (["rules", 0, "sections", 1, "Share"], 3, "rules[0].sections[1]: unknown key 'Share'"),
        (["rules", 1, "role"], "colum", "rules[1]: unknown role 'colum' (did you mean 'column'?)"),
        (["rules", 1, "role"], 3, "rules[1].role is 3, not text"),
        (["rules", 1, "heads"], 1.5, "rules[1].heads is 1.5"),
        (["rules", 1, "heads"], True, "rules[1].heads is True"),
        (["rules", 0, "sections", 0, "size"], "64", "rules[0].sections[0].size is '64'"),
        (["rules", 0, "sections"], {}, "rules[0].sections is not a list"),
        (["rules", 0, "pattern"], "a.b*", "a star stands for a whole segment"),
        (["rules", 0], "x", "rules[0] is not an object"),
        (["rules"], {}, "rules is not a list"),
        (["groups"], "transformer_blocks", "groups is not a list"),
        (["groups", 0], 3, "groups is 3, not text"),
        (["id"], "a/b", "not a plain name"),
        (["architecture"], "", "not a plain name"),
    ],
)
def test_slips_are_named(path: list[str | int], value: object, words: str) -> None:
    """The error says which place and, for words, the nearest one that exists."""
    with pytest.raises(Invalid) as caught:
        Layout.from_json(with_change(path, value))
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["id", "architecture", "groups", "rules"])
def test_missing_keys_are_named(key: str) -> None:
    """Nothing but keepFp32 may be left out."""
    with pytest.raises(Invalid, match=f"key '{key}' is missing"):
        Layout.from_json(json.dumps({name: value for name, value in GOOD.items() if name != key}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no valid JSON"),
        ("[]", "layout is not an object"),
        ('{"id":"a","id":"b"}', "key 'id' stands twice"),
        (b"\xff", "no valid JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"id": NaN}', "NaN"),
    ],
)
def test_what_is_no_layout_at_all(text: str | bytes, words: str) -> None:
    """Broken JSON, a key twice, a list."""
    with pytest.raises(Invalid, match=words):
        Layout.from_json(text)
