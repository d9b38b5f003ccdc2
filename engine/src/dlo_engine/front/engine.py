"""The engine as the front sees it: its ranks, its state, and the one fault that ends it.

States: starting, ready, draining, closed, failed. A fault ends every request, kills every rank and is never
taken back; what to exit with is decided by the caller. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from dlo_engine.config import EngineConfig, is_fallback
from dlo_engine.errors import EngineError, FallbackRefused, InvalidConfiguration, RankDied
from dlo_engine.front.admission import Defaults, defaults_for, size_problem
from dlo_engine.front.dispatcher import Dispatcher, Job, OnStart, ignore_start
from dlo_engine.front.process import RankProcess, describe_exit
from dlo_engine.front.settings import FrontSettings
from dlo_engine.front.status import engine_status
from dlo_engine.protocol import (
    Close,
    GenerateRequest,
    Launch,
    Limits,
    Phase,
    RankMessage,
    Ready,
    StartFailed,
)

State = Literal["starting", "ready", "draining", "closed", "failed"]
OnEvent = Callable[[Mapping[str, Any]], None]
_log = structlog.get_logger()


@dataclass(frozen=True)
class Fault:
    """Why the engine ended, the exit status it means, and whether it had been ready before."""

    error: EngineError
    exit_status: int
    was_ready: bool


class Engine:
    """All ranks of one engine. Use from one event loop, on the main thread."""

    def __init__(self, config: EngineConfig, settings: FrontSettings, on_event: OnEvent) -> None:
        """`on_event` gets progress of the start as JSON objects."""
        self.config = config
        self.state: State = "starting"
        self.limits = Limits()
        self.fault: asyncio.Future[Fault] = asyncio.get_running_loop().create_future()
        self.ready = asyncio.Event()
        self._settings = settings
        self._on_event = on_event
        self._ranks: dict[int, RankProcess] = {}
        self._shares: dict[int, dict[str, Any]] = {}
        self._phases: dict[int, str] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="dlo-engine-"))
        self.dispatcher = Dispatcher(
            config,
            send=lambda rank, message: self._ranks[rank].send(message),
            on_stuck=self._fail,
            straggler_seconds=settings.straggler_seconds,
        )

    @property
    def reason(self) -> str:
        """Why the engine does not take requests; empty when it does."""
        if self.state == "starting":
            waiting = [rank for rank in range(self.config.world) if rank not in self._shares]
            phases = ", ".join(f"rank {rank}: {self._phases.get(rank, 'spawn')}" for rank in waiting[:8])
            return f"the engine is starting ({phases})"
        if self.state == "failed":
            return str(self.fault.result().error)
        return {"ready": "", "draining": "the engine is shutting down", "closed": "the engine has shut down"}[
            self.state
        ]

    @property
    def defaults(self) -> Defaults:
        """What requests get for fields that they leave out."""
        return defaults_for(self.config, self.limits)

    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that live."""
        return {rank: process.pid for rank, process in self._ranks.items() if not process.exited.is_set()}

    def start(self) -> None:
        """Spawn every rank; readiness comes as `ready`, failure as `fault`."""
        rendezvous = f"file://{self._directory}/rendezvous"
        for rank in range(self.config.world):
            launch = Launch(self.config, rank, rendezvous, self._settings.runtime)
            self._ranks[rank] = RankProcess(launch, on_message=self._on_message, on_exit=self._on_exit)
        _log.info("Ranks were spawned", pids=self.pids())

    def submit(self, request: GenerateRequest, *, on_start: OnStart = ignore_start) -> Job:
        """Queue an admitted request. Raises QueueFull, or the fault."""
        if self.fault.done():
            raise self.fault.result().error
        return self.dispatcher.submit(request, on_start=on_start)

    def status(self) -> dict[str, Any]:
        """The document of `/v1/engine/status`; only once the engine has been ready."""
        return engine_status(self.config, self._shares, self.dispatcher.last_ranks)

    async def drain(self, seconds: float) -> None:
        """Stop admitting; return when everything admitted has ended, cancelling what is left at the limit."""
        if self.state in ("starting", "ready"):
            self.state = "draining"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.dispatcher.wait_idle(), seconds)
            return
        _log.warning(
            "Drain limit was reached", running=self.dispatcher.running, queued=self.dispatcher.queued
        )
        self.dispatcher.cancel_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.dispatcher.wait_idle(), self._settings.cancel_seconds)

    async def close(self) -> None:
        """Close the ranks that are ready, kill the others and those that take too long."""
        was_started = len(self._shares) == self.config.world
        if self.state != "failed":
            self.state = "closed"
        idle = not self.dispatcher.running
        if was_started and idle and not self.fault.done():
            for process in self._ranks.values():
                process.send(Close())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone(), self._settings.close_seconds)
        self.dispatcher.fail_all(EngineError("the engine has shut down", code="Draining"))
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL what lives, wait until it is gone, remove the private directory."""
        if self.state != "failed":
            self.state = "closed"
        for process in self._ranks.values():
            process.kill()
        with contextlib.suppress(TimeoutError):  # a process that the kernel cannot end holds nobody up
            await asyncio.wait_for(self._gone(), self._settings.close_seconds)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _gone(self) -> None:
        await asyncio.gather(*(process.exited.wait() for process in self._ranks.values()))

    def _on_message(self, message: RankMessage) -> None:
        if isinstance(message, Phase):
            self._phases[message.rank] = message.phase
            self._on_event(
                {"event": "phase", "rank": message.rank, "phase": message.phase, "details": message.details}
            )
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, StartFailed):
            error = EngineError(message.message, hint=message.hint, code=message.code, rank=message.rank)
            self._fail(error, message.exit_status)
        elif not self.fault.done():
            self._shares[message.rank] = message.status
            self.dispatcher.report(message)

    def _on_ready(self, message: Ready) -> None:
        self._shares[message.rank] = message.status
        self._phases[message.rank] = "ready"
        if message.rank == 0:
            self.limits = message.limits
        if len(self._shares) < self.config.world or self.state != "starting":
            return
        width, height = self.defaults.width, self.defaults.height
        if expected := size_problem(width, height, self.limits):
            wrong = InvalidConfiguration(
                f"the default size {width}x{height} is none of this model", hint=f"use {expected}"
            )
            self._fail(wrong, wrong.exit_status)
            return
        backing = self.status()["backing"]
        if self.config.on_fallback == "Fail" and is_fallback(self.config, backing["kind"]):
            error = FallbackRefused(
                f"the weights are backed by {backing['kind']}, which is a fallback here",
                hint="see docs/reference for the code, or set onFallback: Continue",
                code=backing["fallbackCode"] or "FallbackRefused",
            )
            self._fail(error, error.exit_status)
            return
        self.state = "ready"
        self.ready.set()

    def _on_exit(self, rank: int, returncode: int) -> None:
        if self.state == "closed" or self.fault.done():
            _log.info("Rank ended", rank=rank, returncode=returncode)
            return
        killed = returncode == -9
        self._fail(
            RankDied(
                f"rank {rank} {describe_exit(returncode)}",
                hint="look for the kernel's out-of-memory killer and the container's memory limit"
                if killed
                else "see the log lines of this rank",
                rank=rank,
                status=returncode,
            )
        )

    def _fail(self, error: EngineError, exit_status: int = 1) -> None:
        if self.fault.done() or self.state == "closed":
            return
        was_ready = self.ready.is_set()
        self.state = "failed"
        self.fault.set_result(Fault(error, exit_status, was_ready))
        _log.error("Engine failed", code=error.code, reason=error.message, hint=error.hint)
        self.dispatcher.fail_all(error)
        for process in self._ranks.values():
            process.kill()
