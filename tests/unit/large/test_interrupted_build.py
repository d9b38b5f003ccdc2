"""Ctrl-C, SIGTERM and SIGKILL in the middle of a long build."""

import signal
from pathlib import Path

import pytest
from unit.cli.running import Running, wait_until


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_build_leaves_nothing_and_the_next_works(
    large_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """No entry and no leftover after the interrupt (after SIGKILL: after the next run, which builds all)."""
    ingest = tmp_path / ".cache/dlo/v1/ingest"
    entries = tmp_path / ".cache/dlo/v1/entries"
    build = ["build", str(large_model), "--tensor", "2"]
    first = Running(build, tmp_path)
    wait_until(lambda: ingest.is_dir() and len(list(ingest.rglob("*.safetensors"))) > 4)
    first.process.send_signal(number)
    status = first.end(60)
    assert first.out == []
    assert list(entries.iterdir()) == []
    if number == signal.SIGKILL:
        assert list(ingest.iterdir())
    else:
        assert status == 130
        assert first.err == ["interrupted: nothing is half-written"]
        assert list(ingest.iterdir()) == []
    second = Running(build, tmp_path)
    assert second.end() == 0, second.err
    assert len(second.out) == len(list(entries.iterdir())) == 3
    assert list(ingest.iterdir()) == []
    verify = Running(["cache", "verify"], tmp_path)
    assert verify.end() == 0, verify.err
