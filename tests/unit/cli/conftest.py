"""A person at a prompt: commands in this process with captured output, in a home of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from dlo_cli.__main__ import run_app
from dlo_cli.interrupts import stopping
from unit.cli.prompt import Dlo, Said


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, so that the person's own cache root is a fresh one."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return folder


@pytest.fixture
def dlo(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Dlo:
    """Run ``dlo`` with these words."""

    def run(*words: str | Path) -> Said:
        monkeypatch.setattr("sys.argv", ["dlo", *map(str, words)])
        stopping.clear()
        status = run_app()
        out, err = capfd.readouterr()
        return Said(status, out, err)

    return run


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[[str], Path]:
    """Write a manifest whose spec is this YAML."""

    def write(spec: str) -> Path:
        file = tmp_path / "manifest.yaml"
        indented = "\n".join(f"  {line}" for line in spec.strip("\n").splitlines())
        file.write_text(
            "apiVersion: dlo.dev/v1alpha1\nkind: DiffusionDeployment\n"
            f"metadata: {{name: digits}}\nspec:\n{indented}\n"
        )
        return file

    return write
