"""The shape of the repository itself: traps that cost an afternoon when met late."""

import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
SOURCES = ("operator/src", "agent/src", "engine/src", "libs/src")


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks or would track, by pathspec."""
    command = ["git", "-C", str(REPO), "ls-files", "-co", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return [REPO / name for name in names if name and (REPO / name).is_file()]


def test_operator_folder_does_not_shadow_the_standard_module() -> None:
    """An `__init__.py`, conftest or test under operator/ replaces Python's own `operator` and breaks everything."""
    forbidden = [
        path
        for path in tracked("operator")
        if not path.is_relative_to(REPO / "operator/src")
        and (path.name in {"__init__.py", "conftest.py"} or path.name.startswith("test_"))
    ]
    assert forbidden == []


@pytest.mark.parametrize("source", SOURCES)
def test_modules_are_short_and_say_what_they_are_for(source: str) -> None:
    """House rule 12: under 400 lines, with a docstring that names purpose and limits."""
    modules = tracked(f"{source}/**.py", f"{source}/*.py")
    assert modules
    for module in modules:
        text = module.read_text()
        assert len(text.splitlines()) < 400, f"{module} has 400 lines or more: split it"
        assert text.lstrip().startswith('"""'), f"{module} has no module docstring"
        assert module.stem != "utils", f"{module}: name it by what it is for"


@pytest.mark.parametrize("role", ["operator", "agent", "cli"])
def test_roles_without_a_gpu_install_without_torch(role: str) -> None:
    """The control plane, the node agent and the command line stay small."""
    lines = (REPO / f"requirements/{role}.txt").read_text().splitlines()
    names = {re.split(r"[=\s;]", line, maxsplit=1)[0] for line in lines if re.match(r"^[a-z0-9]", line)}
    assert len(names) > 3
    heavy = {
        n for n in names if n in {"torch", "diffusers", "transformers", "triton"} or n.startswith("nvidia")
    }
    assert heavy == set()


@pytest.mark.parametrize("role", ["operator", "agent", "engine", "cli", "dev", "uv"])
def test_locked_requirements_are_exact_hashed_and_name_no_host(role: str) -> None:
    """Every requirement is one exact version with hashes, and no download host is committed."""
    text = (REPO / f"requirements/{role}.txt").read_text()
    assert "://" not in text
    assert "--index-url" not in text
    entries = re.findall(r"^[a-z0-9][^\n]*(?:\n    [^\n]+)*", text, flags=re.MULTILINE)
    assert entries
    for entry in entries:
        assert re.match(r"^[a-z0-9._-]+==[^\s]+", entry), entry
        assert "--hash=sha256:" in entry, entry


def test_versions_agree_between_roles() -> None:
    """One version of a library in all roles: what is tested together runs together."""
    pin = re.compile(r"^([a-z0-9._-]+==[^\s]+(?: ; [^\\]+)?)", flags=re.MULTILINE)
    everything = set(pin.findall((REPO / "requirements/dev.txt").read_text()))
    for role in ("operator", "agent", "engine", "cli"):
        versions = {
            entry.split(" ; ")[0].strip()
            for entry in pin.findall((REPO / f"requirements/{role}.txt").read_text())
        }
        known = {entry.split(" ; ")[0].strip() for entry in everything}
        assert versions <= known, versions - known
