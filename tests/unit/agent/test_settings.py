"""What the command line takes, and refuses by name in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from dlo_agent.__main__ import run_command
from dlo_agent.errors import UsageError
from dlo_agent.settings import parse_endpoints, parse_layouts, parse_source_roots
from dlo_cache.layouts import builtin_layout


def test_endpoints_by_name() -> None:
    """Names and addresses, without a slash at the end."""
    given = ["default=https://hub.example/", "mirror=http://10.0.0.7:8080/hf"]
    assert parse_endpoints("--hub-endpoint", given) == {
        "default": "https://hub.example",
        "mirror": "http://10.0.0.7:8080/hf",
    }


@pytest.mark.parametrize(
    "pair",
    [
        "https://hub.example",
        "a=",
        "A=https://hub.example",
        "a=ftp://hub.example",
        "a=https://",
        "a=https://user:secret@hub.example",
        "a=https://hub.example?token=secret",
        "a=http://hub:99999",
        "a=http://[::1",
    ],
)
def test_what_is_no_endpoint(pair: str) -> None:
    """Refused with the flag's name."""
    with pytest.raises(UsageError, match="--s3-endpoint") as caught:
        parse_endpoints("--s3-endpoint", [pair])
    assert "secret" not in str(caught.value)


def test_a_name_given_twice() -> None:
    """By every flag of that form."""
    for parse, value in ((parse_source_roots, "/a"), (parse_layouts, "/a")):
        with pytest.raises(UsageError, match="twice"):
            parse([f"a={value}", f"a={value}"])
    with pytest.raises(UsageError, match="twice"):
        parse_endpoints("--hub-endpoint", ["a=http://a", "a=http://b"])


def test_layouts_by_name(tmp_path: Path) -> None:
    """Read and checked at the start."""
    flux = builtin_layout("FluxTransformer2DModel")
    assert flux is not None
    (tmp_path / "flux.json").write_text(flux.to_json())
    assert parse_layouts([f"My.flux-1={tmp_path}/flux.json"]) == {"My.flux-1": flux}


@pytest.mark.parametrize("content", [None, "{", '{"id": "x"}'])
def test_a_layout_that_cannot_be_read(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with flag, name, file and fault; status 2."""
    if content is not None:
        (tmp_path / "bad.json").write_text(content)
    words = ["run", "--node", "n", "--kubeconfig", "/nowhere", "--layout", f"mine={tmp_path}/bad.json"]
    assert run_command(words, {}) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"--layout mine={tmp_path}/bad.json" in said
