"""A checkpoint's folder in the hands of somebody who means harm: swapped names, floods of files and values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from dlo_sources import folder as folder_module
from dlo_sources.errors import SourceInvalid, SourceUntrusted
from dlo_sources.folder import Folder
from dlo_sources.pipeline import open_directory
from unit.sources.checkpoints import INDEX, put, whole_pipeline


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A whole pipeline."""
    return whole_pipeline(tmp_path / "pipeline")


def test_a_folder_exchanged_for_a_link_after_it_was_judged(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between resolving a name and looking at the file, an owner of the folder may swap it: refused."""
    secret = put(tmp_path / "other_tenant" / "config.json", b'{"secret": 1}')
    folder, real = root / "transformer", os.path.realpath

    def resolve_then_swap(path: Path, **options: bool) -> str:
        found = real(path, **options)
        if found == str(folder / "config.json") and not folder.is_symlink():
            folder.rename(root / "away")
            folder.symlink_to(secret.parent)
        return found

    monkeypatch.setattr(os.path, "realpath", resolve_then_swap)
    with pytest.raises(SourceUntrusted, match=r"config\.json was exchanged"):
        Folder(root).json("transformer/config.json")


def test_a_json_file_of_too_many_values_is_not_parsed(root: Path) -> None:
    """64 MiB of empty lists would take gigabytes: refused by a count of its bytes, as headers are."""
    put(root / "transformer" / INDEX, b'{"a": [' + b"[]," * 1_000_001 + b"1]}")
    with pytest.raises(SourceInvalid, match=r"index\.json states more than 2000000 values"):
        open_directory(root)


def test_a_folder_of_too_many_files_is_left_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is looked at while listing, not after millions of names are in memory."""
    monkeypatch.setattr(folder_module, "_MOST_FILES", 3)
    for index in range(50):
        put(root / "vae" / f"{index}.txt", b"")
    entries = os.scandir(root / "vae")
    listed: list[str] = []

    class Listing:
        def __enter__(self) -> Listing:
            return self

        def __exit__(self, *_: object) -> None:
            entries.close()

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            for entry in entries:
                listed.append(entry.name)
                yield entry

    monkeypatch.setattr(os, "scandir", lambda _: Listing())
    with pytest.raises(SourceInvalid, match="more than 3 files"):
        Folder(root).names("vae")
    assert len(listed) == 4
