"""Checkpoints that are made to fill the memory of whoever looks at them, without having many bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from dlo_sources import component
from dlo_sources.component import MOST_TENSORS
from dlo_sources.errors import SourceInvalid
from dlo_sources.pipeline import open_directory
from unit.sources.checkpoints import Tensor, put, put_shards, shell, tensor, tiny_dit

MOST = 3_000
EMPTY = 900


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the bound, so that the checkpoints are written in no time."""
    assert MOST_TENSORS == 100 * MOST
    monkeypatch.setattr(component, "MOST_TENSORS", MOST)


def empty(count: int, first: int = 0) -> list[Tensor]:
    """Tensors without a byte."""
    return [Tensor(f"t{first + at}", "BF16", (0,), b"") for at in range(count)]


def refused(root: Path, words: str) -> None:
    """One line that says what is too much and what to do."""
    with pytest.raises(SourceInvalid) as caught:
        open_directory(root)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_tensors_over_many_shards(tmp_path: Path) -> None:
    """Each file keeps its own bound; all of them together have one too."""
    put_shards(shell(tmp_path / "huge"), empty(EMPTY * 6), 6)
    refused(tmp_path / "huge", f"transformer has more than {MOST} tensors")


def test_empty_tensors_over_many_components(tmp_path: Path) -> None:
    """The same, dealt over components that are each small enough."""
    root = tmp_path / "huge"
    names = [f"part{at}" for at in range(4)]
    put_shards(shell(root, **{name: ["diffusers", "CaseTransformer"] for name in names}), tiny_dit(), 1)
    for name in names:
        put(root / name / "config.json", {})
        put_shards(root / name, empty(EMPTY), 1)
    refused(root, f"more than {MOST} tensors")


def test_a_huge_configuration(tmp_path: Path) -> None:
    """It would stay in memory as objects, many times its size."""
    put_shards(shell(tmp_path / "a"), [tensor("w")], 1)
    put(tmp_path / "a/transformer/config.json", {"a": "x" * (3 << 20)})
    refused(tmp_path / "a", "transformer/config.json has")
    put_shards(shell(tmp_path / "b", note="x" * (3 << 20)), [tensor("w")], 1)
    refused(tmp_path / "b", "model_index.json has")


def test_more_components_than_a_pipeline_has(tmp_path: Path) -> None:
    """Counted before any of them is looked for."""
    put_shards(
        shell(tmp_path / "a", **{f"part{at}": ["diffusers", "X"] for at in range(70)}), [tensor("w")], 1
    )
    refused(tmp_path / "a", "names more than 64 components")
