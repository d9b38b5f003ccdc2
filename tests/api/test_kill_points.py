"""The operator's process killed with SIGKILL after its API writes on a real server: always the same end.

A proxy kills it between the server's answer to a write and the receipt of that answer. `make test` kills once after
every kind of write in every step of one life, twenty times and more in a row; DLO_SOAK=1 (`make soak`) gives every
single write of a life a life of its own, and one more life in which every write is the last of its process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api.apiserver import ApiServer
from api.life import CONTROLLERS, STEPS, Life, Operator, differences
from fakes.proxy import FaultProxy, Request

SOAK = os.environ.get("DLO_SOAK") == "1"
STEP_SECONDS = 90.0
QUIET_SECONDS = 2.0
#: Says of a write, and of the step that it belongs to, whether the process dies of it.
Doom = Callable[[str, Request], bool]


class Lives:
    """One life after another on the same server, each from nothing."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.life = Life(server)
        self.proxy = FaultProxy(server.url, server.ca_file)
        self.operator = Operator(
            self.proxy.kubeconfig(server.kubeconfig, folder / "proxied"), folder / "operator.log"
        )
        self.proxy.after_write = self._wrote
        self._step = ""
        self._doom: Doom = _spared
        self.kills: list[tuple[str, str]] = []
        self.written: list[tuple[str, str]] = []

    def _wrote(self, request: Request) -> None:
        if _renews_leadership(request):
            return
        self.written.append((self._step, kind_of(request)))
        if self._doom(self._step, request):
            self.kills.append((self._step, kind_of(request)))
            self.operator.kill()

    def live(self, doom: Doom, expected: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """A full life; the state after each step. With `expected`, each step has to come to that state."""
        self.written, self.kills, ends = [], [], []
        self._step, self._doom = "create", doom
        self.life.begin()
        with self.operator.running():
            for number, (name, act, done) in enumerate(STEPS):
                self._step = name
                act(self.life)
                if expected is None:
                    self._until(lambda done=done: done(self.life), name)  # type: ignore[misc]
                else:
                    self._until(lambda n=number: self.life.state() == expected[n], name, expected[number])  # type: ignore[misc]
                self._until(self._quiet, f"{name}, quiet")
                ends.append(self.life.state())
                if expected is not None:
                    assert ends[-1] == expected[number], "\n".join(differences(ends[-1], expected[number]))
        self.life.end()
        return ends

    def _quiet(self) -> bool:
        """Nothing is written for a while, though agents and kubelets go on."""
        before, end = len(self.written), time.monotonic() + QUIET_SECONDS
        while time.monotonic() < end:
            self.life.turn()
            time.sleep(0.1)
        return len(self.written) == before

    def _until(self, done: Callable[[], bool], what: str, expected: dict[str, Any] | None = None) -> None:
        end = time.monotonic() + STEP_SECONDS
        while not done():
            status = self.operator.exit_status()
            if status is not None:
                assert status == -9, f"the operator ended by itself with {status}: {self.operator.tail()}"
                self.operator.start()
                end = time.monotonic() + STEP_SECONDS  # each process has its own time
            if time.monotonic() >= end:
                told = "\n".join(differences(self.life.state(), expected)) if expected else ""
                pytest.fail(f"not {what}, killed after {self.kills}\n{told}\n{self.operator.tail()}")
            self.life.turn()
            time.sleep(0.1)


def kind_of(request: Request) -> str:
    """What kind of write it is; the leader's Lease is another one than nodes' Leases."""
    sub = f"/{request.subresource}" if request.subresource else ""
    leads = " of the leader" if "dlo-operator-leader" in request.name + _name(request.body) else ""
    return f"{request.verb} {request.resource}{sub}{leads}"


def _name(body: Any) -> str:
    return str(body["metadata"].get("name", "")) if isinstance(body, dict) and "metadata" in body else ""


def _renews_leadership(request: Request) -> bool:
    """By the clock, not by what there is to do; a kill after each would also leave nothing done."""
    return kind_of(request) == "patch leases of the leader"


def _spared(step: str, request: Request) -> bool:
    return False


@pytest.fixture
def lives(own_server: ApiServer, tmp_path: Path) -> Iterator[Lives]:
    """A server, its controllers and a proxy of their own."""
    made = Lives(own_server, tmp_path)
    with own_server.controllers(*CONTROLLERS), made.proxy:
        yield made
    made.life.gateway.close()


def test_killed_after_every_kind_of_write(lives: Lives, capsys: pytest.CaptureFixture[str]) -> None:
    """H4, O1: in one life, after the first write of each kind in each step; every step comes to the same state."""
    expected = lives.live(_spared)
    writes, kinds = len(lives.written), set(lives.written)
    struck: set[tuple[str, str]] = set()

    def first_of_its_kind(step: str, request: Request) -> bool:
        key = (step, kind_of(request))
        new = key not in struck
        struck.add(key)
        return new

    began = time.monotonic()
    lives.live(first_of_its_kind, expected)
    # Some statuses on the way are written or skipped as it happens; what has an end to show is always written.
    lasting = {key for key in kinds if "events" not in key[1] and "status" not in key[1]}
    assert lasting - struck <= {("create", "create leases of the leader")}, lasting - struck
    assert len(lives.kills) >= 15
    _say(
        capsys,
        f"operator killed after {len(lives.kills)} of {writes} writes of a life, one of each kind in each step"
        f" ({time.monotonic() - began:.0f} s): the same end every time",
    )


@pytest.mark.skipif(not SOAK, reason="DLO_SOAK=1 kills after every single write: about half an hour")
@pytest.mark.timeout(3 * 3600)
def test_killed_after_every_write(lives: Lives, capsys: pytest.CaptureFixture[str]) -> None:
    """H4, O1, whole: a life for each write of a life; and one life in which each write is its process's last."""
    expected = lives.live(_spared)
    writes, injected = len(lives.written), 0
    for number in range(1, writes + 1):
        lives.live(lambda _step, _request, n=number: len(lives.written) == n, expected)  # type: ignore[misc]
        injected += len(lives.kills)
    lives.live(lambda _step, _request: True, expected)
    # The number of statuses on the way differs from life to life, so the last points may not come.
    assert injected >= 0.9 * writes
    _say(
        capsys,
        f"operator killed after each of {injected} writes, a life each, and after {len(lives.kills)} in one"
        " life: the same end every time",
    )


def _say(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{line}\n")
