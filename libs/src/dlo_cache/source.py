"""What the builder reads from: a checkpoint's files and the tensors in them, wherever the bytes come from.

Values and one protocol. Nothing here opens a file or speaks to a network; ``dlo_sources`` makes these
objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from dlo_cache.errors import NotFound


class SourceFile(Protocol):
    """One file of a checkpoint. ``name`` is its path inside the pipeline's folder, with forward slashes."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str | None:
        """Digest of the content in hexadecimal, or None as long as nobody has hashed it."""
        ...

    def readinto(self, buffer: memoryview | bytearray, offset: int) -> int:
        """Fills ``buffer`` from ``offset``; returns the bytes read, fewer only at the end of the file.

        May be called from several threads at once. Raises an error if the file is not the one that was
        looked at.
        """
        ...


class SourceTensor(NamedTuple):
    """One tensor of a checkpoint; ``offset`` counts from the start of ``file``."""

    name: str
    file: SourceFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Component:
    """One component of a pipeline.

    ``files`` are all its files, the chosen ``weights`` among them; ``tensors`` are in the order of the
    files and of the bytes in them. A component without weights (tokenizer, scheduler) has no tensors.
    """

    name: str
    library: str
    class_name: str
    config: Mapping[str, Any]
    files: tuple[SourceFile, ...]
    weights: tuple[SourceFile, ...]
    tensors: Mapping[str, SourceTensor]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def tensor(self, name: str) -> SourceTensor:
        """The tensor ``name``; raises NotFound if the checkpoint does not have it."""
        try:
            return self.tensors[name]
        except KeyError:
            raise NotFound(
                f"component {self.name}: tensor {name} is not in the checkpoint: no index or header names it",
                hint="a name left out is an alias only if the model ties it; else the checkpoint is cut",
                tensor=name,
            ) from None

    def with_files(self, files: Iterable[SourceFile]) -> Component:
        """The same component over ``files``, matched by name: how later digests come in."""
        known = {file.name: file for file in files}
        return replace(
            self,
            files=swap_files(self.files, known),
            weights=swap_files(self.weights, known),
            tensors={
                name: tensor._replace(file=known.get(tensor.file.name, tensor.file))
                for name, tensor in self.tensors.items()
            },
        )


_File = TypeVar("_File", bound=SourceFile)


def swap_files(files: Iterable[_File], known: Mapping[str, _File]) -> tuple[_File, ...]:
    """``files`` with those that ``known`` has under the same name taken from there."""
    return tuple(known.get(file.name, file) for file in files)
