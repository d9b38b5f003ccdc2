"""Operator, agent and engine at work, each serving its real registry: what a Prometheus would find in a cluster.

The operator's world and the API server are in memory, as in its own tests; agent, cache root, engine and ranks
are the real ones.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from dlo_agent.service import Service
from dlo_api.v1alpha1.source import DirectorySource, Source
from dlo_cache.root import init_root
from dlo_kube.client import ClusterGateway
from dlo_kube.connection import by_address
from dlo_kube.kinds import DIFFUSION_DEPLOYMENT, LEASE, NODE, NODE_WEIGHT_CACHE
from dlo_operator.leader import Leader
from dlo_operator.runner import Runner
from fakes.engine_entries import prepare
from fakes.tiny_flux import make_tiny_flux
from prometheus_client import generate_latest, start_http_server
from unit.agent.one_node import NODE as NODE_NAME
from unit.agent.one_node import OneNode, source, two_ranks
from unit.engine.front.harness import Front
from unit.kube.http_server import Answer, HttpServer
from unit.monitoring.server import Target
from unit.operator.world import NAMESPACE, World

RUNTIME = "dlo_engine.runtime:Runtime"
NAME = "digits"
MISSING = Source(directory=DirectorySource(root="samples", path="not-there"))
ENGINE_LABELS = {"namespace": NAMESPACE, "name": NAME, "pod": f"{NAME}-1", "node": NODE_NAME}


class Operator:
    """The operator in its world of two nodes and two deployments, one of which cannot be had."""

    def __init__(self) -> None:
        self.world = World()
        self.metrics = self.world.operator.metrics
        self._server, self._thread = start_http_server(0, addr="127.0.0.1", registry=self.metrics.registry)
        self.target = Target(
            self._server.server_port, {"job": "dlo-operator", "namespace": "dlo-system", "pod": "operator-0"}
        )

    def work(self) -> None:
        """A deployment becomes ready, another one does not; the API server is asked; the loop's lag measured."""
        world = self.world
        world.content.reasons["gone"] = "SourceNotFound"
        with HttpServer(lambda _: Answer()) as server:
            gateway = ClusterGateway(by_address(server.url), observe=self.metrics.served)
            world.create(NAME)
            world.settle()
            gateway.get(NODE_WEIGHT_CACHE, NODE_NAME)
            self._measure_lag()
            # After a scrape or two: what only ever grew before the first one has no rate.
            world.create("lost", {"spec.model.source": {"directory": {"root": "samples", "path": "gone"}}})
            world.settle()
            gateway.get(NODE_WEIGHT_CACHE, NODE_NAME)
            gateway.close()
        for kind in (DIFFUSION_DEPLOYMENT, NODE, NODE_WEIGHT_CACHE):
            for obj in world.cluster.objects(kind):
                world.operator.tell(obj, deleted=False)
        world.operator.problem()

    def _measure_lag(self) -> None:
        """The runner's own measurement, for a few seconds, in an event loop of its own."""
        operator = self.world.operator
        leader = Leader(
            self.world.cluster, "dlo-system", "operator-0", monotonic=time.monotonic, now=operator.clock.now
        )
        runner = Runner(operator, leader, lambda **_: None, random.Random(1))

        async def measure() -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(runner._measure_lag(), 2.5)

        asyncio.run(measure())

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Agent:
    """The whole agent of one node on a cache root, with an API server in memory."""

    def __init__(self, folder: Path) -> None:
        root = init_root(folder / "cache").path
        self.node = OneNode(root, port=0, warm_budget_bytes=1 << 30)
        self.node.close()
        lease = {"name": NODE_NAME, "namespace": "dlo-system"}
        self.node.cluster.create({"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": lease})
        self._service = Service(self.node.settings, self.node.cluster)
        self._thread = threading.Thread(target=self._service.run)
        self._thread.start()
        self.target = Target(
            self._service.health.port, {"job": "dlo-agent", "namespace": "dlo-system", "node": NODE_NAME}
        )

    def work(self) -> None:
        """Resolves, builds, verifies and warms the sample model; fails to find another one."""
        self.node.ask(two_ranks(), [source(), source(MISSING)])
        value = self._service.loop.metrics.registry.get_sample_value
        limit = time.monotonic() + 60
        while not (
            (value("dlo_cache_resident_bytes") or 0) > 0
            and value("dlo_cache_wanted_entries", {"state": "Ready"}) == 3
            and (value("dlo_agent_lease_renewed_timestamp_seconds") or 0) > 0
        ):
            assert time.monotonic() < limit, self.node.status()
            time.sleep(0.05)

    def exposition(self) -> str:
        """What it answers to a scrape."""
        address = f"http://127.0.0.1:{self._service.health.port}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return str(answer.read().decode())

    def close(self) -> None:
        """Ends the agent."""
        self._service.stop()
        self.node.cluster.close_streams()
        self._thread.join(30)
        assert not self._thread.is_alive()


class Engine:
    """A real engine on the CPU: one rank that streams a tiny FLUX pipeline from cache entries."""

    def __init__(self, folder: Path) -> None:
        prepare(make_tiny_flux(folder / "flux"), folder / "root")
        flags = ("--threads", "1", "--default-size", "32x32", "--default-steps", "2")
        self.front = Front(folder, *flags, runtime=RUNTIME)
        try:
            self.front.ready()
        except BaseException:
            self.close()
            raise
        self.target = Target(self.front.port, {"job": "dlo-engine", **ENGINE_LABELS})

    def work(self) -> None:
        """Pictures, and a request that is refused."""
        for number in range(3):
            assert self.front.generate(prompt=f"picture {number}", response_format="url")[0] == 200
        assert self.front.generate(prompt="")[0] == 400

    def exposition(self) -> str:
        """What it answers to a scrape."""
        return str(self.front.get("/metrics")[2])

    def close(self) -> None:
        """Ends the engine."""
        self.front.__exit__()


@dataclass(frozen=True)
class Parts:
    """All three."""

    operator: Operator
    agent: Agent
    engine: Engine

    def work(self) -> None:
        """Each does what it is for, once."""
        self.operator.work()
        self.agent.work()
        self.engine.work()

    def expositions(self) -> tuple[str, str, str]:
        """What they answer to a scrape."""
        operator = generate_latest(self.operator.metrics.registry).decode()
        return operator, self.agent.exposition(), self.engine.exposition()


@contextmanager
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """All three, started and idle."""
    with ExitStack() as stack:
        operator = Operator()
        stack.callback(operator.close)
        agent = Agent(tmp_path_factory.mktemp("agent"))
        stack.callback(agent.close)
        engine = Engine(tmp_path_factory.mktemp("engine"))
        stack.callback(engine.close)
        yield Parts(operator, agent, engine)
