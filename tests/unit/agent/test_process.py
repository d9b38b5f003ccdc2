"""The agent as a process: killed, doubled, asked for its health, its heartbeat, its commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from dlo_agent.__main__ import run_command
from dlo_agent.errors import UsageError
from dlo_agent.lease import Heartbeat
from dlo_agent.service import STALE_SECONDS, Service
from dlo_agent.settings import Settings, parse_size, parse_source_roots
from dlo_agent.storage import SecondAgent
from dlo_cache.root import init_root
from dlo_cli.samples import samples_root
from dlo_kube.errors import Unavailable
from dlo_kube.kinds import LEASE, NODE_WEIGHT_CACHE
from unit.agent.one_node import NODE, OneNode, two_ranks

TESTS = Path(__file__).parents[2]
SLOW_BUILD = """
import sys, time
from pathlib import Path
from dlo_agent.board import Board
from unit.agent.one_node import OneNode, two_ranks

def stand_still(self, entry_ids, phase, done, total):
    if phase == "Building" and done * 2 > total:
        print("half", flush=True)
        time.sleep(60)

Board.advance = stand_still
node = OneNode(Path(sys.argv[1]))
node.ask(two_ranks())
node.settle()
"""


def test_killed_in_the_middle_of_a_build(tmp_path: Path) -> None:
    """SIGKILL at half: nothing is visible; the next process sweeps the stage and finishes."""
    root = init_root(tmp_path / "cache").path
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert child.stdout is not None
        assert any("half" in line for line in child.stdout)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close() if child.stdout else None
    assert list((root / "v1/entries").iterdir()) == []
    assert len(list((root / "v1/ingest").iterdir())) == 2
    node = OneNode(root)
    node.ask(two_ranks())
    status = node.settle()
    assert {each["phase"] for each in status["entries"]} == {"Ready"}
    assert list((root / "v1/ingest").iterdir()) == []
    node.close()


def test_a_second_agent_refuses(node: OneNode) -> None:
    """One owner a root; the first goes on, and when it has ended the next one starts."""
    node.ask(two_ranks())
    node.turn()
    second = OneNode(node.settings.root)
    with pytest.raises(SecondAgent, match="in use by process"):
        second.turn()
    node.settle()
    assert node.condition("Ready")["status"] == "True"
    node.loop.close()
    second.ask(two_ranks())
    second.settle()
    assert second.condition("Ready")["status"] == "True"
    second.close()


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_whole_agent(tmp_path: Path) -> None:
    """Watch, loop, heartbeat and HTTP together: a spec written later is built, seen in status and metrics."""
    node = OneNode(tmp_path / "cache", port=0)
    node.close()
    (tmp_path / "cache").mkdir()
    where = {"name": NODE, "namespace": "dlo-system"}
    lease = {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": where}
    node.cluster.create(lease)
    service = Service(node.settings, node.cluster)
    running = threading.Thread(target=service.run)
    running.start()
    try:
        node.ask(two_ranks())
        until(lambda: node.status() and node.condition("StorageHealthy")["reason"] == "RootNotMounted")
        assert get(service.health.port, "/healthz")[0] == 200, "a bad disk is reported, not restarted"
        assert get(service.health.port, "/readyz")[0] == 503
        init_root(tmp_path / "cache")
        service.loop.changed(node.cluster.get(NODE_WEIGHT_CACHE, NODE))
        until(lambda: node.condition("Ready")["status"] == "True")
        until(lambda: "renewTime" in (node.cluster.get(LEASE, NODE, "dlo-system") or {}).get("spec", {}))
        assert get(service.health.port, "/readyz") == (200, "ok\n")
        until(
            lambda: 'dlo_cache_wanted_entries{state="Ready"} 3.0' in get(service.health.port, "/metrics")[1]
        )
        _, metrics = get(service.health.port, "/metrics")
        for line in (
            'dlo_cache_requests_total{result="miss"} 3.0',
            'dlo_cache_entries{state="referenced"} 3.0',
            'dlo_verify_total{result="ok"} 3.0',
            "dlo_fetch_inflight 0.0",
            "dlo_quarantined_entries 0.0",
        ):
            assert line in metrics
        assert get(service.health.port, "/other")[0] == 404
        service.loop.last_turn -= STALE_SECONDS + 1
        assert "has not turned" in service.not_alive()
    finally:
        service.stop()
        node.cluster.close_streams()
        running.join(30)
    assert not running.is_alive()


def until(arrived: object, seconds: float = 30.0) -> None:
    """Waits for a condition."""
    assert callable(arrived)
    end = time.monotonic() + seconds
    while not arrived():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_the_heartbeat(node: OneNode) -> None:
    """Renews the lease that is there, makes none, and stops with the loop."""
    alive = True
    beat = Heartbeat(
        node.cluster, node=NODE, namespace="ns", holder=NODE, alive=lambda: alive, clock=lambda: node.now
    )
    assert not beat.beat()
    assert node.cluster.objects(LEASE) == ()
    node.cluster.create(
        {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": {"name": NODE, "namespace": "ns"}}
    )
    assert beat.beat()
    (lease,) = node.cluster.objects(LEASE)
    assert lease["spec"] == {"holderIdentity": NODE, "renewTime": "2030-03-17T17:46:40.000000Z"}
    alive = False
    assert not beat.beat()
    alive = True
    node.cluster.fail(1, Unavailable("away"))
    with pytest.raises(Unavailable):
        beat.beat()


def test_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A root is made, twice without harm; errors are one line with a status."""
    assert run_command(["init-root", "--root", str(tmp_path / "cache")], {}) == 0
    assert run_command(["init-root", "--root", str(tmp_path / "cache")], {}) == 0
    assert capfd.readouterr().out.count("is a cache root") == 2
    (tmp_path / "file").write_text("")
    assert run_command(["init-root", "--root", str(tmp_path / "file")], {}) == 1
    assert run_command(["run", "--root", str(tmp_path / "cache")], {}) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["RootNotDirectory", "Usage"]


def test_a_gate_that_waits_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """By its own handler: the first process of a container has no other, and its pod waits for it."""
    want = f'[{{"rank":null,"component":null,"coordinate":null,"kind":"Files","inputKey":"{"a" * 64}",'
    want += f'"manifestSha256":"{"b" * 64}"}}]'
    words = ["gate", "--root", str(tmp_path), "--out", str(tmp_path / "out.json"), "--want-json", want]
    with subprocess.Popen(
        [sys.executable, "-m", "dlo_agent", *words], stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stderr is not None
        assert "RootNotMounted" in waiting.stderr.readline()
        waiting.terminate()
        assert waiting.wait(timeout=10) == 128 + signal.SIGTERM


def test_no_cluster_is_one_line(tmp_path: Path) -> None:
    """The real command, as a process of its own."""
    words = ["run", "--root", str(tmp_path), "--node", "n", "--kubeconfig", str(tmp_path / "none")]
    ended = subprocess.run(
        [sys.executable, "-m", "dlo_agent", *words], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: NoCredentials: ")


def test_settings_are_checked(tmp_path: Path) -> None:
    """Each wrong value is named."""
    assert parse_source_roots(["a=/x", "b-1=/y"]) == {"a": Path("/x"), "b-1": Path("/y")}
    assert [parse_size(text) for text in ("0", "20Gi", "500M")] == [0, 20 << 30, 500_000_000]
    for wrong in ("a", "a=", "A=/x", "a=relative"):
        with pytest.raises(UsageError, match="NAME=DIR"):
            parse_source_roots([wrong])
    with pytest.raises(UsageError, match="given twice"):
        parse_source_roots(["a=/x", "a=/y"])
    for wrong in ("", "1.5Gi", "-1", "20 Gi"):
        with pytest.raises(UsageError, match="no size"):
            parse_size(wrong)
    with pytest.raises(UsageError, match="absolute"):
        Settings(node="n", root=Path("relative"), namespace="ns")
    assert samples_root().is_dir()
