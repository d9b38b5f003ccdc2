"""Keys of entries: what changes bytes changes the name, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from dlo_cache.errors import Invalid
from dlo_cache.keys import files_key, key_of, layout_key
from unit.cache.format.entries import Digested

FILES = [
    Digested("transformer/config.json", 3, "a" * 64),
    Digested("transformer/model.safetensors", 9, "b" * 64),
]
ASKED: dict[str, Any] = {
    "component": "transformer",
    "layout_id": "flux-1",
    "layout_digest": "c" * 64,
    "dtype": "Source",
    "quantization": "None",
    "tensor_size": 2,
    "tensor_rank": 0,
}


def test_the_layout_key_is_part_of_the_format() -> None:
    """Preimage and key of one entry, field by field: a change of either rebuilds every cache."""
    key, preimage = layout_key(reversed(FILES), **ASKED)
    assert preimage == {
        "formatVersion": 1,
        "kind": "Layout",
        "files": [
            {"name": "transformer/config.json", "size": 3, "sha256": "a" * 64},
            {"name": "transformer/model.safetensors", "size": 9, "sha256": "b" * 64},
        ],
        "component": "transformer",
        "layout": {"id": "flux-1", "digest": "c" * 64},
        "dtype": "Source",
        "quantization": "None",
        "tensorSize": 2,
        "tensorRank": 0,
    }
    assert key == key_of(preimage) == "ee40e4ce56083e0b337d0a007dbbf230ebff2627879da4e91033eaec17f97411"


def test_the_files_key_is_part_of_the_format() -> None:
    """Kind Files knows names, sizes and digests and nothing of components."""
    key, preimage = files_key(FILES)
    assert preimage.keys() == {"formatVersion", "kind", "files"}
    assert key == "1f5ec35580ebfc8db264e7bcf3966f83a430e022de4c6eb7524b185b2870d5ea"


@pytest.mark.parametrize(
    "change",
    [
        {"component": "transformer_2"},
        {"layout_id": "flux-2"},
        {"layout_digest": "d" * 64},
        {"dtype": "bfloat16"},
        {"quantization": "Fp8PerTensor"},
        {"tensor_size": 4},
        {"tensor_rank": 1},
    ],
)
def test_whatever_changes_bytes_changes_the_key(change: dict[str, Any]) -> None:
    """Each field of the question counts."""
    assert layout_key(FILES, **{**ASKED, **change})[0] != layout_key(FILES, **ASKED)[0]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("change", [("name", "transformer/x"), ("size", 4), ("sha256", "e" * 64)])
def test_every_file_counts(at: int, change: tuple[str, Any]) -> None:
    """A name, a size or a digest of any file."""
    changed = list(FILES)
    changed[at] = Digested(**{**vars(FILES[at]), change[0]: change[1]})
    assert layout_key(changed, **ASKED)[0] != layout_key(FILES, **ASKED)[0]
    assert files_key(changed)[0] != files_key(FILES)[0]


def test_the_order_of_files_does_not_count() -> None:
    """A folder has no order."""
    assert layout_key(FILES, **ASKED) == layout_key(FILES[::-1], **ASKED)
    assert files_key(FILES) == files_key(FILES[::-1])


@pytest.mark.parametrize("sha256", [None, "", "A" * 64, "a" * 63, "z" * 64])
def test_a_file_without_digest_is_refused(sha256: str | None) -> None:
    """An entry is never named by bytes nobody has hashed; the file is named."""
    with pytest.raises(Invalid, match="weights"):
        files_key([Digested("weights", 1, sha256)])


@pytest.mark.parametrize(
    ("files", "change"),
    [
        ([], {}),
        ([FILES[0], FILES[0]], {}),
        (FILES, {"dtype": "bf16"}),
        (FILES, {"quantization": "Int4"}),
        (FILES, {"tensor_rank": 2}),
        (FILES, {"tensor_rank": -1}),
    ],
)
def test_questions_without_an_answer_are_refused(files: list[Digested], change: dict[str, Any]) -> None:
    """No files, a file twice, unknown words, a rank that is none."""
    with pytest.raises(Invalid):
        layout_key(files, **{**ASKED, **change})
