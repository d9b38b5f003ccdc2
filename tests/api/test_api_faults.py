"""An API server that fails in every way a proxy can make it, between it and the operator's process.

Each fault strikes while a user changes a deployment that serves. When it is over, the same state as without it has
to come in 90 s, with less than twice the writes, and nothing is ever taken away without saying what is meant: a
delete names a uid, an apply that shortens a node's list names uid and version. The process may end, as a pod's
container may, if it says so with an exit status; it is started again.

`make test` runs one fault of each kind, DLO_SOAK=1 every status on every verb and every event index.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api.apiserver import ApiServer
from api.conftest import serving
from api.faulted import HEAL_SECONDS, QUIET_SECONDS, Faulted, Round
from api.life import CONTROLLERS, Life, Operator, differences
from fakes.proxy import Fault, FaultProxy

SOAK = os.environ.get("DLO_SOAK") == "1"
WATCH, LIST, PATCH = frozenset({"watch"}), frozenset({"list"}), frozenset({"patch"})
ALL = frozenset({"watch", "list", "get", "patch", "create", "delete"})
CACHES, DEPLOYMENTS = frozenset({"nodeweightcaches"}), frozenset({"diffusiondeployments"})
CHILDREN = frozenset({"pods", "deployments"})


def refuse(status: int, verbs: frozenset[str], resources: frozenset[str] = frozenset(), **more: Any) -> Fault:
    """Refused with this HTTP status."""
    return Fault("Refuse", verbs, resources, status=status, **more)


#: Faults that the watches have to get over by themselves: the next full list is five minutes away.
ALONE = (
    Round("watches cut in mid-event", (Fault("Cut", WATCH, index=1),)),
    Round("410 as an event", (Fault("Gone", WATCH, times=8),)),
    Round("410 as an answer to a watch", (Fault("Cut", WATCH, times=7), refuse(410, WATCH, times=3))),
    Round("503 to everything", (refuse(503, ALL),), seconds=12),
    Round("429 with Retry-After to everything", (refuse(429, ALL, retry_after=1),), seconds=8),
    Round("500 to half of the writes", (refuse(500, PATCH, times=10),)),
    Round("half-open watch of deployments", (Fault("Mute", WATCH, DEPLOYMENTS),)),
)
#: News that never comes, or late: the next full list has to show it.
LOST = (
    *(
        Round(
            f"event {index} of {plural} is lost",
            (Fault("Drop", WATCH, frozenset({plural}), index=index, times=1),),
        )
        for plural in ("diffusiondeployments", "nodeweightcaches", "pods", "deployments")
        for index in (range(8) if SOAK else (0,))
    ),
    Round(
        "stale lists and watches of caches", (Fault("Freeze", LIST, CACHES), Fault("Hold", WATCH, CACHES)), 12
    ),
    Round(
        "stale deployments, from a restart on",
        (Fault("Freeze", LIST, DEPLOYMENTS), Fault("Hold", WATCH, DEPLOYMENTS)),
        seconds=8,
        restart=True,
    ),
)
EVERY = (
    *(
        Round(
            f"{status} to {next(iter(verbs))}",
            (refuse(status, verbs, retry_after=1 if status == 429 else None),),
            seconds=10,
            ends=3,
        )
        for status in (403, 410, 429, 500, 503)
        for verbs in (LIST, WATCH, PATCH)
    ),
    Round("half-open watch of caches", (Fault("Mute", WATCH, CACHES),)),
    Round("half-open watches of pods and children", (Fault("Mute", WATCH, CHILDREN),)),
    Round("mute lists", (Fault("Cut", WATCH), Fault("Mute", LIST))),
    Round("mute writes", (Fault("Mute", PATCH, times=3),)),
    Round("503 to everything for two minutes", (refuse(503, ALL),), seconds=120),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One server for the tests of this file, with the controllers that a deployment needs."""
    with serving(tmp_path_factory.mktemp("faults")) as server, server.controllers(*CONTROLLERS):
        yield server


@pytest.fixture(scope="module")
def life(shared: ApiServer) -> Iterator[Life]:
    """The namespaces on it."""
    made = Life(shared)
    yield made
    made.gateway.close()


@pytest.fixture(scope="module")
def normal(life: Life, tmp_path_factory: pytest.TempPathFactory) -> Faulted:
    """What comes, and what it takes, without a fault."""
    folder = tmp_path_factory.mktemp("rehearsal")
    with FaultProxy(life.server.url, life.server.ca_file) as proxy:
        made = Faulted(life, proxy, _operator(proxy, life, folder, "300"))
        with made.operator.running():
            made.begin()
            made.rehearse()
            made.end()
    life.end()
    return made


def _operator(proxy: FaultProxy, life: Life, folder: Path, resync: str) -> Operator:
    return Operator(proxy.kubeconfig(life.server.kubeconfig, folder / "proxied"), folder / "log", resync)


def _strike_all(
    normal: Faulted, folder: Path, rounds: tuple[Round, ...], resync: str, capsys: pytest.CaptureFixture[str]
) -> None:
    life = normal.life
    with FaultProxy(life.server.url, life.server.ca_file) as proxy:
        operator = _operator(proxy, life, folder, resync)
        faulted = Faulted(life, proxy, operator, expected=normal.expected, normal=normal.normal)
        try:
            with operator.running():
                faulted.begin()
                for round_ in rounds:
                    faulted.strike(round_)
                faulted.end()
        finally:
            with capsys.disabled():
                sys.stdout.write("\n" + "\n".join(faulted.told) + "\n")
        destroyed = faulted.check_destruction()
        life.end()
    assert destroyed >= len(rounds)
    with capsys.disabled():
        sys.stdout.write(
            f"{len(rounds)} faults struck {faulted.injected.total()} requests: right every time; at most"
            f" {faulted.normal} writes without one; {destroyed} times something was taken away, each time by its"
            " uid\n"
        )


@pytest.mark.timeout(1200)
def test_h18_faults_that_watches_get_over(
    normal: Faulted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """H1, H2, H18, O4: cut, expired, refused, half open; full lists are five minutes apart and no help."""
    _strike_all(normal, tmp_path, ALONE, "300", capsys)


@pytest.mark.timeout(3600)
def test_h3_news_that_is_lost_or_stale(
    normal: Faulted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """H3, O2, O3: one event dropped, lists and watches of an older version; full lists every ten seconds."""
    _strike_all(normal, tmp_path, LOST, "10", capsys)


@pytest.mark.skipif(not SOAK, reason="DLO_SOAK=1 refuses every verb with every status: about ten minutes")
@pytest.mark.timeout(3600)
def test_h18_every_status_on_every_verb(
    normal: Faulted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """O4, whole."""
    _strike_all(normal, tmp_path, EVERY, "300", capsys)


@pytest.mark.skipif(not SOAK, reason="DLO_SOAK=1 waits until every retry is used up: about eight minutes")
@pytest.mark.timeout(1800)
def test_h1_ends_when_retries_are_used_up(
    normal: Faulted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """H1: lists that cannot be had again after a 410 end the process, with an exit status that says so.

    A watch that is refused is asked for again for ever: kopf's limit of silence, 70 s, ends each series of retries.
    """
    faults = (Fault("Gone", WATCH, times=7), refuse(503, LIST))
    rounds = (Round("503 to lists past all retries", faults, seconds=420, ends=2, must_end=True),)
    _strike_all(normal, tmp_path, rounds, "600", capsys)


def test_h18_api_server_killed_under_load(
    own_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """O5: ten deployments created while the server is killed and started again, three times: all become ready."""
    life = Life(own_server)
    operator = Operator(own_server.kubeconfig, tmp_path / "log", "300")
    names = [f"digits-{number}" for number in range(10)]
    with FaultProxy(own_server.url, own_server.ca_file) as proxy, own_server.controllers(*CONTROLLERS):
        faulted = Faulted(life, proxy, operator)
        life.begin()
        with operator.running():
            ends = []
            for kills in (0, 3):
                for created, name in enumerate(names):
                    if kills and created in (2, 5, 8):
                        own_server.stop("kube-apiserver", signal.SIGKILL)
                        faulted.live_on(1)
                        own_server.start()
                    life.create(name)
                    faulted.live_on(0.3)
                faulted.until(lambda: all(life.ready(name) for name in names), "all ready", HEAL_SECONDS)
                faulted.live_on(QUIET_SECONDS)
                ends.append(life.state())
                for name in names:
                    life.delete(name)
                faulted.until(life.gone, "all gone", HEAL_SECONDS)
            starts = operator.starts
    life.gateway.close()
    assert ends[0] == ends[1], "\n".join(differences(ends[1], ends[0]))
    assert starts <= 1 + 3
    with capsys.disabled():
        sys.stdout.write(
            f"\nAPI server killed 3 times while 10 deployments were created: all ready, {starts - 1} restarts\n"
        )
