"""`python -m dlo_engine`: help, one-line errors, the port, and that the front stays light."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from dlo_engine.__main__ import split_extra
from unit.engine.front.harness import Front

USAGE = "InvalidConfiguration"
SERVE = ("serve", "--handover", "/no/such", "--model-name", "m")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    command = [sys.executable, "-m", "dlo_engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_every_flag_has_a_help_text() -> None:
    result = run("serve", "--help")
    assert result.returncode == 0
    assert result.stderr == ""
    flags = set(re.findall(r"^  (--[a-z-]+)", result.stdout, re.MULTILINE))
    assert {"--handover", "--model-name", "--tensor", "--events", "--default-size", "--port"} <= flags
    for flag in flags:
        assert re.search(rf"^  {flag}\b.*?\n? +\S*[a-z]{{3}}", result.stdout, re.MULTILINE), flag


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), USAGE, "serve"),
        (("run",), USAGE, "run"),
        (("serve",), USAGE, "--handover"),
        ((*SERVE, "--bogus"), USAGE, "--bogus"),
        ((*SERVE, "--transfer", "AllGather"), USAGE, "--data 2"),
        ((*SERVE, "--", "--port", "1"), "ExtraArgRefused", "--port"),
        ((*SERVE, "--port", "0"), "HandoverNotFound", "/no/such"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: tuple[str, ...], code: str, says: str
) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert re.fullmatch(rf"error: {code}: .+ — .+", lines[0])
    assert says in lines[0]


def test_a_port_in_use_is_told_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Front(tmp_path, "--port", str(port)) as front:
            assert front.exit_status() == 1
            (line,) = front.error_lines
            assert line.startswith(f"error: PortInUse: cannot listen on 127.0.0.1 port {port}: ")
            assert [event["event"] for event in front.events] == ["failed"]
            assert "Ranks were spawned" not in front.stderr
            assert front.termination.read_text().startswith("PortInUse: ")


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with Front(tmp_path, "--host", "192.0.2.1") as front:
        assert front.exit_status() == 2
        assert front.error_lines[0].startswith("error: PortDenied: cannot listen on 192.0.2.1 port 0: ")


def test_a_host_that_is_no_address_is_refused(tmp_path: Path) -> None:
    with Front(tmp_path, "--host", "256.0.0.1") as front:
        assert front.exit_status() == 2
        assert front.error_lines[0].startswith("error: InvalidConfiguration: --host 256.0.0.1")


def test_importing_the_front_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, dlo_engine.__main__, dlo_engine.front.serve;"
        "heavy = {'torch', 'numpy', 'diffusers', 'transformers', 'dlo_api', 'kubernetes'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n"


def test_arguments_behind_a_lone_double_dash_are_apart() -> None:
    assert split_extra(["serve", "--", "a", "--", "b"]) == (["serve"], ["a", "--", "b"])
    assert split_extra(["serve"]) == (["serve"], [])


def test_a_library_that_lacks_is_one_line_with_what_to_install(tmp_path: Path) -> None:
    """`dlo-operator[cli]` alone has no web framework: the parent process is told too."""
    code = (
        "import sys; sys.modules['fastapi'] = None; from dlo_engine.__main__ import main;"
        "sys.exit(main(['serve', '--handover', 'x', '--model-name', 'm', '--events']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert re.fullmatch(
        r"error: EngineNotInstalled: .*fastapi.* — install dlo-operator\[engine\].*\n", result.stderr
    )
    assert '"code": "EngineNotInstalled"' in result.stdout
