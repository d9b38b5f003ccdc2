"""Checkpoints that broke other readers: each is read right, or refused by its own words."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from dlo_cache.errors import NotFound
from dlo_cache.layout import Layout
from dlo_sources import errors
from dlo_sources.errors import (
    SourceAmbiguous,
    SourceError,
    SourceIncomplete,
    SourceInvalid,
    SourceUntrusted,
)
from dlo_sources.pipeline import open_directory
from unit.sources.checkpoints import (
    INDEX,
    STEM,
    Tensor,
    file_bytes,
    hub_cache,
    put,
    put_index,
    put_shards,
    seen,
    shell,
    tensor,
    tiny_dit,
    tree,
    wanted,
)

SECOND = f"{STEM}-00002-of-00002.safetensors"
K, V = "transformer_blocks.0.attn.to_k.weight", "transformer_blocks.0.attn.to_v.weight"


def accepted(root: Path, tensors: list[Tensor]) -> None:
    """The transformer holds exactly these tensors, bit for bit."""
    assert seen(open_directory(root).component("transformer")) == wanted(tensors)


def refused(root: Path, kind: type[SourceError], *words: str) -> SourceError:
    """Opening ends in this kind of error, whose message holds all of the words."""
    with pytest.raises(SourceError) as caught:
        open_directory(root)
    assert type(caught.value) is kind, caught.value
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_case_01_stale_shards_beside_the_index_are_not_opened(tmp_path: Path) -> None:
    """Three shards of another revision with the same names in them; even unreadable ones do not matter."""
    folder = shell(tmp_path)
    put_shards(folder, tiny_dit(2), 3, index=None)
    put_shards(folder, tiny_dit(1), 2)
    put(folder / f"{STEM}-00003-of-00003.safetensors", b"not even a header")
    accepted(tmp_path, tiny_dit(1))


def test_case_01_consolidated_file_beside_the_index(tmp_path: Path) -> None:
    """A single file of another naming."""
    folder = shell(tmp_path)
    put_shards(folder, tiny_dit(1), 2)
    put(
        folder / "consolidated.safetensors",
        file_bytes([each.renamed(f"model.{each.name}") for each in tiny_dit(2)]),
    )
    accepted(tmp_path, tiny_dit(1))


def test_case_01_two_whole_sets_without_index_name_both(tmp_path: Path) -> None:
    """Nothing says which one counts."""
    folder = shell(tmp_path)
    put_shards(folder, tiny_dit(1), 2, index=None)
    put(folder / f"{STEM}.safetensors", file_bytes(tiny_dit(2)))
    refused(tmp_path, SourceAmbiguous, f"{STEM}.safetensors", f"{STEM}-00001-of-00002.safetensors")


def fp8_dit() -> list[Tensor]:
    """Quantised weights, each with a 0-d scale."""
    weights = tiny_dit(3, "F8_E4M3")
    return weights + [
        tensor(f"{each.name}_scale", "F32", ()) for each in weights if each.name.endswith("weight")
    ]


def test_case_02_shard_gone(tmp_path: Path) -> None:
    """Named with a tensor; quantised weights get no leniency."""
    folder = shell(tmp_path)
    placed = put_shards(folder, fp8_dit(), 2)
    (folder / SECOND).unlink()
    error = refused(
        tmp_path, SourceIncomplete, f"transformer/{SECOND} is missing", placed[SECOND][0].name, INDEX
    )
    assert error.subject["tensor"] == placed[SECOND][0].name


def test_case_02_tensor_not_in_its_shard(tmp_path: Path) -> None:
    """The shard is there but lacks what the index places in it: told apart from a missing shard."""
    folder = shell(tmp_path)
    placed = put_shards(folder, fp8_dit(), 2)
    lost = placed[SECOND][-1].name
    put(folder / SECOND, file_bytes(placed[SECOND][:-1]))
    refused(tmp_path, SourceIncomplete, f"transformer/{SECOND} does not hold tensor {lost}", INDEX)


def test_case_02_tensor_not_in_the_index(tmp_path: Path) -> None:
    """A shard holds more than the index says: index and shard are of two revisions."""
    folder = shell(tmp_path)
    placed = put_shards(folder, tiny_dit(), 2)
    put(folder / SECOND, file_bytes([*placed[SECOND], tensor("stray.weight")]))
    refused(tmp_path, SourceInvalid, f"transformer/{SECOND} holds tensor stray.weight", INDEX)


@pytest.mark.parametrize(
    "away",
    [
        "../../other/secret.safetensors",
        "{root}/other/secret.safetensors",
        "./a.safetensors",
        "b//secret.safetensors",
        "parts/../../secret.safetensors",
        "..\\secret.safetensors",
        "",
        "secret.safetensors/",
        "a\0b.safetensors",
    ],
)
def test_case_04_names_that_leave_the_folder(tmp_path: Path, away: str) -> None:
    """Climbing, absolute or odd names are refused with the name and a tensor; nothing at all is opened."""
    folder = shell(tmp_path / "ckpt")
    name = away.replace("{root}", str(tmp_path))
    put(tmp_path / "other" / "secret.safetensors", file_bytes(tiny_dit(5)))
    put_index(folder, {"a.safetensors": tiny_dit()[:3], name: tiny_dit()[3:]})
    # The harmless shard does not exist: it would be reported if anything were looked at first.
    refused(tmp_path / "ckpt", SourceUntrusted, repr(name), tiny_dit()[3].name, "not opened")


def test_case_04_a_folder_below_still_works(tmp_path: Path) -> None:
    """A plain sub-folder is inside."""
    folder = shell(tmp_path)
    put_index(folder, {"parts/a.safetensors": tiny_dit()})
    put(folder / "parts" / "a.safetensors", file_bytes(tiny_dit()))
    accepted(tmp_path, tiny_dit())


def test_case_04_a_shard_that_is_a_link_out_of_the_folder(tmp_path: Path) -> None:
    """The same attack without a word in the index."""
    folder = shell(tmp_path / "ckpt")
    secret = put(tmp_path / "other" / "secret.safetensors", file_bytes(tiny_dit()))
    put_index(folder, {"a.safetensors": tiny_dit()})
    (folder / "a.safetensors").symlink_to(secret)
    refused(tmp_path / "ckpt", SourceUntrusted, "transformer/a.safetensors", "not opened")


def test_case_06_no_index_yet(tmp_path: Path) -> None:
    """Two of three shards and a file in the making."""
    folder = shell(tmp_path)
    for place in (1, 2):
        put(folder / f"model.safetensors-{place:05d}-of-00003.safetensors", file_bytes(tiny_dit()))
    put(folder / "model.safetensors-00003-of-00003.safetensors.incomplete", bytes(4096))
    refused(tmp_path, SourceIncomplete, "model.safetensors-00003-of-00003.safetensors", "index")


def test_case_06_all_shards_but_no_index(tmp_path: Path) -> None:
    """Without the index nobody knows whether these are all tensors."""
    put_shards(shell(tmp_path), tiny_dit(), 2, index=None)
    refused(tmp_path, SourceIncomplete, INDEX)


def test_case_06_a_snapshot_link_to_nothing(tmp_path: Path) -> None:
    """The link has arrived, its blob has not."""
    put_shards(shell(tmp_path / "plain"), tiny_dit(), 2)
    snapshot = hub_cache(tmp_path / "hub", tree(tmp_path / "plain"))
    blob = (snapshot / "transformer" / SECOND).resolve()
    blob.rename(f"{blob}.incomplete")
    refused(snapshot, SourceIncomplete, f"transformer/{SECOND} is a link to nothing", blob.name)


def test_case_06_looked_at_again_when_it_has_arrived(tmp_path: Path) -> None:
    """Nothing of a refusal is remembered."""
    folder = shell(tmp_path)
    placed = put_shards(folder, tiny_dit(), 2)
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).unlink()
    refused(tmp_path, SourceIncomplete, SECOND)
    put(folder / SECOND, content)
    accepted(tmp_path, [*placed[f"{STEM}-00001-of-00002.safetensors"], *placed[SECOND]])


def test_case_06_a_whole_set_beside_an_old_marker(tmp_path: Path) -> None:
    """What the hub's own folder keeps is no obstacle."""
    put_shards(shell(tmp_path), tiny_dit(), 2)
    put(tmp_path / ".cache" / "huggingface" / "download" / "abc.incomplete", bytes(100))
    put(tmp_path / "transformer" / ".cache" / "abc.incomplete", bytes(100))
    put(tmp_path / "transformer" / f"{STEM}-00009-of-00009.safetensors.incomplete", bytes(100))
    accepted(tmp_path, tiny_dit())


@pytest.mark.parametrize(
    ("variant", "kind", "words"),
    [
        ("cut_tail", SourceIncomplete, "is cut short: its tensors need"),
        ("cut_in_header", SourceIncomplete, "is cut short within its header"),
        ("empty", SourceIncomplete, "is empty"),
        ("lfs_pointer", SourceIncomplete, "is a Git LFS pointer"),
        ("pickle", SourceInvalid, "is a zip archive (a pickled checkpoint?)"),
        ("error_page", SourceInvalid, "is a saved web page"),
    ],
)
def test_case_07_not_a_whole_file(tmp_path: Path, variant: str, kind: type[SourceError], words: str) -> None:
    """Each is told apart, and the file named."""
    path = put(shell(tmp_path) / f"{STEM}.safetensors", file_bytes(tiny_dit()))
    whole = path.read_bytes()
    if variant == "pickle":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    else:
        path.write_bytes(
            {
                "cut_tail": whole[:-777],
                "cut_in_header": whole[:200],
                "empty": b"",
                "lfs_pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
                "error_page": b"<!doctype html><title>502</title>bad gateway\n" * 20,
            }[variant]
        )
    refused(tmp_path, kind, f"transformer/{STEM}.safetensors {words}")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({K: [0, 64], V: [0, 64]}, "shares bytes"),
        ({K: [0, 64], V: [128, 192]}, "hole of 64"),
        ({K: [64, 0]}, "[64, 0]"),
        ({K: [0, 128]}, "needs 64 bytes"),
    ],
)
def test_case_09_lying_header(tmp_path: Path, header: dict[str, list[int]], words: str) -> None:
    """The reader's own words come through with the file's name (test_header has every lie)."""
    text = json.dumps(
        {name: {"dtype": "F32", "shape": [4, 4], "data_offsets": at} for name, at in header.items()}
    )
    raw = text.encode()
    put(shell(tmp_path) / f"{STEM}.safetensors", len(raw).to_bytes(8, "little") + raw + bytes(192))
    refused(tmp_path, SourceInvalid, f"transformer/{STEM}.safetensors", words)


def test_case_09_a_name_twice_in_the_index(tmp_path: Path) -> None:
    """The last of two equal names must not win in silence."""
    folder = shell(tmp_path)
    put(folder / "a.safetensors", file_bytes(tiny_dit()))
    put(folder / INDEX, f'{{"weight_map":{{"{K}":"a.safetensors","{K}":"b.safetensors"}}}}')
    refused(tmp_path, SourceInvalid, INDEX, K, "twice")


def test_case_11_empty_tensors_and_a_scalar(tmp_path: Path) -> None:
    """Accepted; [] stays [] and [0, 16] stays [0, 16]."""
    tensors = [
        *tiny_dit(dtype="F32"),
        tensor("transformer_blocks.0.pad", "F32", (0,)),
        tensor("transformer_blocks.1.pad", "F32", (0, 16)),
        tensor("transformer_blocks.0.attn.input_scale", "F32", ()),
    ]
    put(shell(tmp_path) / f"{STEM}.safetensors", file_bytes(tensors))
    accepted(tmp_path, tensors)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", ""])
def test_case_12_single_files_are_refused_with_that_reason(tmp_path: Path, prefix: str) -> None:
    """Not taken for a pipeline, not half-read, and told what to do."""
    weights = tensor(f"{prefix}double_blocks.0.img_attn.qkv.weight", "F8_E4M3", (48, 16))
    path = put(tmp_path / "acme_dit_fp8_scaled.safetensors", file_bytes([weights]))
    error = refused(path, SourceInvalid, "acme_dit_fp8_scaled.safetensors is a single file", "not read")
    assert "from_single_file" in error.hint


def case_layout() -> Layout:
    """A layout as a user would supply it for a model that is not published."""
    block = "transformer_blocks.*."
    section = {"size": 64, "heads": 8}
    rules = [
        {"pattern": f"{block}attn.to_qkv.weight", "role": "column", "sections": [section] * 3},
        {"pattern": f"{block}ff.net.0.proj.convrot_groupsize", "role": "replicated"},
        {"pattern": f"{block}ff.net.0.proj.*", "role": "column"},
        {"pattern": f"{block}ff.net.2.weight", "role": "row"},
        {"pattern": f"{block}ff.net.2.bias", "role": "replicated"},
    ]
    groups = ["transformer_blocks", "token_refiner.blocks"]
    document = {"id": "case", "architecture": "CaseTransformer", "groups": groups, "rules": rules}
    return Layout.from_json(json.dumps(document))


def test_case_13_fused_qkv_rows(tmp_path: Path) -> None:
    """From the file to the cut: rank 1 of 2 gets rows 32-63, 96-127 and 160-191."""
    name = "transformer_blocks.0.attn.to_qkv.weight"
    rows = np.repeat(np.arange(192, dtype=np.float32)[:, None], 16, axis=1)
    put(shell(tmp_path) / f"{STEM}.safetensors", file_bytes([Tensor(name, "F32", (192, 16), rows.tobytes())]))
    component = open_directory(tmp_path).component("transformer")
    data = np.frombuffer(seen(component)[name][2], np.float32).reshape(192, 16)
    cut = case_layout().cut(name, component.tensor(name).shape, 2, 1, component.config)
    got = np.concatenate([data[start:stop] for start, stop in cut.ranges])[:, 0].tolist()
    assert got == [*range(32, 64), *range(96, 128), *range(160, 192)]


def test_case_15_roles(tmp_path: Path) -> None:
    """Shapes from headers, roles from the layout: the bias is cut with its weight, the constant is not."""
    net = "transformer_blocks.0.ff.net."
    tensors = [
        tensor(f"{net}0.proj.weight", "F32", (48, 16)),
        tensor(f"{net}0.proj.bias", "F32", (48,)),
        tensor(f"{net}2.weight", "F32", (16, 48)),
        tensor(f"{net}2.bias", "F32", (16,)),
        tensor(f"{net}0.proj.convrot_groupsize", "I64", ()),
    ]
    put(shell(tmp_path) / f"{STEM}.safetensors", file_bytes(tensors))
    component = open_directory(tmp_path).component("transformer")
    shapes = {
        name.removeprefix(net): case_layout().cut(name, each.shape, 4, 3, component.config).shape
        for name, each in component.tensors.items()
    }
    assert shapes == {
        "0.proj.weight": (12, 16), "0.proj.bias": (12,), "2.weight": (16, 12), "2.bias": (16,),
        "0.proj.convrot_groupsize": ()}  # fmt: skip


def test_case_17_float32_islands_keep_their_dtype(tmp_path: Path) -> None:
    """Mixed dtypes in one block, over two shards."""
    tensors = [*tiny_dit(), tensor("transformer_blocks.0.scale_shift_table", "F32", (1, 6, 16))]
    put_shards(shell(tmp_path), tensors, 2)
    accepted(tmp_path, tensors)


def test_case_35_blocks_of_unequal_size_in_two_groups(tmp_path: Path) -> None:
    """Two lists of blocks, growing and shrinking, in the layout's order."""
    sizes = {"transformer_blocks": (64, 16, 48), "token_refiner.blocks": (96, 8)}
    tensors = [
        tensor(f"{group}.{at}.attn.to_q.weight", "BF16", (rows, 16))
        for group, heights in sizes.items()
        for at, rows in enumerate(heights)
    ]
    put(shell(tmp_path) / f"{STEM}.safetensors", file_bytes(tensors))
    accepted(tmp_path, tensors)
    blocks = case_layout().execution_order(each.name for each in tensors)
    assert blocks == [
        *(f"transformer_blocks.{at}" for at in range(3)),
        *(f"token_refiner.blocks.{at}" for at in range(2)),
    ]


def test_case_37_tied_weights_are_what_the_file_says(tmp_path: Path) -> None:
    """Under both names: two tensors. Under one: one tensor, and the other name is not invented."""
    first, second = (f"transformer_blocks.{at}.shared.weight" for at in (0, 1))
    shared = tensor(first)
    path = put(shell(tmp_path) / f"{STEM}.safetensors", file_bytes([shared, shared.renamed(second)]))
    accepted(tmp_path, [shared, shared.renamed(second)])
    path.write_bytes(file_bytes([shared]))
    component = open_directory(tmp_path).component("transformer")
    assert list(component.tensors) == [first]
    with pytest.raises(NotFound, match=second.replace(".", r"\.")):
        component.tensor(second)


def test_every_refusal_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """Refusals in a loop, as a waiting agent makes them, use up nothing."""
    folder = shell(tmp_path)
    put_shards(folder, tiny_dit(), 2)
    (folder / SECOND).unlink()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        refused(tmp_path, SourceIncomplete, SECOND)
    assert len(os.listdir("/proc/self/fd")) == before


def test_error_codes_are_stable() -> None:
    """The words that status and command line show."""
    kinds = {
        kind.code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, SourceError)
    }
    words = (
        *("Error", "NotFound", "Invalid", "Incomplete", "Ambiguous", "Untrusted", "Unavailable"),
        *("Unauthorized", "Unreachable", "Changed"),
    )
    assert kinds == {f"Source{word}" for word in words}
    error = SourceInvalid("what", hint="do this", code="Other", file="x")
    assert (str(error), error.code, error.subject) == ("what — do this", "Other", {"file": "x"})
    assert str(SourceInvalid("what")) == "what"
