"""Headers of safetensors files: reading those of others with suspicion, writing our own block images.

Reading believes nothing: a length is checked before it sizes an allocation, a name twice is found although
Python's ``json`` would keep the last, and the tensors must tile the data section without gap or overlap.
Nothing of a file beyond its header is read here, and nothing may be mapped before this check has passed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn, Protocol

from dlo_cache.dtypes import WORDS, itemsize
from dlo_cache.errors import BadHeader, Invalid

HEADER_LIMIT: Final = 100_000_000
TENSOR_LIMIT: Final = 100_000
# Every value of a JSON document costs one of "{[," at least, so this bounds the objects a parse can make.
STRUCTURE_LIMIT: Final = 2_000_000
NAME_LIMIT: Final = 1024
DIMENSION_LIMIT: Final = 16
SIZE_LIMIT: Final = 2**63 - 1

PAGE: Final = 4096
ALIGNMENT: Final = 256
PAD_PREFIX: Final = "__dlo_pad."
IMAGE_METADATA: Final[Mapping[str, str]] = {"format": "pt"}

_METADATA: Final = "__metadata__"
_LENGTH_BYTES: Final = 8
_SNIFF_BYTES: Final = 512

Read = Callable[[int, int], bytes]


class HeaderTensor(NamedTuple):
    """One tensor as its header states it; ``begin`` and ``end`` count from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin

    @property
    def is_pad(self) -> bool:
        """Whether this is one of our own fillers between tensors."""
        return self.name.startswith(PAD_PREFIX)


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: tensors in order of their bytes, which tile the data section exactly."""

    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str]
    data_offset: int
    data_bytes: int


class ShapedTensor(Protocol):
    """What ``render_image_header`` needs to know of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor of this dtype word and shape; a 0-d tensor has one element."""
    return itemsize(dtype) * math.prod(shape)


def parse_header(read: Read, file_size: int, file_name: str) -> Header:
    """The header of a safetensors file of ``file_size`` bytes, of which ``read(offset, length)`` returns
    bytes.

    Raises BadHeader naming the file, what is wrong with it, and the tensor where there is one. Its
    ``reason`` is ``Empty``, ``Truncated``, ``LfsPointer``, ``Archive``, ``Markup``, ``Pickle``, ``Gguf``,
    ``TooLarge`` or ``Lies``.
    """
    return _Reader(read, file_size, file_name).header()


class _Reader:
    """One reading of one header; the class only spares passing name and size to each check."""

    def __init__(self, read: Read, file_size: int, file_name: str) -> None:
        self._read, self._size, self._name = read, file_size, file_name

    def header(self) -> Header:
        length = self._length()
        raw = self._read(_LENGTH_BYTES, length)
        if len(raw) != length:
            self._fail(
                "Truncated", f"is shorter than its size says: {len(raw)} of {length} header bytes came"
            )
        document = self._document(raw)
        metadata = self._metadata(document.pop(_METADATA, {}))
        if len(document) > TENSOR_LIMIT:
            self._fail("TooLarge", f"states {len(document)} tensors, more than {TENSOR_LIMIT}")
        tensors = [self._tensor(name, stated) for name, stated in document.items()]
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
        data_offset = _LENGTH_BYTES + length
        self._check_tiling(tensors, self._size - data_offset)
        return Header(tuple(tensors), metadata, data_offset, self._size - data_offset)

    def _length(self) -> int:
        if self._size == 0:
            self._fail("Empty", "is empty")
        start = self._read(0, min(self._size, _SNIFF_BYTES))
        self._sniff(start)
        if self._size < _LENGTH_BYTES or len(start) < _LENGTH_BYTES:
            self._fail("Truncated", f"has only {self._size} bytes, too few for a safetensors file")
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        rest = self._size - _LENGTH_BYTES
        opens = start[_LENGTH_BYTES : _LENGTH_BYTES + 1]
        if opens not in (b"{", b""):
            self._fail("Lies", "is not a safetensors file: its header does not start with '{'")
        if length > HEADER_LIMIT:
            self._fail("TooLarge", f"claims a header of {length} bytes, more than {HEADER_LIMIT}")
        if length > rest:
            self._fail("Truncated", f"is cut short within its header: {length} bytes stated, {rest} there")
        if length < 2:
            self._fail("Lies", f"claims a header of {length} bytes")
        return length

    def _sniff(self, start: bytes) -> None:
        text = start.lstrip().lower()
        if start.startswith(b"version https://git-lfs"):
            self._fail(
                "LfsPointer",
                "is a Git LFS pointer, not the file itself",
                "fetch the large files: git lfs pull",
            )
        if start.startswith(b"PK\x03\x04"):
            self._fail("Archive", "is a zip archive (a pickled checkpoint?), which is never opened", _CONVERT)
        if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and start[8:9] != b"{":
            self._fail("Pickle", "is a pickle, which is never opened", _CONVERT)
        if start.startswith(b"GGUF"):
            self._fail("Gguf", "is a GGUF file", _CONVERT)
        if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<error")):
            self._fail("Markup", "is a saved web page (an error page?), not weights", "fetch the file again")

    def _document(self, raw: bytes) -> dict[str, Any]:
        if raw.count(b"{") + raw.count(b"[") + raw.count(b",") > STRUCTURE_LIMIT:
            self._fail("TooLarge", f"has a header of more than {STRUCTURE_LIMIT} values")
        try:
            document = json.loads(
                raw.decode("utf-8"), object_pairs_hook=self._object, parse_constant=_no_constant
            )
        except RecursionError:
            self._fail("Lies", "has a header nested too deep")
        except ValueError as error:
            self._fail("Lies", f"has a header that is no JSON: {error}")
        if not isinstance(document, dict):
            self._fail("Lies", "has a header that is no JSON object")
        return document

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            self._fail("Lies", f"states {_shown(twice)} twice in its header")
        return found

    def _metadata(self, stated: Any) -> dict[str, str]:
        if not isinstance(stated, dict) or not all(isinstance(value, str) for value in stated.values()):
            self._fail("Lies", f"has {_METADATA} that is not text by text")
        return stated

    def _tensor(self, name: str, stated: Any) -> HeaderTensor:
        self._check_name(name)
        if not isinstance(stated, dict) or stated.keys() != {"dtype", "shape", "data_offsets"}:
            self._fail("Lies", "does not state dtype, shape and data_offsets", tensor=name)
        dtype, shape, offsets = stated["dtype"], stated["shape"], stated["data_offsets"]
        if not isinstance(dtype, str) or dtype not in WORDS:
            self._fail("Lies", f"has the unknown dtype {_shown(dtype)}", tensor=name)
        if not _are_sizes(shape) or len(shape) > DIMENSION_LIMIT:
            self._fail("Lies", f"has the shape {_shown(shape)}, which is none", tensor=name)
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._fail("Lies", f"has the offsets {_shown(offsets)}, which are no range", tensor=name)
        begin, end = offsets
        needed = tensor_bytes(dtype, shape)
        if needed != end - begin:
            self._fail(
                "Lies", f"needs {needed} bytes for {dtype} {shape} but states {end - begin}", tensor=name
            )
        return HeaderTensor(name, dtype, tuple(shape), begin, end)

    def _check_name(self, name: str) -> None:
        if not name or len(name) > NAME_LIMIT or not name.isprintable():
            self._fail("Lies", f"has a tensor named {_shown(name)}: empty, too long or not printable")

    def _check_tiling(self, tensors: list[HeaderTensor], data_bytes: int) -> None:
        at, before = 0, ""
        for tensor in tensors:
            if tensor.begin < at:
                self._fail("Lies", f"shares bytes with {_shown(before)}", tensor=tensor.name)
            if tensor.begin > at:
                self._fail(
                    "Lies", f"leaves a hole of {tensor.begin - at} bytes before it", tensor=tensor.name
                )
            at, before = tensor.end, tensor.name
        if at > data_bytes:
            self._fail(
                "Truncated", f"is cut short: its tensors need {at} bytes of data, {data_bytes} are there"
            )
        if at < data_bytes:
            self._fail("Lies", f"has {data_bytes - at} bytes behind its last tensor")

    def _fail(self, reason: str, what: str, hint: str = "", tensor: str | None = None) -> NoReturn:
        subject = self._name if tensor is None else f"{self._name}: tensor {_shown(tensor)}"
        raise BadHeader(f"{subject} {what}", hint=hint, reason=reason, file=self._name, tensor=tensor)


_CONVERT: Final = "convert the checkpoint to safetensors"


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= SIZE_LIMIT for size in value)


def _shown(value: Any) -> str:
    """A value of a stranger's file, short and on one line."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


def render_image_header(tensors: Iterable[ShapedTensor]) -> tuple[bytes, tuple[HeaderTensor, ...]]:
    """The leading bytes of a block image and where each tensor lies behind them, in the given order.

    The header is filled with spaces up to a multiple of 4096 bytes. Every tensor starts at a multiple of
    256 in the data section; the gaps are U8 tensors named ``__dlo_pad.N``, returned among the placements,
    whose bytes must be zero. Equal input gives equal bytes. Raises Invalid for a name twice or one that is
    ours.
    """
    placements: list[HeaderTensor] = []
    names: set[str] = set()
    at = pads = 0
    for tensor in tensors:
        name, dtype, shape = tensor.name, tensor.dtype, tuple(tensor.shape)
        if name in names or name == _METADATA or name.startswith(PAD_PREFIX):
            what = (
                "stands twice in one block"
                if name in names
                else "has a name that the format keeps for itself"
            )
            raise Invalid(f"tensor {_shown(name)} {what}", tensor=name)
        names.add(name)
        begin = -(-at // ALIGNMENT) * ALIGNMENT
        if begin > at:
            placements.append(HeaderTensor(f"{PAD_PREFIX}{pads}", "U8", (begin - at,), at, begin))
            pads += 1
        at = begin + tensor_bytes(dtype, shape)
        placements.append(HeaderTensor(name, dtype, shape, begin, at))
    document: dict[str, Any] = {_METADATA: dict(IMAGE_METADATA)}
    for placed in placements:
        stated = {"dtype": placed.dtype, "shape": placed.shape, "data_offsets": (placed.begin, placed.end)}
        document[placed.name] = stated
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    length = -(-(_LENGTH_BYTES + len(text)) // PAGE) * PAGE - _LENGTH_BYTES
    if length > HEADER_LIMIT:
        raise Invalid(
            f"a block of {len(placements)} tensors needs a header of {length} bytes",
            hint="use smaller blocks",
        )
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length), tuple(placements)
