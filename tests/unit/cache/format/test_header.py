"""Headers of strangers: what lies, is cut short or is no safetensors file at all is told apart and named."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from dlo_cache.errors import BadHeader
from dlo_cache.header import HEADER_LIMIT, Header, parse_header
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save

NAME = "transformer/diffusion_pytorch_model.safetensors"
K, V = "transformer_blocks.0.attn.to_k.weight", "transformer_blocks.0.attn.to_v.weight"


def parse(data: bytes) -> Header:
    """The header of a whole file in memory."""
    return parse_header(lambda offset, length: data[offset : offset + length], len(data), NAME)


def refused(data: bytes) -> BadHeader:
    """The error for a file in memory."""
    with pytest.raises(BadHeader) as caught:
        parse(data)
    assert NAME in str(caught.value)
    return caught.value


def file_of(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of this header text."""
    raw = header.encode() if isinstance(header, str) else header
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def one(name: str, begin: int, end: int, shape: str = "[4,4]", dtype: str = "F32") -> str:
    """One tensor as it stands in a header."""
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def whole_file() -> bytes:
    """A good file as the library writes it."""
    arrays: dict[str, NDArray[Any]] = {
        K: np.arange(16, dtype=np.float32).reshape(4, 4),
        V: np.arange(400, dtype=np.int64),
    }
    return bytes(save(arrays, {"format": "pt"}))


def test_reads_what_the_library_writes() -> None:
    """Names, dtypes, shapes, metadata and places agree with the library's own file."""
    data = whole_file()
    header = parse(data)
    assert header.metadata == {"format": "pt"}
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == {
        K: ("F32", (4, 4)),
        V: ("I64", (400,)),
    }
    found = next(tensor for tensor in header.tensors if tensor.name == K)
    start = header.data_offset + found.begin
    assert np.array_equal(np.frombuffer(data[start : start + 64], np.float32), np.arange(16))
    assert header.data_bytes == 64 + 3200


def test_case_07_cut_tail() -> None:
    """A file that lost its end says how many bytes it needs and has."""
    error = refused(whole_file()[:-777])
    assert error.reason == "Truncated"
    assert "3264 bytes" in error.message
    assert "2487" in error.message


def test_case_07_cut_in_header() -> None:
    """A file that ends within its header."""
    assert refused(whole_file()[:100]).reason == "Truncated"


@pytest.mark.parametrize("size", range(1, 8))
def test_case_07_shorter_than_the_length_field(size: int) -> None:
    """A file of fewer than eight bytes."""
    assert refused(whole_file()[:size]).reason == "Truncated"


def test_case_07_empty() -> None:
    """A file of no bytes."""
    assert refused(b"").reason == "Empty"


def test_case_07_lfs_pointer() -> None:
    """A Git LFS pointer is named as such, with what to do."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123\n".encode()
    error = refused(pointer)
    assert error.reason == "LfsPointer"
    assert "git lfs pull" in error.hint


def test_case_07_pickle_archive() -> None:
    """A zip archive as torch.save writes it."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    assert refused(buffer.getvalue()).reason == "Archive"


def test_case_07_plain_pickle() -> None:
    """A pickle that is not in an archive."""
    assert refused(b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00}\x94.").reason == "Pickle"


def test_a_header_length_that_looks_like_a_pickle_is_read() -> None:
    """A length of 0x10280 starts with the bytes 80 02 and is still a length."""
    header = file_of(f"{{{one(K, 0, 64)}}}".ljust(0x10280), bytes(64))
    assert header[:2] == b"\x80\x02"
    assert [tensor.name for tensor in parse(header).tensors] == [K]


@pytest.mark.parametrize(
    "start", ["<!doctype html><title>502</title>", "\n <HTML>", "<?xml version='1.0'?><Error>"]
)
def test_case_07_error_page(start: str) -> None:
    """A saved error page of a web server or an object store."""
    assert refused((start + "bad gateway\n" * 20).encode()).reason == "Markup"


def test_case_07_json_error_document() -> None:
    """A saved JSON answer is no header either: the length field is text."""
    assert refused(b'{"error":"Repository not found","status":404}').reason in ("TooLarge", "Lies")


@pytest.mark.parametrize(
    ("variant", "text", "nbytes", "length", "reason", "words"),
    [
        ("name_twice", f"{{{one(K, 0, 64)},{one(K, 64, 128)}}}", 128, None, "Lies", (K, "twice")),
        ("length_2_60", f"{{{one(K, 0, 64)}}}", 64, 2**60, "TooLarge", (str(2**60),)),
        ("length_past_end", f"{{{one(K, 0, 64)}}}", 64, 4096, "Truncated", ("4096",)),
        ("two_names_one_range", f"{{{one(K, 0, 64)},{one(V, 0, 64)}}}", 64, None, "Lies", (K, V, "shares")),
        ("partial_overlap", f"{{{one(K, 0, 64)},{one(V, 32, 96)}}}", 96, None, "Lies", (K, V, "shares")),
        ("hole", f"{{{one(K, 0, 64)},{one(V, 128, 192)}}}", 192, None, "Lies", (V, "hole of 64")),
        ("hole_in_front", f"{{{one(K, 64, 128)}}}", 128, None, "Lies", (K, "hole of 64")),
        ("bytes_behind", f"{{{one(K, 0, 64)}}}", 65, None, "Lies", ("1 bytes behind",)),
        ("backwards", f"{{{one(K, 64, 0)}}}", 64, None, "Lies", (K, "[64, 0]")),
        ("short_payload", f"{{{one(K, 0, 64, '[1000,1000]')}}}", 64, None, "Lies", (K, "4000000")),
        ("negative_size", f"{{{one(K, 0, 64, '[-4,-4]')}}}", 64, None, "Lies", (K, "[-4, -4]")),
        ("fraction", f"{{{one(K, 0, 64, '[4.0,4]')}}}", 64, None, "Lies", (K, "4.0")),
        ("truth_as_size", f"{{{one(K, 0, 64, '[true,16]')}}}", 64, None, "Lies", (K, "True")),
        ("huge_size", f"{{{one(K, 0, 64, f'[{10**30},0]')}}}", 64, None, "Lies", (K,)),
        ("seventeen_dimensions", f"{{{one(K, 0, 4, str([1] * 17))}}}", 4, None, "Lies", (K,)),
        (
            "metadata_not_text",
            f'{{"__metadata__":{{"n":3}},{one(K, 0, 64)}}}',
            64,
            None,
            "Lies",
            ("__metadata__",),
        ),
        ("metadata_twice", '{"__metadata__":{"a":"1","a":"2"}}', 0, None, "Lies", ("'a'", "twice")),
        ("metadata_list", '{"__metadata__":[]}', 0, None, "Lies", ("__metadata__",)),
        ("unknown_dtype", f"{{{one(K, 0, 64, dtype='F31')}}}", 64, None, "Lies", (K, "F31")),
        ("dtype_no_text", "{" + one(K, 0, 64).replace('"F32"', "[]") + "}", 64, None, "Lies", (K,)),
        ("packed_dtype", f"{{{one(K, 0, 8, dtype='F4')}}}", 8, None, "Lies", (K, "F4")),
        ("missing_key", f'{{"{K}":{{"dtype":"F32","shape":[]}}}}', 4, None, "Lies", (K,)),
        ("more_keys", "{" + one(K, 0, 64)[:-1] + ',"x":1}}', 64, None, "Lies", (K,)),
        ("not_a_tensor", f'{{"{K}":7}}', 0, None, "Lies", (K,)),
        ("three_offsets", "{" + one(K, 0, 64).replace("[0,64]", "[0,64,64]") + "}", 64, None, "Lies", (K,)),
        ("array", "[1,2]", 0, None, "Lies", ("does not start",)),
        ("cut_json", f"{{{one(K, 0, 64)}", 64, None, "Lies", ("no JSON",)),
        ("not_a_number", f"{{{one(K, 0, 64, '[NaN,4]')}}}", 64, None, "Lies", ("NaN",)),
        ("empty_name", f"{{{one('', 0, 64)}}}", 64, None, "Lies", ("named",)),
        ("long_name", f"{{{one('x' * 2000, 0, 64)}}}", 64, None, "Lies", ("named",)),
        ("nul_in_name", "{" + one("a\\u0000b", 0, 64) + "}", 64, None, "Lies", ("named",)),
        ("half_a_character", "{" + one("a\\ud800", 0, 64) + "}", 64, None, "Lies", ("named",)),
        ("nothing", "", 0, None, "Lies", ("header of 0 bytes",)),
        ("not_utf8", b'{"\xff":1}', 0, None, "Lies", ("no JSON",)),
    ],
)
def test_case_09_lying_header(
    variant: str, text: str | bytes, nbytes: int, length: int | None, reason: str, words: tuple[str, ...]
) -> None:
    """Each lie is refused by its own words, naming the file and the tensor."""
    error = refused(file_of(text, bytes(nbytes), length))
    assert error.reason == reason, variant
    for word in words:
        assert word in str(error), variant


@pytest.mark.parametrize("length", [HEADER_LIMIT + 1, 2**40, 2**60, 2**64 - 1])
def test_case_09_the_length_field_sizes_no_allocation(length: int) -> None:
    """A header said to be huge is refused after a look at the first bytes, in a file said to be huge too."""
    asked = []

    def read(offset: int, count: int) -> bytes:
        asked.append(count)
        return (length.to_bytes(8, "little") + b"{" + bytes(1000))[offset : offset + count]

    with pytest.raises(BadHeader) as caught:
        parse_header(read, 2**70, NAME)
    assert caught.value.reason == "TooLarge"
    assert sum(asked) <= 4096


def test_case_09_memory_stays_small_for_a_header_of_many_values() -> None:
    """Megabytes of nested lists are refused by counting, before they become objects."""
    text = b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"
    data = file_of(text)
    tracemalloc.start()
    error = refused(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.reason == "TooLarge"
    assert peak < 4 * len(text)


def test_case_09_nested_deep() -> None:
    """Nesting ends in an error of ours and not in the interpreter's."""
    assert refused(file_of('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")).reason == "Lies"


def test_case_09_too_many_tensors() -> None:
    """More tensors than any model has."""
    text = (
        "{"
        + ",".join(f'"{at}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for at in range(100_001))
        + "}"
    )
    assert refused(file_of(text)).reason == "TooLarge"


def test_case_11_empty_tensors_and_scalars() -> None:
    """Zero-element tensors and 0-d tensors are legal, keep their shapes, and may share a place."""
    arrays = {
        "a": np.zeros((0,), np.float32),
        "b": np.zeros((0, 16), np.float32),
        "c": np.array(0.125, np.float32),
        "d": np.arange(4, dtype=np.float32),
    }
    header = parse(bytes(save(arrays)))
    assert {tensor.name: tensor.shape for tensor in header.tensors} == {
        "a": (0,),
        "b": (0, 16),
        "c": (),
        "d": (4,),
    }
    assert sum(tensor.nbytes for tensor in header.tensors) == 20


def test_case_11_an_empty_tensor_may_stand_before_the_one_it_follows() -> None:
    """The header's order is free: an empty tensor at the end of the data, stated first."""
    header = parse(file_of(f"{{{one(V, 64, 64, '[0]')},{one(K, 0, 64)}}}", bytes(64)))
    assert [tensor.name for tensor in header.tensors] == [K, V]


def test_no_tensors_at_all() -> None:
    """A file of nothing but a header is a file."""
    assert parse(file_of("{}")).tensors == ()


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
@example(8, b"[")
def test_a_damaged_file_is_read_right_or_refused(place: int, damage: bytes) -> None:
    """Whatever bytes are changed, the header tiles its data or there is BadHeader, never another error."""
    data = bytearray(whole_file()[:600])
    at = place % (len(data) - len(damage))
    data[at : at + len(damage)] = damage
    try:
        header = parse(bytes(data))
    except BadHeader:
        return
    assert header.data_offset + sum(tensor.nbytes for tensor in header.tensors) == len(data)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["a", "__metadata__", "dtype", "shape", "data_offsets"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused(value: Any) -> None:
    """No JSON document leads to anything but a header or BadHeader."""
    for document in ({"x": value}, {"__metadata__": value}):
        with suppress(BadHeader):
            parse(file_of(json.dumps(document)))
