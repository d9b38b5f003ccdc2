"""The real agent's process for one node of a real API server; its caches lie in a folder of the test.

Run by root it keeps the uid but none of root's powers, since those would hide every fault of permissions.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api.apiserver import ApiServer
from api.processes import SYSTEM, stop
from dlo_api.identity import node_lease_name
from dlo_api.names import OPERATOR_FIELD_MANAGER
from dlo_cache.root import init_root
from dlo_kube.client import ClusterGateway
from dlo_kube.gateway import Object
from dlo_kube.kinds import LEASE, NODE, NODE_WEIGHT_CACHE
from dlo_operator import nodes
from dlo_operator.reconcile.record import Claim

_SET_SECUREBITS, _NO_ROOT_LOCKED = 28, 0b11


@dataclass
class NodeAgent:
    """A node, its NodeWeightCache and Lease as the operator makes them, and the agent that serves them.

    Attributes:
        kubeconfig: how the agent reaches the API server.
        sources: folders by the name of their source root.
        starts: how many processes there were.
    """

    server: ApiServer
    gateway: ClusterGateway
    node: str
    folder: Path
    sources: dict[str, Path]
    kubeconfig: Path
    flags: Sequence[str] = ()
    starts: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def root(self) -> Path:
        """The cache root."""
        return self.folder / "cache"

    def register(self) -> None:
        """The node comes to the cluster; its disk is mounted."""
        init_root(self.root)
        made = self.gateway.create({"apiVersion": "v1", "kind": NODE.kind, "metadata": {"name": self.node}})
        self.gateway.apply(nodes.cache_object(made, Claim()), manager=OPERATOR_FIELD_MANAGER)
        self.gateway.apply(nodes.lease_object(made, SYSTEM), manager=OPERATOR_FIELD_MANAGER)

    def ask(self, entries: list[Object], sources: list[Object]) -> int:
        """The operator writes the spec; its generation."""
        identity = {"apiVersion": NODE_WEIGHT_CACHE.api_version, "kind": NODE_WEIGHT_CACHE.kind}
        spec = {"sources": sources, "entries": entries}
        obj = {**identity, "metadata": {"name": self.node}, "spec": spec}
        found: int = self.gateway.apply(obj, manager=OPERATOR_FIELD_MANAGER)["metadata"]["generation"]
        return found

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the process."""
        words = {
            "--node": self.node,
            "--root": str(self.root),
            "--namespace": SYSTEM,
            "--port": "0",
            "--kubeconfig": str(self.kubeconfig),
        }
        roots = [word for name, path in self.sources.items() for word in ("--source-root", f"{name}={path}")]
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dlo_agent", "run"),
                    *(word for pair in words.items() for word in pair),
                    *(*roots, *self.flags),
                ],
                stdout=log,
                stderr=log,
                preexec_fn=_without_powers if os.geteuid() == 0 else None,  # noqa: PLW1509
            )
        self.starts += 1
        return self.process

    @contextmanager
    def running(self) -> Iterator[None]:
        """Started; stopped at the end, unless it is gone by then."""
        self.start()
        try:
            yield
        finally:
            assert self.process is not None
            stop(self.process)

    def kill(self) -> None:
        """SIGKILL, and gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def status(self) -> Any:
        """What it has reported."""
        found = self.gateway.get(NODE_WEIGHT_CACHE, self.node)
        return (found or {}).get("status", {})

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition; empty words before it is reported."""
        for found in self.status().get("conditions", ()):
            if found["type"] == kind:
                return found["status"], found["reason"]
        return "", ""

    def renewed(self) -> str:
        """When it renewed its Lease last; empty before."""
        lease = self.gateway.get(LEASE, node_lease_name(self.node), SYSTEM) or {}
        return str(lease.get("spec", {}).get("renewTime", ""))

    def settled(self, generation: int, ids: set[str]) -> bool:
        """Whether it has reported, for this generation of the spec, exactly these entries, all Ready."""
        status = self.status()
        phases = {entry["id"]: entry["phase"] for entry in status.get("entries", ())}
        return status.get("observedGeneration") == generation and phases == dict.fromkeys(ids, "Ready")

    def until(self, done: Callable[[], Any], what: str, seconds: float = 60.0, pause: float = 0.1) -> None:
        """Waits; the process has to live on."""
        end = time.monotonic() + seconds
        while not done():
            assert self.process is not None
            assert self.process.poll() is None, f"the agent ended with {self.process.poll()}\n{self.tail()}"
            assert time.monotonic() < end, f"not {what}: {self.status()}\n{self.tail()}"
            time.sleep(pause)

    def tail(self) -> str:
        """The end of its log."""
        return (self.folder / "agent.log").read_text(errors="replace")[-3000:]


def powers(process: subprocess.Popen[bytes]) -> int:
    """The capabilities that a process has, as a bit set."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16)


def _without_powers() -> None:
    """In the child: what it executes next gains no capability by its uid."""
    if ctypes.CDLL(None).prctl(_SET_SECUREBITS, _NO_ROOT_LOCKED, 0, 0, 0) != 0:
        raise OSError("could not give up the powers of root")
