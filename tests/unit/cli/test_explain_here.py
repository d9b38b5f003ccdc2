"""`dlo explain -f`: this machine judged by the steps of `dlo run`, and nothing written."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from dlo_cli import machine
from unit.cli.prompt import Dlo, Said, files_below

DIGITS = "model: {source: {directory: {root: samples, path: digits}}}\nengine: {device: Cpu}\n"
CUDA = DIGITS.replace("Cpu", "Cuda")
Manifest = Callable[[str], Path]


def checks(said: Said) -> dict[str, tuple[bool | None, str]]:
    """Every check of the document: whether it holds, and its words."""
    return {check["name"]: (check.get("holds"), check["message"]) for check in json.loads(said.out)["checks"]}


def nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's tool that answers like this, before any other on PATH."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_machine_that_can(dlo: Dlo, home: Path, manifest: Manifest) -> None:
    """Every check holds, the backing is said with its reason, and the home stays empty."""
    said = dlo("explain", "-f", manifest(DIGITS))
    assert (said.status, said.err) == (0, ""), said
    assert said.out.startswith("digits can run on this machine\n")
    assert "Backing: MappedCache" in said.out
    assert "Fallback: none" in said.out
    # A path is never cut.
    assert max(len(line) for line in said.out.splitlines() if str(home.parent) not in line) <= 80
    assert files_below(home) == []
    document = json.loads(dlo("explain", "-f", manifest(DIGITS), "-o", "json").out)
    assert set(document) == {"schema", "name", "canRun", "checks", "backing"}
    assert document["schema"] == "dlo.dev/explain-file/v1"
    assert document["canRun"] is True
    assert [check["name"] for check in document["checks"]] == [
        "Manifest",
        "Source",
        "Cache root",
        "Disk",
        "Host memory",
        "Device",
        "Engine",
        "Port",
    ]


@pytest.mark.parametrize(
    ("spec", "name", "words"),
    [
        (DIGITS + "parallelism: {tensor: 3}", "Source", "num_attention_heads"),
        (DIGITS.replace("digits", "gone"), "Source", "gone"),
        (DIGITS + "cache: {policy: Opportunistic}", "Source", "cache.policy"),
        ("model: {source: {huggingFace: {repo: org/name}}}\nengine: {device: Cpu}", "Source", "huggingFace"),
    ],
)
def test_what_run_would_refuse_is_the_same_error(
    dlo: Dlo, home: Path, manifest: Manifest, spec: str, name: str, words: str
) -> None:
    """The check that fails is in the document; the error line and exit status are those of `dlo run`."""
    file = manifest(spec)
    said, run = dlo("explain", "-f", file, "-o", "json"), dlo("run", "-f", file, "--prompt", "seven")
    assert (said.status, said.err) == (run.status, run.err)
    assert said.status != 0
    holds, message = checks(said)[name]
    assert holds is False
    assert words in message
    assert json.loads(said.out)["canRun"] is False
    assert files_below(home) == []


def test_a_manifest_that_is_wrong_is_refused_as_ever(dlo: Dlo, manifest: Manifest) -> None:
    """Nothing can be said of a manifest that has no meaning."""
    file = manifest(DIGITS + "paralelism: {tensor: 2}")
    said, run = dlo("explain", "-f", file), dlo("run", "-f", file)
    assert said == run
    assert said.status == 2


def test_entries_that_are_there_need_no_room(
    dlo: Dlo, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk stops a build, and not an engine whose entries are all there."""
    root, file = tmp_path / "root", manifest(DIGITS + "parallelism: {tensor: 2}")
    assert dlo("cache", "init", "--cache-root", root).status == 0
    words = ("explain", "-f", file, "--cache-root", root, "-o", "json")
    real = os.statvfs

    def full(path: int | str) -> os.statvfs_result:
        found = list(real(path))
        found[3] = found[4] = 200
        return os.statvfs_result(found)

    assert checks(dlo(*words))["Cache root"][1].endswith(
        "which entries are there shows once the files are hashed"
    )
    samples = Path(__file__).parents[3] / "examples" / "digits"
    assert dlo("build", samples, "--tensor", "2", "--rank", "0", "--cache-root", root).status == 0
    assert checks(dlo(*words))["Cache root"][1].endswith("2 of 3 entries are there")
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", full)
        assert checks(dlo(*words))["Disk"][0] is None
        fresh = tmp_path / "fresh"
        assert dlo("cache", "init", "--cache-root", fresh).status == 0
    assert dlo("build", samples, "--tensor", "2", "--cache-root", root).status == 0
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", full)
        said = dlo(*words)
    assert said.status == 0
    assert checks(said)["Cache root"][1].endswith("3 of 3 entries are there")
    assert checks(said)["Disk"] == (True, "nothing more is needed")


def test_a_disk_that_is_too_small(
    dlo: Dlo, home: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needed and free are in the line, whether or not there is a root yet."""
    real = os.statvfs

    def full(path: int | str) -> os.statvfs_result:
        found = list(real(path))
        found[3] = found[4] = 200
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    said = dlo("explain", "-f", manifest(DIGITS))
    assert said.status == 1
    assert said.err.startswith("error: InsufficientDisk: ")
    assert said.out.startswith("digits cannot run on this machine\n")
    assert files_below(home) == []


def test_a_root_that_is_none(dlo: Dlo, manifest: Manifest, tmp_path: Path) -> None:
    """As `dlo run` says it; the checks after it are made all the same."""
    (tmp_path / "empty").mkdir()
    said = dlo("explain", "-f", manifest(DIGITS), "--cache-root", tmp_path / "empty", "-o", "json")
    assert said.status == 1
    assert "dlo cache init" in said.err
    found = checks(said)
    assert found["Cache root"][0] is False
    assert found["Port"][0] is True


def test_a_port_that_is_taken(dlo: Dlo, manifest: Manifest) -> None:
    """Somebody listens on the manifest's port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = dlo("explain", "-f", manifest(DIGITS + f"serving: {{port: {port}}}"))
    assert said.status == 1
    assert said.err.startswith("error: PortInUse: ")


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("echo 'NVIDIA H200, 143771, 143000'", 0, "are free on NVIDIA H200"),
        ("echo 'NVIDIA H200, 143771, 1'", 1, "1.0 MiB are free on NVIDIA H200"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", 1, "nvidia-smi fails: NVIDIA-SMI has failed"),
        ("true", 1, "the driver shows no GPU"),
    ],
)
def test_gpus(
    dlo: Dlo,
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    status: int,
    words: str,
) -> None:
    """What the driver's tool says decides."""
    nvidia_smi(tmp_path, script, monkeypatch)
    said = dlo("explain", "-f", manifest(CUDA), "-o", "json")
    assert said.status == status, said
    assert words in checks(said)["Device"][1]
    assert json.loads(said.out)["backing"]["kind"] == "StagedCache"


def test_a_rank_without_a_gpu(
    dlo: Dlo, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, one GPU."""
    nvidia_smi(tmp_path, "echo 'NVIDIA H200, 143771, 143000'", monkeypatch)
    said = dlo("explain", "-f", manifest(CUDA + "parallelism: {tensor: 2}"))
    assert said.status == 1
    assert (
        said.err
        == "error: TooFewGpus: 2 ranks need a GPU each, there are 1 — lower the degrees of spec.parallelism\n"
    )


def test_memory_that_does_not_suffice(dlo: Dlo, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks allocate must fit; what is shared need not."""
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(2**20, 2**20))
    assert dlo("explain", "-f", manifest(DIGITS)).err.startswith("error: InsufficientHostMemory: ")
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(8 * 2**20, 8 * 2**20))
    said = dlo("explain", "-f", manifest(DIGITS), "-o", "json")
    assert said.status == 0
    assert checks(said)["Host memory"][0] is None
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(None, None))
    assert checks(dlo("explain", "-f", manifest(DIGITS), "-o", "json"))["Host memory"][0] is None


def test_this_machines_memory_is_read() -> None:
    """Some, and not more than there is."""
    found = machine.memory()
    assert found.total is not None
    assert found.available is not None
    assert 0 < found.available <= found.total


def test_an_engine_that_is_not_installed(
    dlo: Dlo, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named, with the way to install it."""
    monkeypatch.setattr(machine, "ENGINE_PACKAGES", ("torch", "no_such_package"))
    said = dlo("explain", "-f", manifest(DIGITS))
    assert said.status == 1
    assert said.err == (
        "error: NotInstalled: the engine's packages are not installed: no_such_package"
        " — pip install 'dlo-operator[engine]'\n"
    )
