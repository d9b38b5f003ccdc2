"""Bad input: one clear line, exit 2 or 1, nothing written, no traceback."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.cache.store.processes import NOBODY, in_child
from unit.cli.prompt import Dlo, Said, files_below

DIGITS = "model: {source: {directory: {root: samples, path: digits}}}\nengine: {device: Cpu}\n"


def refused(said: Said, status: int, *words: str) -> None:
    """The command ended with this status and one line that has these words."""
    assert said.status == status, said
    assert said.out == ""
    lines = said.err.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1, said.err
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err, said.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run"], ["--file"]),
        (["run", "-f", "x.yaml", "--steps", "many"], ["--steps", "valid integer"]),
        (["run", "-f", "x.yaml", "--nonsense"], ["--nonsense"]),
        (["paint"], ["paint"]),
        (["run", "-f", "x.yaml", "--prompt", ""], ["--prompt is empty"]),
        (["run", "-f", "x.yaml", "--prompt", "  "], ["--prompt is empty"]),
        (["run", "-f", "x.yaml", "--prompt", "a" * 100_000], ["100000 characters", "at most 10000"]),
        (["run", "-f", "x.yaml", "--steps", "0"], ["--steps is 0", "1 to 1000"]),
        (["run", "-f", "x.yaml", "--steps", "-1"], ["--steps is -1"]),
        (["run", "-f", "x.yaml", "--steps", "10001"], ["--steps is 10001"]),
        (["run", "-f", "x.yaml", "--seed", "-1"], ["--seed is -1"]),
        (["run", "-f", "x.yaml", "--seed", str(2**63)], ["--seed is"]),
        (["run", "-f", "x.yaml", "--size", "big"], ["--size is 'big'", "WIDTHxHEIGHT"]),
        (["run", "-f", "x.yaml", "--port", "65536"], ["--port is 65536"]),
        (["run", "-f", "x.yaml", "--source-root", "models"], ["NAME=DIR"]),
        (["run", "-f", "missing.yaml"], ["missing.yaml: cannot be read", "No such file"]),
        (["plan", "-f", "."], ["cannot be read", "directory"]),
        (["build", "model", "--tensor", "0"], ["--tensor is 0"]),
        (["build", "model", "--tensor", "2", "--rank", "2"], ["--rank is 2", "0 to 1"]),
        (["build", "model", "--dtype", "int4"], ["--dtype is 'int4'", "bfloat16"]),
    ],
)
def test_command_line_is_refused_before_any_work(
    dlo: Dlo, home: Path, words: list[str], expected: list[str]
) -> None:
    """Options out of range and unknown words are told apart, by name."""
    refused(dlo(*words), 2, *expected)
    assert files_below(home) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (DIGITS + "paralelism: {tensor: 2}", ["spec.paralelism", "did you mean parallelism?"]),
        (DIGITS + "parallelism: {tensor: two}", ["spec.parallelism.tensor", "whole number", "'two'"]),
        (DIGITS + "replicas: -1", ["spec.replicas"]),
        (DIGITS.replace("Cpu", "Cpu, extraArgs: [--host=0.0.0.0]"), ["spec.engine.extraArgs", "--slots"]),
        (DIGITS.replace("Cpu", "Cpu, extraArgs: [--slots=9]"), ["spec.engine.extraArgs", "--slots=3"]),
        (
            DIGITS.replace("digits}}", "digits}}, components: []"),
            ["spec.model.components", "a list with more items is needed"],
        ),
        (DIGITS.replace("digits}}", "digits}}, layout: mine"), ["spec.model.layout", "--layout FILE"]),
        (DIGITS + "offload: {mode: Distributed}", ["spec.offload.mode", "DistributedLayerwise"]),
        (DIGITS + "offload: {mode: None, transfer: AllGather}", ["AllGather"]),
        (DIGITS + "offload: {transfer: AllGather}", ["AllGather"]),
        (DIGITS + "parallelism: {pipeline: 2}", ["pipeline"]),
        (DIGITS + "parallelism: {ulysses: 2}", ["Ulysses"]),
        (DIGITS + "cache: {policy: Disabled}", ["cache.policy"]),
        (DIGITS + "offload: {residentLayers: Auto}", ["residentLayers"]),
        ("model: {source: {}}", ["source"]),
        ("model: {source: {huggingFace: {repo: org/name}}}\nengine: {device: Cpu}", ["huggingFace"]),
        (
            "model: {source: {directory: {root: nowhere, path: digits}}}\nengine: {device: Cpu}",
            ["nowhere", "--source-root"],
        ),
        ("model: {source: {directory: {root: samples, path: ../x}}}\nengine: {device: Cpu}", ["path"]),
        (DIGITS + "parallelism: {tensor: 3}", ["num_attention_heads", "3"]),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_manifest_is_refused_with_path_and_remedy(
    dlo: Dlo, home: Path, manifest: Callable[[str], Path], command: str, spec: str, expected: list[str]
) -> None:
    """`dlo run` and `dlo plan` refuse the same manifests with the same words, and touch nothing."""
    said = dlo(command, "-f", manifest(spec))
    refused(said, said.status, *expected)
    assert said.status in (1, 2)
    assert files_below(home) == []


def test_a_plan_counts_the_slots_of_the_extra_arguments(dlo: Dlo, manifest: Callable[[str], Path]) -> None:
    """What the manifest gives the engine is what the plan is made of."""
    import json

    memory = []
    for slots in ("[]", "[--slots=2]", "[--slots=4]"):
        file = manifest(DIGITS.replace("Cpu", f"Cpu, extraArgs: {slots}"))
        said = dlo("plan", "-f", file, "-o", "json")
        assert said.status == 0, said.err
        memory.append(json.loads(said.out)["ranks"][0]["privateHostBytes"])
    assert memory[0] == memory[1] < memory[2]


@pytest.mark.parametrize("text", ["", "{", "a: 1\na: 2\n", "kind: Pod\napiVersion: v1\n", "- 1\n- 2\n", "\0"])
def test_what_is_no_manifest_is_refused(dlo: Dlo, home: Path, tmp_path: Path, text: str) -> None:
    """Empty, broken, doubled, foreign: each has its line."""
    file = tmp_path / "manifest.yaml"
    file.write_text(text)
    refused(dlo("run", "-f", file), 2, str(file))
    assert files_below(home) == []


def test_model_folder_that_is_missing_or_no_pipeline(dlo: Dlo, home: Path, tmp_path: Path) -> None:
    """A missing folder, a file, an empty folder: each is named."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("missing", "file", "empty"):
        refused(dlo("build", tmp_path / name), 1, name)
    assert files_below(home) == []


def test_shard_that_lacks_is_named(
    dlo: Dlo, home: Path, tmp_path: Path, manifest: Callable[[str], Path]
) -> None:
    """A model folder without one of its shards builds nothing."""
    import shutil

    from dlo_cli.samples import samples_root

    shutil.copytree(samples_root() / "digits", tmp_path / "digits")
    shard = max((tmp_path / "digits/transformer").glob("*.safetensors"))
    shard.unlink()
    file = manifest("model: {source: {directory: {path: digits}}}\nengine: {device: Cpu}")
    refused(dlo("run", "-f", file), 1, shard.name)
    assert files_below(home) == []


def test_cache_root_that_cannot_be_used(dlo: Dlo, tmp_path: Path, manifest: Callable[[str], Path]) -> None:
    """A named root must exist, be a folder and have been initialised; nothing is written into anything else."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    file = manifest(DIGITS)
    for name, words in (("missing", "missing"), ("file", "not a directory"), ("empty", "dlo cache init")):
        refused(dlo("run", "-f", file, "--cache-root", tmp_path / name), 1, words)
    assert files_below(tmp_path / "empty") == []
    assert (tmp_path / "file").read_text() == "x"


def test_output_folder_that_cannot_be_made(
    dlo: Dlo, home: Path, tmp_path: Path, manifest: Callable[[str], Path]
) -> None:
    """The output folder is made before anything is built."""
    (tmp_path / "file").write_text("x")
    said = dlo("run", "-f", manifest(DIGITS), "--prompt", "seven", "--out", tmp_path / "file/out")
    refused(said, 2, "--out")
    assert files_below(home) == []


def test_full_disk_is_said_before_the_first_byte(
    dlo: Dlo, home: Path, manifest: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes needed and free are in the line, and nothing was begun."""
    real = os.statvfs

    def nearly_full(path: int | str) -> os.statvfs_result:
        found = list(real(path))
        found[3] = found[4] = 200  # free blocks
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    refused(dlo("run", "-f", manifest(DIGITS)), 1, "InsufficientDisk", "needs", "free")
    assert list((home / ".cache/dlo/v1/ingest").iterdir()) == []
    assert list((home / ".cache/dlo/v1/entries").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_read_only_root_names_owner_and_user(dlo: Dlo, manifest: Callable[[str], Path]) -> None:
    """An ordinary user on somebody else's root gets one line with uid, gid and mode."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        assert dlo("cache", "init", "--cache-root", folder / "root").status == 0
        (folder / "root").chmod(0o755)
        (folder / "root/v1").chmod(0o755)
        file = folder / "manifest.yaml"
        file.write_text(manifest(DIGITS).read_text())
        before = files_below(folder)

        def as_somebody() -> None:
            refused(dlo("run", "-f", file, "--cache-root", folder / "root"), 1, "Denied", "uid", "mode")

        assert in_child(as_somebody, uid=NOBODY) == 0
        assert files_below(folder) == before
