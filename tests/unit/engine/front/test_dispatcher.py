"""The queue: independent replicas, waves of like requests, cancelling, failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dlo_engine.config import EngineConfig
from dlo_engine.errors import Cancelled, EngineError
from dlo_engine.front.dispatcher import Dispatcher, Job, QueueFull
from dlo_engine.front.waves import fill_wave, pick_wave, wave_key
from dlo_engine.protocol import Cancel, Done, Failed, FrontMessage, Generate, GenerateRequest, GenerateResult


def request(name: str, **fields: Any) -> GenerateRequest:
    """A small request."""
    plain = GenerateRequest(name, "p", n=1, width=16, height=16, steps=4, guidance=3.5, seed=1)
    return replace(plain, **fields)


class Ranks:
    """Stands for the rank processes: keeps what each was sent and reports back."""

    def __init__(self, **fields: Any) -> None:
        config = EngineConfig(Path("h"), "m", device="cpu", **fields)
        self.sent: dict[int, list[FrontMessage]] = {rank: [] for rank in range(config.world)}
        self.stuck: list[EngineError] = []
        self.dispatcher = Dispatcher(
            config,
            send=lambda rank, message: self.sent[rank].append(message),
            on_stuck=self.stuck.append,
            straggler_seconds=0.01,
        )

    def last(self, rank: int) -> GenerateRequest:
        """The request that the rank was given last."""
        found = [message.request for message in self.sent[rank] if isinstance(message, Generate)]
        return found[-1]

    def done(self, rank: int, *, cancelled: bool = False) -> None:
        """The rank reports its last request done."""
        name = self.last(rank).id
        images = () if cancelled else (f"{name}@{rank}".encode(),)
        self.dispatcher.report(Done(rank, GenerateResult(name, images, cancelled=cancelled), {}))

    def failed(self, rank: int) -> None:
        """The rank reports its last request failed."""
        self.dispatcher.report(Failed(rank, self.last(rank).id, "Bad", "it broke", "", {}))


def images(job: Job) -> tuple[bytes, ...]:
    """The pictures of a finished job."""
    return job.result.result().images


def test_wave_keys_part_on_everything_that_changes_the_blocks_that_run() -> None:
    same = [request("a"), request("b", prompt="q", seed=9, guidance=7.0)]
    other = [request("c", **change) for change in ({"steps": 5}, {"width": 32}, {"height": 32}, {"n": 2})]
    unguided = request("d", guidance=1.0)
    assert len({wave_key(each) for each in same}) == 1
    assert len({wave_key(each) for each in [same[0], *other, unguided]}) == 6
    assert wave_key(unguided) == wave_key(request("e", guidance=None))


def test_a_wave_takes_the_oldest_and_later_ones_like_it() -> None:
    queued = [request("a"), request("b", steps=9), request("c"), request("d")]
    assert pick_wave(queued, 2) == [0, 2]
    assert pick_wave(queued, 4) == [0, 2, 3]
    assert pick_wave([], 2) == []


def test_missing_members_run_discarded_copies() -> None:
    wave = fill_wave([request("a")], 3)
    assert [each.discard for each in wave] == [False, True, True]
    assert len({each.id for each in wave}) == 3
    assert {(each.prompt, each.steps) for each in wave} == {("p", 4)}


async def _rank_local() -> None:
    ranks = Ranks(tensor=2, data=2)
    submit = ranks.dispatcher.submit
    first, second, third = (submit(request(name)) for name in ("a", "b", "c"))
    assert [ranks.last(rank).id for rank in range(4)] == ["a", "a", "b", "b"]
    assert (ranks.dispatcher.queued, ranks.dispatcher.running) == (1, 2)
    ranks.done(3)
    assert not second.result.done()
    ranks.done(2)
    assert images(second) == (b"b@2",)
    assert ranks.last(2).id == "c"
    assert not first.result.done()
    for rank in (0, 1, 2, 3):
        ranks.done(rank)
    assert images(third) == (b"c@2",)
    assert ranks.dispatcher.last_ranks == (2, 3)
    await asyncio.wait_for(ranks.dispatcher.wait_idle(), 1)


def test_rank_local_replicas_are_independent() -> None:
    asyncio.run(_rank_local())


async def _waves() -> None:
    ranks = Ranks(data=2, transfer="AllGather")
    alone = ranks.dispatcher.submit(request("a"))
    long, like = ranks.dispatcher.submit(request("b", steps=9)), ranks.dispatcher.submit(request("c"))
    also = ranks.dispatcher.submit(request("d"))
    assert (ranks.last(0).id, ranks.last(1).discard) == ("a", True)
    ranks.done(0)
    assert images(alone) == (b"a@0",)
    assert ranks.last(0).id == "a", "no member starts anew before the whole wave has ended"
    ranks.done(1)
    assert (ranks.last(0).id, ranks.last(1).discard) == ("b", True), "the oldest request is never overtaken"
    ranks.done(0)
    ranks.done(1)
    assert [ranks.last(rank).id for rank in (0, 1)] == ["c", "d"]
    ranks.done(1)
    ranks.done(0)
    assert [images(job) for job in (long, like, also)] == [(b"b@0",), (b"c@0",), (b"d@1",)]


def test_all_gather_runs_waves() -> None:
    asyncio.run(_waves())


async def _queue_full() -> None:
    ranks = Ranks(max_queued_requests=1)
    ranks.dispatcher.submit(request("a"))
    waiting = ranks.dispatcher.submit(request("b"))
    with pytest.raises(QueueFull):
        ranks.dispatcher.submit(request("c"))
    ranks.dispatcher.cancel(waiting)
    assert isinstance(waiting.result.exception(), Cancelled)
    ranks.dispatcher.submit(request("c"))


def test_one_request_more_than_may_wait_is_refused() -> None:
    asyncio.run(_queue_full())


async def _cancel_running() -> None:
    ranks = Ranks(tensor=2)
    job, following = ranks.dispatcher.submit(request("a")), ranks.dispatcher.submit(request("b"))
    ranks.dispatcher.cancel(job)
    assert ranks.sent[0][-1] == ranks.sent[1][-1] == Cancel("a")
    ranks.done(0, cancelled=True)
    assert ranks.last(0).id == "a", "the replica is free only when all its ranks have stopped"
    ranks.done(1, cancelled=True)
    assert isinstance(job.result.exception(), Cancelled)
    assert ranks.last(1).id == "b"
    assert not following.result.done()


def test_a_running_request_is_cancelled_on_all_ranks_of_its_replica() -> None:
    asyncio.run(_cancel_running())


async def _cancel_in_wave() -> None:
    ranks = Ranks(data=2, transfer="AllGather")
    ranks.dispatcher.submit(request("first"))
    leaving, staying = ranks.dispatcher.submit(request("a")), ranks.dispatcher.submit(request("b"))
    ranks.done(0)
    ranks.done(1)
    ranks.dispatcher.cancel(leaving)
    assert ranks.sent[0][-1] == Cancel("a")
    assert ranks.last(1).id == "b"
    assert not any(isinstance(message, Cancel) for message in ranks.sent[1])
    ranks.done(0)
    ranks.done(1)
    assert isinstance(leaving.result.exception(), Cancelled)
    assert images(staying) == (b"b@1",)


def test_a_client_that_leaves_does_not_stop_the_others_of_its_wave() -> None:
    asyncio.run(_cancel_in_wave())


async def _failed_request() -> None:
    ranks = Ranks(tensor=2)
    job, following = ranks.dispatcher.submit(request("a")), ranks.dispatcher.submit(request("b"))
    ranks.failed(1)
    ranks.failed(0)
    error = job.result.exception()
    assert isinstance(error, EngineError)
    assert (error.code, error.message) == ("Bad", "it broke")
    await asyncio.sleep(0.05)
    assert ranks.stuck == []
    ranks.done(0)
    ranks.done(1)
    assert images(following) == (b"b@0",)


def test_a_request_that_fails_on_all_ranks_fails_alone() -> None:
    asyncio.run(_failed_request())


async def _failed_in_wave() -> None:
    ranks = Ranks(data=2, transfer="AllGather")
    job = ranks.dispatcher.submit(request("a"))
    ranks.failed(0)
    assert not job.result.done(), "its peer may have died, which would be the reason"
    ranks.dispatcher.fail_all(EngineError("rank 1 died", code="RankDied"))
    error = job.result.exception()
    assert isinstance(error, EngineError)
    assert error.code == "RankDied"


def test_a_failure_in_a_wave_waits_for_what_its_peers_report() -> None:
    asyncio.run(_failed_in_wave())


async def _straggler() -> None:
    ranks = Ranks(tensor=2)
    ranks.dispatcher.submit(request("a"))
    ranks.failed(1)
    await asyncio.sleep(0.05)
    assert [error.code for error in ranks.stuck] == ["RankStuck"]
    assert "left rank 0 waiting" in ranks.stuck[0].message


def test_a_rank_that_waits_for_a_failed_one_is_reported_stuck() -> None:
    asyncio.run(_straggler())


async def _fail_all() -> None:
    ranks = Ranks()
    jobs = [ranks.dispatcher.submit(request(name)) for name in ("a", "b")]
    ranks.dispatcher.fail_all(EngineError("gone", code="RankDied"))
    for job in jobs:
        error = job.result.exception()
        assert isinstance(error, EngineError)
        assert error.code == "RankDied"
    ranks.done(0)
    await asyncio.wait_for(ranks.dispatcher.wait_idle(), 1)


def test_a_fault_ends_what_runs_and_what_waits() -> None:
    asyncio.run(_fail_all())
