"""The agent as its own process on a real API server: from a spec to Ready, quiet, killed, without its disk."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api.apiserver import ApiServer
from api.life import differences
from api.node_agent import NodeAgent, powers
from api.processes import SYSTEM
from dlo_api.identity import source_id
from dlo_api.v1alpha1.source import DirectorySource, Source
from dlo_cache.entry import open_entry
from dlo_cache.root import MARKER, open_root
from dlo_cache.verify import verify_entry
from dlo_cli.samples import samples_root
from dlo_kube.gateway import Object
from fakes.proxy import WRITES, Fault, FaultProxy
from safetensors import deserialize
from unit.agent.one_node import layout, rest, source, two_ranks

SOAK = os.environ.get("DLO_SOAK") == "1"
QUIET_SECONDS = 600 if SOAK else 60
HEAL_SECONDS = 90.0
LARGE_BYTES = 200 * 10**6
_GIB = 2**30


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server for the agents of this file, so that every write in its log is theirs or the test's."""
    from api.conftest import serving

    with serving(tmp_path_factory.mktemp("agents")) as server:
        gateway = server.gateway()
        gateway.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
        gateway.close()
        yield server


@pytest.fixture
def agent(agent_server: ApiServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NodeAgent]:
    """A node of its own for each test."""
    gateway = agent_server.gateway()
    name = request.node.name.removeprefix("test_").replace("_", "-")[:50].strip("-")
    made = NodeAgent(
        agent_server, gateway, name, tmp_path, {"samples": samples_root()}, agent_server.kubeconfig
    )
    made.register()
    yield made
    gateway.close()


def ids(entries: list[Object]) -> set[str]:
    """Their names."""
    return {entry["id"] for entry in entries}


def writes(agent: NodeAgent, since: int = 0) -> list[tuple[str, str, str]]:
    """What the agent has written after that line of the audit log: verb, resource, name."""
    found = []
    for entry in agent.server.audit()[since:]:
        ref = entry.get("objectRef", {})
        ours = entry.get("userAgent", "") == "dlo-agent" and ref.get("name") == agent.node
        if ours and entry["verb"] in WRITES:
            found.append(
                (
                    entry["verb"],
                    "/".join(filter(None, (ref["resource"], ref.get("subresource")))),
                    ref["name"],
                )
            )
    return found


def check_entries(agent: NodeAgent) -> int:
    """Every published entry holds every byte that its manifest says; how many there are."""
    root = open_root(agent.root)
    keys = sorted(path.name for path in root.entries_dir.iterdir())
    for key in keys:
        with open_entry(root.entries_dir / key) as entry:
            verify_entry(entry)
    return len(keys)


@pytest.mark.timeout(900)
def test_ready_then_quiet(agent: NodeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    """H6, H12: resolves, builds what is pinned, reports, renews its Lease; then writes nothing but renewals.

    Without any power of root, as in its pod.
    """
    entries = two_ranks()
    with agent.running():
        assert agent.process is not None
        generation = agent.ask(entries, [source()])
        agent.until(lambda: agent.settled(generation, ids(entries)), "ready")
        assert powers(agent.process) == 0
        (resolved,) = agent.status()["sources"]
        # The operator pins what the first node found.
        generation = agent.ask(entries, [source(digest=resolved["digest"])])
        agent.until(lambda: agent.settled(generation, ids(entries)), "ready, pinned")
        agent.until(agent.renewed, "a renewed Lease")
        assert agent.condition("StorageHealthy")[0] == "True"
        assert check_entries(agent) == len(entries)
        taken = writes(agent)
        time.sleep(5)
        since, before, status = len(agent.server.audit()), agent.renewed(), agent.status()
        free = []
        for _ in range(QUIET_SECONDS):
            free.append(os.statvfs(agent.root).f_bavail)
            time.sleep(1)
        told = list(differences(agent.status(), status))
        written = writes(agent, since)
        renewals = [write for write in written if write == ("patch", "leases", agent.node)]
        more = [write for write in written if write not in renewals]
        # Others use this disk too: what they took or gave back may be told, by steps of a hundredth of it.
        assert [line for line in told if not line.startswith("/root/freeBytes:")] == []
        moved = (max(free) - min(free)) // (os.statvfs(agent.root).f_blocks // 100)
        assert len(more) <= (1 + moved) * len(told), more
        assert 1 <= len(renewals) <= QUIET_SECONDS / 30
        assert agent.renewed() > before
        assert agent.process.poll() is None
    with capsys.disabled():
        sys.stdout.write(
            f"\nagent: {len(taken)} writes to Ready; in {QUIET_SECONDS} s of quiet {len(renewals)} renewals of its"
            f" Lease and {len(more)} other writes\n"
        )


def large_checkpoint(folder: Path) -> Source:
    """The sample pipeline with as many blocks as it takes for 200 MB."""
    sample = samples_root() / "digits"
    shutil.copytree(sample, folder)
    for file in (folder / "transformer").glob("diffusion_pytorch_model*"):
        file.unlink()
    old: dict[str, dict[str, Any]] = {}
    for file in sorted((sample / "transformer").glob("*.safetensors")):
        old.update(deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
    config = json.loads((sample / "transformer" / "config.json").read_text())
    stacks = {"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"}
    factor = LARGE_BYTES // sum(len(tensor["data"]) for tensor in old.values()) + 1
    new: dict[str, dict[str, Any]] = {}
    for name, tensor in old.items():
        whole = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data": bytes(tensor["data"])}
        stack, _, below = name.partition(".")
        if stack not in stacks:
            new[name] = whole
            continue
        number, _, tail = below.partition(".")
        for copy in range(factor):
            new[f"{stack}.{int(number) + copy * config[stacks[stack]]}.{tail}"] = whole
    for key in stacks.values():
        config[key] *= factor
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(_safetensors(new))
    return Source(directory=DirectorySource(root="large", path=folder.name))


def _safetensors(tensors: dict[str, dict[str, Any]]) -> bytes:
    """The file format: the length of a JSON header, the header, the bytes."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + len(tensor["data"])
        header[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return b"".join([struct.pack("<Q", len(text)), text, *(tensor["data"] for tensor in tensors.values())])


def test_killed_in_the_middle_of_builds(agent: NodeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL while bytes are written, again and again: nothing torn is ever published; then it is Ready."""
    large = large_checkpoint(agent.folder / "sources" / "large")
    agent.sources["large"] = agent.folder / "sources"
    name = source_id(large)
    entries = [layout(0, of=name), layout(1, of=name), rest(of=name)]
    generation = agent.ask(entries, [source(large)])
    ingest, kills, seen = agent.root / "v1" / "ingest", 0, []
    for _ in range(5):
        if agent.settled(generation, ids(entries)):
            break
        agent.start()
        # Each time a little further into the build.
        wanted = 10_000_000 * (1 + 2 * kills)
        agent.until(
            lambda w=wanted: _bytes_below(ingest) > w or agent.settled(generation, ids(entries)),  # type: ignore[misc]
            "building",
            pause=0.002,
        )
        written = _bytes_below(ingest)
        agent.kill()
        if written:
            kills += 1
            seen.append(written // 10**6)
        check_entries(agent)
    assert kills >= 3
    with agent.running():
        agent.until(lambda: agent.settled(generation, ids(entries)), "ready after kills", 120)
        assert agent.condition("StorageHealthy")[0] == "True"
    assert check_entries(agent) == len(entries)
    assert _bytes_below(ingest) == 0
    with capsys.disabled():
        sys.stdout.write(
            f"\nagent killed {kills} times in mid-build, after {seen} MB: nothing torn, then Ready\n"
        )


def _bytes_below(folder: Path) -> int:
    """Bytes on the disk, so that holes do not count."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += (Path(place) / file).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def test_disk_that_goes_and_comes_back(agent: NodeAgent) -> None:
    """No marker, a directory that may not be read: told by their reason, taken up again, never an exit or a rebuild."""
    entries = two_ranks()
    marker, aside = agent.root / MARKER, agent.folder / "aside"
    marker.rename(aside)
    with agent.running():
        assert agent.process is not None
        generation = agent.ask(entries, [source()])
        agent.until(
            lambda: agent.condition("StorageHealthy") == ("False", "RootNotMounted"), "told at the start"
        )
        assert list((agent.root / "v1" / "entries").iterdir()) == []
        aside.rename(marker)
        agent.until(lambda: agent.settled(generation, ids(entries)), "ready once it is mounted")
        built = _times(agent)
        marker.rename(aside)
        agent.until(lambda: agent.condition("StorageHealthy") == ("False", "RootNotMounted"), "told later")
        aside.rename(marker)
        agent.until(lambda: agent.settled(generation, ids(entries)), "ready again")
        agent.until(lambda: agent.condition("StorageHealthy")[0] == "True", "healthy again")
        directory = agent.root / "v1" / "entries"
        directory.chmod(0)
        try:
            agent.until(lambda: agent.condition("StorageHealthy")[0] == "False", "told that it may not read")
        finally:
            directory.chmod(0o750)
        agent.until(lambda: agent.condition("StorageHealthy")[0] == "True", "healthy once it may")
        agent.until(lambda: agent.settled(generation, ids(entries)), "ready once it may")
        assert _times(agent) == built
        assert agent.starts == 1
        assert agent.process.poll() is None


def _times(agent: NodeAgent) -> dict[str, int]:
    """When each entry was published."""
    return {path.name: path.stat().st_mtime_ns for path in (agent.root / "v1" / "entries").iterdir()}


WATCH, LIST, PATCH = frozenset({"watch"}), frozenset({"list"}), frozenset({"patch"})
ALL = frozenset({"watch", "list", "get", "patch"})
FAULTS = (
    ("watch cut in mid-event", (Fault("Cut", WATCH),), 3.0),
    ("410 as an event", (Fault("Gone", WATCH, times=2),), 3.0),
    (
        "410 as an answer to a watch",
        (Fault("Gone", WATCH, times=1), Fault("Refuse", WATCH, status=410, times=2)),
        3.0,
    ),
    ("503 to everything", (Fault("Refuse", ALL, status=503),), 8.0),
    ("429 with Retry-After to everything", (Fault("Refuse", ALL, status=429, retry_after=1),), 6.0),
    ("403 to everything", (Fault("Refuse", ALL, status=403),), 6.0),
    ("500 to two writes", (Fault("Refuse", PATCH, status=500, times=2),), 3.0),
    *(
        (
            ("half-open watch", (Fault("Mute", WATCH),), 3.0),
            ("mute writes", (Fault("Mute", PATCH, times=1),), 3.0),
        )
        * SOAK
    ),
)


@pytest.mark.timeout(900)
def test_h18_api_faults(agent: NodeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    """Each fault while the spec changes: reported in 90 s after it is over, by the same process, without a storm."""
    both = [two_ranks(retention=600), [layout(0, retention=600)]]
    told, struck = [], 0
    with FaultProxy(agent.server.url, agent.server.ca_file) as proxy:
        agent.kubeconfig = proxy.kubeconfig(agent.server.kubeconfig, agent.folder / "proxied")
        with agent.running():
            generation = agent.ask(both[0], [source()])
            agent.until(lambda: agent.settled(generation, ids(both[0])), "ready")
            for number, (name, meant, seconds) in enumerate(FAULTS, 1):
                before = len(proxy.writes)
                faults = [proxy.break_(replace(fault)) for fault in meant]
                entries = both[number % 2]
                generation = agent.ask(entries, [source()])
                time.sleep(seconds)
                agent.until(lambda f=faults: all(fault.struck for fault in f), f"{name} met a request")  # type: ignore[misc]
                proxy.heal()
                healed = time.monotonic()
                agent.until(
                    lambda g=generation, e=entries: agent.settled(g, ids(e)),  # type: ignore[misc]
                    f"reported after {name}",
                    HEAL_SECONDS,
                )
                hits = [fault.struck for fault in faults]
                struck += sum(hits)
                told.append(
                    f"{name:36} struck {sum(hits):3}, reported after {time.monotonic() - healed:5.1f} s"
                )
                assert len(proxy.writes) - before <= 6, proxy.writes[before:]
            assert not proxy.deletes
    assert agent.starts == 1
    with capsys.disabled():
        sys.stdout.write(
            "\n" + "\n".join(told) + f"\n{len(FAULTS)} faults struck {struck} requests of the agent\n"
        )
