"""A deployment that changes to and fro while faults strike between the operator's process and the API server."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from api.life import Life, Operator, differences
from dlo_kube.errors import KubeError
from fakes.proxy import Fault, FaultProxy, Request

HEAL_SECONDS = 90.0
QUIET_SECONDS = 3.0
STATES = ({"replicas": 2}, "digits"), ({"replicas": 1}, "digits-2")


@dataclass(frozen=True)
class Round:
    """A fault, or several at once, for some seconds; with `restart` the operator is killed and started meanwhile.

    `ends` is how often it may end by itself, `must_end` whether it has to.
    """

    name: str
    faults: tuple[Fault, ...]
    seconds: float = 4.0
    restart: bool = False
    ends: int = 1
    must_end: bool = False


@dataclass
class Faulted:
    """A deployment that changes to and fro between two states, under faults."""

    life: Life
    proxy: FaultProxy
    operator: Operator
    at: int = 0
    expected: list[dict[str, Any]] = field(default_factory=list)
    normal: int = 0
    told: list[str] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """Created, and ready in state 0."""
        self.life.begin()
        self.life.create()
        self.until(self.life.ready, "ready", 60)

    def end(self) -> None:
        """Deleted, and gone."""
        self.life.delete()
        self.until(self.life.gone, "gone", 60)

    def rehearse(self) -> None:
        """Changed to and fro without a fault: what has to come, and what it takes."""
        for _ in range(2):
            counts, self.expected = [], []
            for number in (1, 0):
                before = self._written()
                self._change(number)
                self.until(self.life.ready, f"ready in state {number}", 60)
                self.until(self._quiet, "quiet", 60)
                counts.append(self._written() - before)
                self.expected.append(self.life.state(history=False))
        self.expected.reverse()
        assert self.expected[0] != self.expected[1]
        self.normal = max(counts)

    def strike(self, round_: Round) -> None:
        """One round: the fault, a change, the fault is over, and the state that has to come."""
        before, starts = self._written(), self.operator.starts
        faults = [self.proxy.break_(replace(fault)) for fault in round_.faults]
        if round_.restart:
            self.operator.kill()
        self._change(1 - self.at)
        self.live_on(round_.seconds)
        self.until(lambda: all(fault.struck for fault in faults), f"{round_.name} met a request", 60)
        self.proxy.heal()
        healed = time.monotonic()
        wanted = self.expected[self.at]
        self.until(lambda: self.life.state(history=False) == wanted, round_.name, HEAL_SECONDS, wanted)
        took = time.monotonic() - healed
        self.until(self._quiet, f"quiet after {round_.name}", 30)
        assert self.life.state(history=False) == wanted, round_.name
        written, restarts = self._written() - before, self.operator.starts - starts
        struck = sum(fault.struck for fault in faults)
        self.told.append(
            f"{round_.name:44} struck {struck:4}, right after {took:5.1f} s, {written:3} writes, {restarts} restarts"
        )
        self.injected[round_.name] += struck
        assert written < 2 * self.normal, f"{round_.name}: {written} writes, {self.normal} without a fault"
        assert restarts > round_.restart or not round_.must_end, f"{round_.name}: still the same process"
        most = round_.ends + round_.restart
        assert restarts <= most, f"{round_.name}: started {restarts} times\n{self.operator.tail()}"

    def check_destruction(self) -> int:
        """Nothing was taken away blindly; how many times something was."""
        for request in self.proxy.deletes:
            assert (request.body or {}).get("preconditions", {}).get("uid"), (
                f"a delete without a uid: {request}"
            )
        entries: dict[str, set[str]] = {}
        shortened = 0
        for request in self.proxy.writes:
            if (request.verb, request.resource) != ("patch", "nodeweightcaches"):
                continue
            listed = {entry["id"] for entry in request.body["spec"]["entries"]}
            if not entries.get(request.name, set()) <= listed:
                shortened += 1
                meta = request.body["metadata"]
                assert meta.get("uid"), f"shortened without a uid: {request}"
                assert meta.get("resourceVersion"), f"shortened without a version: {request}"
            entries[request.name] = listed
        return shortened + len(self.proxy.deletes)

    # -- inside ----------------------------------------------------------------------------------------------

    def _change(self, number: int) -> None:
        self.at = number
        sizes, path = STATES[number]
        self.life.change(sizes)
        self.life.change({"model": {"source": {"directory": {"root": "samples", "path": path}}}})

    def _written(self) -> int:
        return sum(not _leads(request) for request in self.proxy.writes)

    def _quiet(self) -> bool:
        before = self._written()
        self.live_on(QUIET_SECONDS)
        return self._written() == before

    def live_on(self, seconds: float) -> None:
        """Agents, kubelets, and the kubelet that starts the operator again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._turn()

    def _turn(self) -> None:
        status = self.operator.exit_status()
        if status is not None:
            assert status != 0, f"the operator ended as if all were well: {self.operator.tail()}"
            self.operator.start()
        with suppress(KubeError):  # the server may be away, for agents too
            self.life.turn()
        time.sleep(0.1)

    def until(self, done: Any, what: str, seconds: float, wanted: Any = None) -> None:
        """Lets everybody act until `done` says something true; a server that is away says nothing."""
        end = time.monotonic() + seconds
        while not _holds(done):
            if time.monotonic() > end:
                lines = differences(self.life.state(history=False), wanted) if wanted else ()
                pytest.fail("\n".join([f"not {what} in {seconds:.0f} s", *lines, self.operator.tail()]))
            self._turn()


def _holds(done: Any) -> bool:
    try:
        return bool(done())
    except KubeError:
        return False  # the server is away


def _leads(request: Request) -> bool:
    return request.resource == "leases" and "leader" in request.name
