"""What a command does where its streams, its folders or its words are odd: one true line, never a traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dlo_api.load import load_manifest
from dlo_cli.console import Console
from dlo_cli.engine import engine_command
from dlo_cli.errors import CliError, error_line, printable
from dlo_cli.interrupts import SIGNALS
from dlo_cli.roots import user_root
from dlo_cli.scratch import PREFIX, Scratch, sweep
from unit.cache.store.processes import NOBODY, in_child
from unit.cli.prompt import Dlo, files_below

DIGITS = "model: {source: {directory: {root: samples, path: digits}}}\nengine: {device: Cpu}\n"


def shell(words: str, home: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell line in which $DLO is the command."""
    dlo = f"{sys.executable} -m dlo_cli"
    return subprocess.run(
        ["/bin/bash", "-c", words.replace("$DLO", dlo)],
        capture_output=True,
        timeout=60,
        env={**os.environ, "HOME": str(home), **environment},
    )


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        ("$DLO cache ls >&-", 0, b""),
        ("$DLO version >&-", 0, b""),
        ("$DLO cache ls <&-", 0, b""),
        ("$DLO plan -f missing.yaml 2>&-", 2, b""),
        ("$DLO plan -f missing.yaml 2>/dev/full", 2, b""),
        ("$DLO version >/dev/full", 1, b"error: OutputLost: "),
        ("$DLO cache ls -o json >/dev/full", 1, b"error: OutputLost: "),
        ("$DLO crds >/dev/full", 1, b"error: OutputLost: "),
        ("$DLO version | true; exit ${PIPESTATUS[0]}", 1, b""),
    ],
)
def test_streams_that_are_closed_full_or_left(home: Path, words: str, status: int, line: bytes) -> None:
    """A stream that takes nothing is said where that can be said; the exit status is always right."""
    said = shell(words, home)
    assert said.returncode == status, said
    errors = [text for text in said.stderr.splitlines() if not text.startswith(b"Cache ")]
    assert len(errors) == bool(line), said
    assert b"".join(errors).startswith(line)


def test_a_terminal_without_unicode_gets_a_whole_table(home: Path, manifest: Callable[[str], Path]) -> None:
    """Characters that the encoding lacks are spelled out."""
    said = shell(f"$DLO plan -f {manifest(DIGITS)}", home, PYTHONIOENCODING="ascii:strict")
    assert said.returncode == 0, said
    assert b"rest of the pipeline  \\u2013" in said.stdout
    assert b"Copied a step" in said.stdout


def test_names_of_files_cannot_write_on_the_terminal(dlo: Dlo, capfd: pytest.CaptureFixture[str]) -> None:
    """Line ends and escape sequences in a name are spelled out, in errors and in progress."""
    said = dlo("plan", "-f", "a\nb\x1b[31m.yaml")
    assert len(said.err.splitlines()) == 1
    assert "a\\nb\\x1b[31m.yaml" in said.err
    Console().step("Cache", "a\r\nb\x9b")
    assert capfd.readouterr().err == "Cache      a\\r\\nb\\x9b\n"
    assert printable("ein Süßes — ✓") == "ein Süßes — ✓"


def test_several_problems_keep_a_line_each(dlo: Dlo, manifest: Callable[[str], Path]) -> None:
    """One error may list what is wrong line by line."""
    said = dlo("plan", "-f", manifest(DIGITS + "a: 1\nb: 2\n"))
    assert said.err.count("unknown field") == 2
    assert len(said.err.splitlines()) == 3


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_home_that_is_no_folder_is_looked_up(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """The cache never lands in the folder that a person happens to stand in, nor in /."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_root() == Path("~root" if os.getuid() == 0 else "~").expanduser() / ".cache/dlo"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_root() == Path("/x/dlo")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a number that no list of users has."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def as_a_number() -> None:
        with pytest.raises(CliError, match="has no home folder") as refused:
            user_root()
        assert "--cache-root" in error_line(refused.value)

    assert in_child(as_a_number, uid=NOBODY - 1) == 0


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "-f", ""),
        ("build", ""),
        ("cache", "init", "--cache-root", ""),
        ("cache", "ls", "--cache-root", ""),
    ],
)
def test_a_path_of_no_characters_is_not_this_folder(
    dlo: Dlo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """An unset variable on the command line does not turn the current folder into a cache root."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    said = dlo(*words)
    assert said.status == 2
    assert "named by nothing" in said.err
    assert files_below(tmp_path / "here") == []


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (("--host", "no address"), 2, "--host is 'no address'"),
        (("--host", ""), 2, "--host is ''"),
        (("--host", "192.0.2.1"), 2, "PortDenied"),
        (("--port", "{taken}"), 1, "PortInUse"),
    ],
)
def test_an_address_that_cannot_be_had_is_said_before_a_build(
    dlo: Dlo,
    home: Path,
    manifest: Callable[[str], Path],
    words: tuple[str, str],
    status: int,
    expected: str,
) -> None:
    """Nobody waits for a long build to learn that the port is taken."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = dlo("run", "-f", manifest(DIGITS), *(word.format(taken=port) for word in words))
    assert said.status == status
    assert expected in said.err
    assert files_below(home) == []


def test_files_of_the_current_folder_are_not_imported(
    tmp_path: Path, manifest: Callable[[str], Path]
) -> None:
    """A file `http.py` where the user stands is none of the engine's."""
    for name in ("http", "argparse", "dlo_obs"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)\n")
    deployment = load_manifest(manifest(DIGITS).read_text(), "manifest.yaml")
    command = engine_command(deployment, tmp_path / "none.json", host="127.0.0.1", port=0)
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended
    assert "HandoverNotFound" in ended.stdout


def test_interrupts_while_the_commands_load_are_interrupts(home: Path) -> None:
    """Ctrl-C in the first tenths of a second: exit 130 and a line, as later."""
    code = (
        "import os, signal, sys, dlo_cli.__main__ as entry\n"
        "assert 'typer' not in sys.modules\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['dlo', 'version']\n"
        "entry.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "interrupted: nothing is half-written\n")


def test_signals_that_we_were_started_to_ignore_stay_ignored() -> None:
    """Under nohup the end of the terminal ends nothing; a third interrupt never breaks the tidying up."""
    code = (
        "import os, signal\n"
        "from dlo_cli import interrupts\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "interrupts.watch()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "for _ in range(4):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        print('not', interrupts.stopping.is_set())\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', interrupts.stopping.is_set())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["interrupted", "True"] * 2 + ["not", "True"] * 2, ended
    assert signal.SIGHUP in SIGNALS


def test_scratch_folders_of_dead_runs_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is removed when its lock is free, and only then."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = tmp_path / f"{PREFIX}dead"
    dead.mkdir()
    (dead / "handover.json").write_text("{}")
    with Scratch() as first:
        assert not dead.exists()
        with Scratch() as second:
            assert first.path.exists()
            assert second.path.exists()
        inherited = os.dup(first.lock)
    first.path.mkdir()
    os.close(inherited)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_for_temporary_files_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a writable /tmp: one line with what to set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(CliError, match="TMPDIR"), Scratch():
        pass


def test_help_has_no_cut_off_lines(dlo: Dlo) -> None:
    """Every command says in one short line what it is for."""
    for words in (("--help",), ("cache", "--help")):
        said = dlo(*words)
        assert said.status == 0
        assert "..." not in said.out.split("Commands:")[1]


def test_what_is_in_use_stays_and_the_rest_goes(dlo: Dlo, home: Path) -> None:
    """`dlo cache rm` of several entries removes those that it can, and names those that it cannot."""
    from dlo_cache.entry import open_entry
    from dlo_cli.samples import samples_root

    keys = dlo("build", samples_root() / "digits").out.split()
    entries = home / ".cache/dlo/v1/entries"
    with open_entry(entries / keys[0]):
        said = dlo("cache", "rm", *keys)
        assert said.status == 1
        assert "error: Busy: " in said.err
        assert [path.name for path in entries.iterdir()] == keys[:1]
    assert dlo("cache", "rm", keys[0]).status == 0
