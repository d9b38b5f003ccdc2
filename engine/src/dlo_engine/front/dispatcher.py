"""The queue and the replicas: hands waiting requests to idle replicas and collects what their ranks report.

A group is the set of replicas that step together: one replica with RankLocal, all of them with AllGather.
Runs on the event loop only; knows ranks as numbers and messages, never as processes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dlo_engine.config import EngineConfig
from dlo_engine.errors import Cancelled, EngineError, RankDied
from dlo_engine.front.waves import fill_wave, pick_wave
from dlo_engine.protocol import Cancel, Done, Failed, FrontMessage, Generate, GenerateRequest, GenerateResult

OnStart = Callable[[float], None]
"""Told the seconds that a request waited when it begins to run."""


def ignore_start(_: float) -> None:
    """Nobody wants to know how long the request waited."""


class QueueFull(EngineError):
    """As many requests wait as the configuration allows."""

    code = "QueueFull"


@dataclass(eq=False)
class Job:
    """A request on its way; `result` ends with images or an EngineError."""

    request: GenerateRequest
    result: asyncio.Future[GenerateResult]
    cancelled: bool = False
    on_start: OnStart = ignore_start
    submitted: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Member:
    """One replica's part in a wave: its request, whose it is (None: a copy), and the reports of its ranks."""

    ranks: tuple[int, ...]
    request: GenerateRequest
    job: Job | None
    reports: dict[int, Done | Failed] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether every rank has reported."""
        return len(self.reports) == len(self.ranks)


@dataclass(eq=False)
class Group:
    """Replicas that step together, and the wave they run (empty: idle)."""

    replicas: tuple[int, ...]
    wave: list[Member] = field(default_factory=list)


class Dispatcher:
    """Queue of admitted requests over the groups of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        send: Callable[[int, FrontMessage], None],
        on_stuck: Callable[[EngineError], None],
        straggler_seconds: float,
    ) -> None:
        """`send(rank, message)` reaches a rank; `on_stuck` gets the fault of a group that cannot finish."""
        self._width = config.tensor * config.ulysses
        self._max_queued = config.max_queued_requests
        self._send = send
        self._on_stuck = on_stuck
        self._straggler_seconds = straggler_seconds
        self._queue: deque[Job] = deque()
        replicas = range(config.data)
        together = config.transfer == "AllGather"
        self._groups = [Group(tuple(replicas))] if together else [Group((index,)) for index in replicas]
        self._idle = asyncio.Event()
        self._idle.set()
        self.last_ranks: tuple[int, ...] = ()
        """Ranks of the member that finished last."""

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that ranks work on, copies not counted."""
        return sum(member.job is not None for group in self._groups for member in group.wave)

    async def wait_idle(self) -> None:
        """Return when nothing waits and nothing runs."""
        await self._idle.wait()

    def submit(self, request: GenerateRequest, *, on_start: OnStart = ignore_start) -> Job:
        """Queue a request and start it if a group is idle. Raises QueueFull."""
        if len(self._queue) >= self._max_queued:
            raise QueueFull(f"{len(self._queue)} requests are waiting already", hint="try again later")
        job = Job(request, asyncio.get_running_loop().create_future(), on_start=on_start)
        self._queue.append(job)
        self._pump()
        return job

    def cancel(self, job: Job) -> None:
        """Give up a request: a waiting one leaves the queue, a running one stops between steps."""
        if job.result.done():
            return
        job.cancelled = True
        if job in self._queue:
            self._queue.remove(job)
            _fail(job, Cancelled("the request was cancelled while it waited"))
            self._pump()
            return
        for member in self._members():
            if member.job is job:
                for rank in member.ranks:
                    self._send(rank, Cancel(member.request.id))

    def cancel_all(self) -> None:
        """Give up everything that waits or runs."""
        for job in [*self._queue, *(member.job for member in self._members() if member.job)]:
            self.cancel(job)

    def fail_all(self, error: EngineError) -> None:
        """End every request with this error, at once; nothing starts any more."""
        jobs = [*self._queue, *(member.job for member in self._members() if member.job)]
        self._queue.clear()
        self._groups = []
        self._idle.set()
        for job in jobs:
            _fail(job, error)

    def report(self, message: Done | Failed) -> None:
        """Take the report of one rank about its request."""
        request_id = message.result.id if isinstance(message, Done) else message.id
        for group in self._groups:
            for member in group.wave:
                if message.rank in member.ranks and member.request.id == request_id:
                    member.reports[message.rank] = message
                    self._settle(group, member, message)
                    return

    def _members(self) -> list[Member]:
        return [member for group in self._groups for member in group.wave]

    def _settle(self, group: Group, member: Member, message: Done | Failed) -> None:
        if member.finished:
            self.last_ranks = member.ranks
            # A failure waits for the wave: a peer's death, not yet noticed, would be its real reason.
            if not any(isinstance(report, Failed) for report in member.reports.values()):
                _resolve(member)
        if all(each.finished for each in group.wave):
            for each in group.wave:
                _resolve(each)
            group.wave = []
            self._pump()
        elif isinstance(message, Failed):
            # The others may sit in a collective that this rank will never enter.
            loop = asyncio.get_running_loop()
            loop.call_later(self._straggler_seconds, self._check_stuck, group, group.wave, message)

    def _check_stuck(self, group: Group, wave: list[Member], cause: Failed) -> None:
        if group.wave is not wave or group not in self._groups:
            return
        late = sorted(rank for member in wave for rank in member.ranks if rank not in member.reports)
        names = ", ".join(str(rank) for rank in late)
        self._on_stuck(
            RankDied(
                f"rank {cause.rank} failed a request ({cause.code}: {cause.message})"
                f" and left rank {names} waiting",
                hint=cause.hint,
                code="RankStuck",
                rank=cause.rank,
            )
        )

    def _pump(self) -> None:
        for group in self._groups:
            if group.wave or not self._queue:
                continue
            picked = pick_wave([job.request for job in self._queue], len(group.replicas))
            jobs = [self._queue[index] for index in picked]
            for job in jobs:
                self._queue.remove(job)
                job.on_start(time.monotonic() - job.submitted)
            requests = fill_wave([job.request for job in jobs], len(group.replicas))
            owners: list[Job | None] = [*jobs, *[None] * (len(requests) - len(jobs))]
            group.wave = [
                Member(self._ranks(replica), request, job)
                for replica, request, job in zip(group.replicas, requests, owners, strict=True)
            ]
            for member in group.wave:
                for rank in member.ranks:
                    self._send(rank, Generate(member.request))
        if self._queue or any(group.wave for group in self._groups):
            self._idle.clear()
        else:
            self._idle.set()

    def _ranks(self, replica: int) -> tuple[int, ...]:
        return tuple(range(replica * self._width, (replica + 1) * self._width))


def _resolve(member: Member) -> None:
    job = member.job
    if job is None or job.result.done():
        return
    for report in member.reports.values():
        if isinstance(report, Failed):
            _fail(job, EngineError(report.message, hint=report.hint, code=report.code))
            return
    done = {rank: report.result for rank, report in member.reports.items() if isinstance(report, Done)}
    result = done[member.ranks[0]]
    if job.cancelled or result.cancelled:
        _fail(job, Cancelled("the request was cancelled"))
    else:
        job.result.set_result(result)


def _fail(job: Job, error: EngineError) -> None:
    if not job.result.done():
        job.result.set_exception(error)
        # A request whose client has gone is awaited by nobody.
        job.result.exception()
