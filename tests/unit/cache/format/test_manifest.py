"""Manifests: one text for one entry, and no text that contradicts itself is believed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from dlo_cache.canonical import canonical_json
from dlo_cache.errors import Corrupt, Invalid, NewerFormat
from dlo_cache.keys import key_of
from dlo_cache.manifest import FileRecord, Manifest, block_file_name, content_digest, file_digest
from unit.cache.format.entries import write_files_entry, write_layout_entry

Document = dict[str, Any]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """The manifest of a hand-made entry."""
    return write_layout_entry(tmp_path / "entry")


def test_reads_back(manifest: Manifest, tmp_path: Path) -> None:
    """Bytes to manifest to bytes, for both kinds."""
    files = write_files_entry(tmp_path / "files", {"model_index.json": b"{}", "vae/config.json": b"{ }"})
    for each in (manifest, files):
        assert Manifest.from_bytes(each.to_bytes()) == each
        assert Manifest.from_bytes(each.to_bytes()).to_bytes() == each.to_bytes()
    assert manifest.kind == "Layout"
    assert manifest.component == "transformer"
    assert manifest.coordinate == (1, 2)
    assert (files.kind, files.component, files.coordinate) == ("Files", None, None)


def test_the_text_is_canonical_and_has_the_fields_of_the_format(manifest: Manifest) -> None:
    """Field names are part of the format; nothing tells when, where or by whom it was built."""
    document = json.loads(manifest.to_bytes())
    assert manifest.to_bytes() == canonical_json(document)
    top = "formatVersion inputKey preimage files tensors totalBytes contentDigest"
    assert document.keys() == set(top.split())
    assert document["files"][0].keys() == {"name", "group", "bytes", "dataOffset", "digest"}
    fields = "name dtype shape file offset bytes digest sourceName sourceFile role"
    assert document["tensors"][0].keys() == set(fields.split())
    assert [file["group"] for file in document["files"]] == ["blocks.0", "blocks.1", "single.0", None]
    assert document["totalBytes"] == sum(file["bytes"] for file in document["files"])


def test_equal_entries_have_equal_manifests_wherever_and_whenever_built(tmp_path: Path) -> None:
    """Two builds, in two places and under two umasks, differ in no byte of manifest or data."""
    first = write_layout_entry(tmp_path / "a")
    before = os.umask(0o077)
    try:
        second = write_layout_entry(tmp_path / "deep" / "er" / "b")
    finally:
        os.umask(before)
    assert first.to_bytes() == second.to_bytes()
    assert str(tmp_path) not in first.to_bytes().decode()


def test_digests_are_defined_by_the_format() -> None:
    """Of a file: header bytes, then raw tensor digests. Of the content: names, sizes and digests."""
    one, two = blake3(b"one").hexdigest(), blake3(b"two").hexdigest()
    header = b"header"
    assert (
        file_digest(header, [one, two])
        == blake3(header + blake3(b"one").digest() + blake3(b"two").digest()).hexdigest()
    )
    assert file_digest(header, [two, one]) != file_digest(header, [one, two])
    assert content_digest([]) == blake3(b"[]").hexdigest()


def test_the_content_digest_does_not_know_the_question(manifest: Manifest) -> None:
    """Entries of equal bytes have one content digest even if their keys differ."""
    other = Manifest("0" * 64, {"kind": "Layout"}, manifest.files, manifest.tensors)
    assert other.content_digest == manifest.content_digest


def change(key: str, value: Any) -> Callable[[Document], None]:
    """Sets a place of the document, given as a path with slashes."""

    def apply(document: Document) -> None:
        *path, last = key.split("/")
        at: Any = document
        for step in path:
            at = at[int(step)] if isinstance(at, list) else at[step]
        at[int(last) if isinstance(at, list) else last] = value

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        change("inputKey", "0" * 64),
        change("inputKey", None),
        change("totalBytes", 1),
        change("contentDigest", "0" * 64),
        change("preimage/tensorRank", 0),
        change("preimage/extra", 1),
        change("preimage", {}),
        change("preimage", []),
        change("files/0/bytes", 1),
        change("files/0/bytes", "x"),
        change("files/0/bytes", True),
        change("files/0/dataOffset", 4095),
        change("files/0/dataOffset", 0),
        change("files/0/digest", "zz"),
        change("files/0/group", None),
        change("files/3/group", "resident"),
        change("files/0/name", "001-blocks.1.safetensors"),
        change("files/0/name", "../0.safetensors"),
        change("files/0/name", "/etc/passwd"),
        change("files/0/name", "lease"),
        change("files/0/name", ""),
        change("files/0/extra", 1),
        change("files", {}),
        change("tensors/0/offset", 1),
        change("tensors/0/offset", -256),
        change("tensors/0/offset", 1024),
        change("tensors/0/bytes", 3),
        change("tensors/0/dtype", "F99"),
        change("tensors/0/shape", [16, 34]),
        change("tensors/0/shape", "16"),
        change("tensors/0/file", "absent.safetensors"),
        change("tensors/0/file", "001-blocks.1.safetensors"),
        change("tensors/0/digest", None),
        change("tensors/0/name", "blocks.1.weight"),
        change("tensors", None),
        change("more", 1),
        lambda document: document["tensors"][-1].update(offset=1 << 20),
        lambda document: document.pop("tensors"),
        lambda document: document["tensors"][0].pop("role"),
        lambda document: document["tensors"].reverse(),
        lambda document: document["tensors"].append(document["tensors"][-1]),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_corrupt(
    manifest: Manifest, damage: Callable[[Document], Any]
) -> None:
    """Every single change of a field is found, without any look at the files."""
    document = copy.deepcopy(json.loads(manifest.to_bytes()))
    damage(document)
    with pytest.raises(Corrupt):
        Manifest.from_bytes(canonical_json(document))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "manifest.json", "lease", "", ".", "a\0b"])
def test_a_file_name_that_leads_elsewhere_is_corrupt(tmp_path: Path, name: str) -> None:
    """A manifest never makes a reader open what is not in its entry."""
    document = json.loads(write_files_entry(tmp_path / "entry", {"a": b"x"}).to_bytes())
    files = [FileRecord(name, None, 1, 0, document["files"][0]["digest"])]
    document["files"][0]["name"] = name
    document["contentDigest"] = content_digest(files)
    with pytest.raises(Corrupt):
        Manifest.from_bytes(canonical_json(document))


def test_every_flipped_byte_is_found(manifest: Manifest) -> None:
    """Bit rot in a manifest never yields another manifest of the same key that is believed as it is."""
    text = manifest.to_bytes()
    sha256 = hashlib.sha256(text).digest()
    for at in range(0, len(text), 7):
        bad = bytearray(text)
        bad[at] ^= 0x04
        try:
            read = Manifest.from_bytes(bytes(bad))
        except (Corrupt, NewerFormat):
            continue
        # Free text (a source's name, a role) can change unseen here; the manifest's own sha256 cannot.
        assert hashlib.sha256(read.to_bytes()).digest() != sha256


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\0" * 100, b'{"formatVersion":0}', b'{"formatVersion":"1"}']
)
def test_case_19_what_a_power_cut_leaves_is_corrupt(data: bytes) -> None:
    """An empty manifest, zeros, or a document without version."""
    with pytest.raises(Corrupt):
        Manifest.from_bytes(data)


def test_white_space_is_not_canonical(manifest: Manifest) -> None:
    """A manifest is its bytes."""
    with pytest.raises(Corrupt):
        Manifest.from_bytes(manifest.to_bytes() + b"\n")


def test_a_later_format_is_told_apart() -> None:
    """An entry of a later release is not called damaged."""
    with pytest.raises(NewerFormat, match="version 2"):
        Manifest.from_bytes(b'{"formatVersion":2,"anything":[]}')


def test_block_file_names() -> None:
    """The place orders them; a block that makes no plain file name is refused."""
    assert block_file_name(7, "token_refiner.blocks.3") == "007-token_refiner.blocks.3.safetensors"
    assert block_file_name(1234, "b.1") == "1234-b.1.safetensors"
    for block in ("a/b", "", "a" * 200, "ä.0"):
        with pytest.raises(Invalid):
            block_file_name(0, block)


FILE = {"name": "a", "size": 1, "sha256": "0" * 64}
LAYOUT_PREIMAGE = {
    "kind": "Layout",
    "files": [FILE],
    "component": "transformer",
    "layout": {"id": "flux-1", "digest": "0" * 64},
    "dtype": "Source",
    "quantization": "None",
    "tensorSize": 2,
    "tensorRank": 1,
}


@pytest.mark.parametrize(
    "preimage",
    [
        {"kind": "Layout"},
        {"kind": "Other", "files": []},
        {"kind": "Files"},
        {"kind": "Files", "files": [FILE]},
        {"kind": "Files", "files": [{**FILE, "size": "1"}]},
        {"kind": "Files", "files": [{"name": "a"}]},
        {**LAYOUT_PREIMAGE, "tensorRank": 2},
        {**LAYOUT_PREIMAGE, "tensorRank": True},
        {**LAYOUT_PREIMAGE, "tensorSize": "2"},
        {**LAYOUT_PREIMAGE, "component": None},
        {**LAYOUT_PREIMAGE, "layout": "flux-1"},
        {**LAYOUT_PREIMAGE, "layout": {"id": "flux-1"}},
        {**LAYOUT_PREIMAGE, "files": [["a", 1]]},
    ],
    ids=str,
)
def test_a_key_of_something_else_is_no_entry(preimage: Document) -> None:
    """The key is right, but what it names is no entry: nobody who reads a field of it may stumble."""
    data = Manifest(key_of(preimage), preimage, (), ()).to_bytes()
    with pytest.raises(Corrupt):
        Manifest.from_bytes(data)


def test_words_of_a_later_release_are_no_damage() -> None:
    """A policy that this version cannot build is no reason to set an entry aside."""
    preimage = {**LAYOUT_PREIMAGE, "dtype": "float8", "quantization": "New"}
    data = Manifest(key_of(preimage), preimage, (), ()).to_bytes()
    assert Manifest.from_bytes(data).coordinate == (1, 2)
