"""The values a builder reads from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from dlo_cache.errors import NotFound
from dlo_cache.source import Component, SourceFile, SourceTensor


@dataclass(frozen=True)
class NamedFile:
    """A source file without bytes."""

    name: str
    size: int = 8
    sha256: str | None = None

    def readinto(self, buffer: memoryview | bytearray, offset: int) -> int:
        """Nothing to read."""
        return 0


def component() -> Component:
    """Two weight files, three tensors, one side file."""
    one, two, config = NamedFile("t/1.safetensors"), NamedFile("t/2.safetensors"), NamedFile("t/config.json")
    tensors = {
        name: SourceTensor(name, file, "U8", (4,), offset, 4)
        for name, file, offset in (("a", one, 0), ("b", one, 4), ("c", two, 0))
    }
    return Component("t", "diffusers", "T", {}, (one, two, config), (one, two), tensors)


def test_digests_come_in_later() -> None:
    """Replacing files by name reaches the list, the weights and every tensor, and nothing else changes."""
    before = component()
    hashed: list[SourceFile] = [
        replace(file, sha256=file.name) for file in before.files if isinstance(file, NamedFile)
    ]
    after = before.with_files(hashed)
    assert [file.sha256 for file in after.files] == [file.name for file in before.files]
    assert [file.sha256 for file in after.weights] == ["t/1.safetensors", "t/2.safetensors"]
    assert {name: tensor.file.sha256 for name, tensor in after.tensors.items()} == {
        "a": "t/1.safetensors", "b": "t/1.safetensors", "c": "t/2.safetensors"}  # fmt: skip
    assert [file.sha256 for file in before.files] == [None] * 3
    assert after.tensor("b").offset == 4
    assert after.tensor_bytes == before.tensor_bytes == 12


def test_case_02_a_tensor_that_is_nowhere() -> None:
    """Not in the index and in no header: told apart from a shard that is gone or lacks it."""
    with pytest.raises(
        NotFound, match=r"t: tensor proj_out\.bias is not in the checkpoint: no index or header"
    ):
        component().tensor("proj_out.bias")
