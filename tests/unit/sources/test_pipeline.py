"""Whole pipelines: what belongs to one, what is left out, and what is missing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from dlo_sources.errors import (
    SourceAmbiguous,
    SourceError,
    SourceIncomplete,
    SourceInvalid,
    SourceNotFound,
    SourceUnavailable,
    SourceUntrusted,
)
from dlo_sources.pipeline import Pipeline, open_directory
from unit.sources.checkpoints import (
    INDEX,
    REVISION,
    STEM,
    file_bytes,
    hub_cache,
    put,
    put_index,
    put_shards,
    seen,
    tensor,
    tiny_dit,
    tree,
    wanted,
    whole_pipeline,
)

SHARDS = [f"transformer/{STEM}-{place:05d}-of-00002.safetensors" for place in (1, 2)]
EVERYTHING = [
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/generation_config.json",
    "text_encoder/model.safetensors",
    "tokenizer/special_tokens_map.json",
    "tokenizer/spiece.model",
    "tokenizer/tokenizer.json",
    "transformer/config.json",
    *SHARDS,
    f"transformer/{INDEX}",
    "vae/config.json",
    f"vae/{STEM}.safetensors",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A whole pipeline."""
    return whole_pipeline(tmp_path / "tiny-flux")


def refused(
    root: Path, kind: type[SourceError], *words: str, variant: str = "", within: Path | None = None
) -> None:
    """Opening ends in this kind of error with these words and something to do."""
    with pytest.raises(SourceError) as caught:
        open_directory(root, variant=variant, within=within)
    assert type(caught.value) is kind, caught.value
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint


def names(pipeline: Pipeline, streamed: list[str] | None = None) -> list[str]:
    """Names of all files, or of the rest."""
    files = pipeline.all_files() if streamed is None else pipeline.rest_files(streamed)
    return [file.name for file in files]


def test_a_whole_pipeline(root: Path) -> None:
    """Components with library, class and config; settings and absent components are none."""
    pipeline = open_directory(root)
    assert (pipeline.name, pipeline.class_name, pipeline.root) == ("tiny-flux", "TinyPipeline", root)
    assert set(pipeline.components) == {"transformer", "text_encoder", "tokenizer", "scheduler", "vae"}
    transformer = pipeline.component("transformer")
    assert (transformer.library, transformer.class_name) == ("diffusers", "CaseTransformer")
    assert transformer.config["num_attention_heads"] == 4
    assert [file.name for file in transformer.weights] == SHARDS
    assert seen(transformer) == wanted(tiny_dit())
    tokenizer = pipeline.component("tokenizer")
    assert (tokenizer.weights, tokenizer.tensors, tokenizer.config) == ((), {}, {})


def test_all_files_are_those_of_the_components(root: Path) -> None:
    """No stray single-file duplicate, no other variant, no pickle, no readme, nothing hidden."""
    assert names(open_directory(root)) == sorted(EVERYTHING)


def test_the_rest_leaves_out_the_streamed_weights_and_their_index(root: Path) -> None:
    """Configs stay, so that the engine can build the module; several components may stream."""
    pipeline = open_directory(root)
    gone = {*SHARDS, f"transformer/{INDEX}"}
    assert names(pipeline, ["transformer"]) == sorted(set(EVERYTHING) - gone)
    gone.add("text_encoder/model.safetensors")
    assert names(pipeline, ["transformer", "text_encoder"]) == sorted(set(EVERYTHING) - gone)
    assert names(pipeline, []) == sorted(EVERYTHING)


def test_what_cannot_be_streamed_is_said(root: Path) -> None:
    """A component without weights, or none of that name."""
    pipeline = open_directory(root)
    with pytest.raises(SourceInvalid, match="scheduler has no weights"):
        pipeline.rest_files(["scheduler"])
    with pytest.raises(SourceNotFound, match=r"no component 'unet' — its components are .*transformer"):
        pipeline.rest_files(["unet"])


def test_digests_come_in_later(root: Path) -> None:
    """Files swapped by name reach the pipeline's own file, all components and all tensors."""
    pipeline = open_directory(root)
    hashed = [file.with_sha256("a" * 64) for file in pipeline.all_files()]  # type: ignore[attr-defined]
    after = pipeline.with_files(hashed)
    assert {file.sha256 for file in after.all_files()} == {"a" * 64}
    assert {each.file.sha256 for each in after.component("transformer").tensors.values()} == {"a" * 64}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """Named, and a different error from everything below."""
    refused(tmp_path / "absent", SourceNotFound, str(tmp_path / "absent"))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    """Whatever its content."""
    refused(put(tmp_path / "model.ckpt", b"x"), SourceInvalid, "model.ckpt is a single file")


def test_a_folder_that_is_no_pipeline(tmp_path: Path, root: Path) -> None:
    """An empty folder; one component; a hub repository instead of one of its snapshots."""
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", SourceInvalid, "model_index.json")
    refused(root / "transformer", SourceInvalid, f"give the folder above it, {root}")
    snapshot = hub_cache(tmp_path / "hub", tree(root))
    refused(snapshot.parent.parent, SourceInvalid, f"give one of the folders in {snapshot.parent}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no valid JSON"),
        ("[]", "no JSON object"),
        ("{}", "names no pipeline class"),
        ('{"_class_name":"P"}', "names no component"),
        ('{"_class_name":"P","vae":["diffusers","V"],"vae":["diffusers","W"]}', "twice"),
        ('{"_class_name":"P","../vae":["diffusers","V"]}', "no name of a component"),
        ('{"_class_name":"P","a/b":["diffusers","V"]}', "no name of a component"),
    ],
)
def test_a_broken_model_index(tmp_path: Path, text: str, words: str) -> None:
    """Each kind of breakage is named with the file."""
    put(tmp_path / "model_index.json", text)
    with pytest.raises(SourceInvalid, match=r"model_index\.json") as caught:
        open_directory(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["transformer", "vae", "tokenizer", "scheduler"])
def test_a_component_that_is_missing(root: Path, name: str) -> None:
    """Its folder is not there, or is there and empty."""
    for file in (root / name).iterdir():
        file.unlink()
    refused(root, SourceIncomplete, f"component {name}", "empty")
    (root / name).rmdir()
    refused(root, SourceIncomplete, f"component {name}", "missing")


@pytest.mark.parametrize("name", ["transformer", "vae", "text_encoder"])
def test_a_model_without_config_or_weights(root: Path, name: str) -> None:
    """Both are needed for whatever is a model."""
    config = (root / name / "config.json").read_bytes()
    (root / name / "config.json").unlink()
    refused(root, SourceIncomplete, f"{name}/config.json is missing")
    put(root / name / "config.json", config)
    for file in (root / name).glob("*.safetensors"):
        file.unlink()
    (root / name / "pytorch_model.bin").unlink(missing_ok=True)
    (root / name / INDEX).unlink(missing_ok=True)
    refused(root, SourceIncomplete, f"{name} has no weights")


def test_a_single_file_that_is_still_arriving(root: Path) -> None:
    """What lies there instead is shown."""
    path = root / "vae" / f"{STEM}.safetensors"
    path.rename(f"{path}.incomplete")
    refused(root, SourceIncomplete, "vae has no weights", f"{STEM}.safetensors.incomplete")


def test_pickles_only(root: Path) -> None:
    """Weights that are never opened are called by name."""
    for file in (root / "text_encoder").glob("*.safetensors"):
        file.unlink()
    refused(root, SourceInvalid, "pickles only (pytorch_model.bin)", "convert")


def test_a_variant_is_taken_where_there_is_one(root: Path) -> None:
    """fp16 for the text encoder, the plain set for all others."""
    pipeline = open_directory(root, variant="fp16")
    assert [file.name for file in pipeline.component("text_encoder").weights] == [
        "text_encoder/model.fp16.safetensors"
    ]
    assert [file.name for file in pipeline.component("transformer").weights] == SHARDS
    assert "text_encoder/model.safetensors" not in names(pipeline)


def test_a_sharded_variant(root: Path) -> None:
    """Index and shards carry the word in their own places."""
    shard = f"{STEM}.fp16-00001-of-00001.safetensors"
    put(root / "transformer" / shard, file_bytes(tiny_dit(7, "F16")))
    put_index(root / "transformer", {shard: tiny_dit(7, "F16")}, f"{STEM}.safetensors.index.fp16.json")
    assert seen(open_directory(root, variant="fp16").component("transformer")) == wanted(tiny_dit(7, "F16"))
    assert seen(open_directory(root).component("transformer")) == wanted(tiny_dit())


@pytest.mark.parametrize("variant", ["bf16", "../x", "fp16 "])
def test_a_variant_that_is_nowhere(root: Path, variant: str) -> None:
    """No component has it, so it is a slip."""
    with pytest.raises(SourceError, match="variant"):
        open_directory(root, variant=variant)


def test_only_a_variant_is_there_but_none_was_asked_for(root: Path) -> None:
    """The error shows what there is."""
    (root / "text_encoder" / "model.safetensors").unlink()
    (root / "text_encoder" / "pytorch_model.bin").unlink()
    refused(root, SourceIncomplete, "model.fp16.safetensors", "variant")


def test_a_sharded_text_encoder(root: Path) -> None:
    """The names of the transformers library."""
    (root / "text_encoder" / "model.safetensors").unlink()
    tensors = [tensor("a"), tensor("b")]
    put_shards(root / "text_encoder", tensors, 2, index="model.safetensors.index.json")
    assert seen(open_directory(root).component("text_encoder")) == wanted(tensors)


def test_two_single_files_of_an_unknown_library(tmp_path: Path) -> None:
    """A component of custom code may use either name, but not both."""
    put(tmp_path / "model_index.json", {"_class_name": "P", "thing": ["custom", "Thing"]})
    put(tmp_path / "thing" / "config.json", {})
    put(tmp_path / "thing" / "model.safetensors", file_bytes([tensor("a")]))
    assert list(open_directory(tmp_path).component("thing").tensors) == ["a"]
    put(tmp_path / "thing" / f"{STEM}.safetensors", file_bytes([tensor("a", seed=2)]))
    refused(tmp_path, SourceAmbiguous, "thing/model.safetensors", f"thing/{STEM}.safetensors")


def test_a_hub_snapshot(root: Path, tmp_path: Path) -> None:
    """Links into the blobs beside the snapshots are followed; the name is the repository's."""
    snapshot = hub_cache(tmp_path / "hub", tree(root))
    pipeline = open_directory(snapshot, within=tmp_path / "hub")
    assert pipeline.name == "acme/tiny-dit"
    assert names(pipeline) == sorted(EVERYTHING)
    assert seen(pipeline.component("transformer")) == wanted(tiny_dit())
    assert snapshot.name == REVISION


def test_a_snapshot_link_to_another_repository(root: Path, tmp_path: Path) -> None:
    """Only the snapshot's own blobs are trusted."""
    snapshot = hub_cache(tmp_path / "hub", tree(root))
    secret = put(
        tmp_path / "hub" / "models--other--secret" / "blobs" / "x", file_bytes([tensor("decoder.weight")])
    )
    link = snapshot / "vae" / f"{STEM}.safetensors"
    link.unlink()
    link.symlink_to(os.path.relpath(secret, link.parent))
    refused(snapshot, SourceUntrusted, f"vae/{STEM}.safetensors")


def test_a_source_root_keeps_paths_inside(root: Path, tmp_path: Path) -> None:
    """A path that climbs out, or a link that leads out of the root, is refused."""
    inside = tmp_path / "root"
    inside.mkdir()
    (inside / "link").symlink_to(root)
    refused(inside / "link", SourceUntrusted, "link", within=inside)
    refused(inside / ".." / "tiny-flux", SourceUntrusted, within=inside)
    assert open_directory(inside / "link").root == root


@pytest.mark.parametrize("name", ["model_index.json", "vae/config.json", "tokenizer/tokenizer.json", "vae"])
def test_links_that_lead_out_are_not_opened(root: Path, tmp_path: Path, name: str) -> None:
    """Any file or component folder in place of which a link stands."""
    (root / name).rename(tmp_path / "elsewhere")
    (root / name).symlink_to(tmp_path / "elsewhere")
    refused(root, SourceUntrusted, name)


def test_links_that_stay_inside_are_followed(root: Path) -> None:
    """Deduplicated by a link within the folder."""
    moved = root / "shared.bin"
    (root / "vae" / f"{STEM}.safetensors").rename(moved)
    (root / "vae" / f"{STEM}.safetensors").symlink_to("../shared.bin")
    assert list(open_directory(root).component("vae").tensors) == ["decoder.weight"]


def test_a_link_to_itself(root: Path) -> None:
    """A loop is an error and not a hang."""
    (root / "vae" / "config.json").unlink()
    (root / "vae" / "config.json").symlink_to("config.json")
    refused(root, SourceUnavailable, "vae/config.json")


@pytest.mark.parametrize("name", ["vae/config.json", f"vae/{STEM}.safetensors", "tokenizer/tokenizer.json"])
def test_a_pipe_does_not_block(root: Path, name: str) -> None:
    """A pipe in the place of a file is refused without opening it."""
    (root / name).unlink()
    os.mkfifo(root / name)
    refused_kind = pytest.raises(SourceInvalid, match="not a regular file")
    with refused_kind:
        open_directory(root)


def test_a_file_exchanged_after_the_look_is_not_read(root: Path) -> None:
    """Same name, same size, other file: its bytes never count as those that were looked at."""
    component = open_directory(root).component("vae")
    path = root / "vae" / f"{STEM}.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(SourceInvalid, match="changed while it was in use"):
        seen(component)


def test_a_file_that_grew_after_the_look_is_not_read(root: Path) -> None:
    """Written in place."""
    component = open_directory(root).component("vae")
    with (root / "vae" / f"{STEM}.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(SourceInvalid, match="changed while it was in use"):
        seen(component)


def test_reading_stops_at_the_end(root: Path) -> None:
    """Fewer bytes only at the end; none beyond."""
    file = open_directory(root).component("vae").weights[0]
    buffer = bytearray(100)
    assert file.readinto(buffer, file.size - 10) == 10
    assert file.readinto(buffer, file.size + 5) == 0
    assert file.readinto(memoryview(buffer)[:7], 0) == 7
    assert stat.S_ISREG((root / file.name).stat().st_mode)


def test_names_reserved_by_the_entry_format(root: Path) -> None:
    """A checkpoint cannot smuggle in fillers."""
    put(root / "vae" / f"{STEM}.safetensors", file_bytes([tensor("__dlo_pad.0", "U8", (3,))]))
    with pytest.raises(SourceInvalid, match="reserved"):
        open_directory(root)
