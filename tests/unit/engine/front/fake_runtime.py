"""Runtimes without a model, for tests of the front: real processes, real blocking steps, real PNG files.

`FakeRuntime` makes every step a barrier over the ranks that step together (the replica, or all of them with
AllGather), so a dead rank leaves the others waiting for ever, as a collective would. Words in the prompt
steer it; every call is written next to the hand-over file. Must not be reachable from a command line.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlo_engine.config import EngineConfig
from dlo_engine.errors import EngineError
from dlo_engine.protocol import GenerateRequest, GenerateResult, Limits, Report

LIMITS = Limits(
    pixel_multiple=16,
    max_side=256,
    default_width=32,
    default_height=48,
    default_steps=4,
    default_guidance=3.5,
)


class FakeRuntime:
    """Sleeps and waits where the real one computes and communicates."""

    backing: dict[str, Any] = {"kind": "MappedCache", "fallbackCode": None, "verified": True}  # noqa: RUF012

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str) -> None:
        self._config = config
        self._rank = rank
        self._meeting = Path(rendezvous.removeprefix("file://")).parent
        self._calls = config.handover.parent / f"calls-{rank}.jsonl"
        self._wave = 0
        self._last: dict[str, float] | None = None

    @classmethod
    def start(cls, config: EngineConfig, rank: int, rendezvous: str, report: Report) -> FakeRuntime:
        """Report two phases and be there."""
        report("verify", {"done": 1, "total": 2})
        report("warmup", {})
        return cls(config, rank, rendezvous)

    @property
    def limits(self) -> Limits:
        """Small sizes."""
        return LIMITS

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> GenerateResult:
        """Step with the others; the prompt may say slow, fail, fail-on-RANK, exit-on-RANK or stray-output."""
        self._note(request)
        self._wave += 1
        words = request.prompt.split()
        if "stray-output" in words:
            print("a library wrote this")  # noqa: T201 - that is the point
        if "fail" in words:
            raise EngineError("the picture did not come out", hint="ask for another", code="BadPicture")
        if f"fail-on-{self._rank}" in words:
            raise ValueError("only this rank")
        if f"exit-on-{self._rank}" in words:
            os._exit(7)
        pause = 0.1 if "slow" in words else 0.001
        for step in range(request.steps):
            time.sleep(pause)
            if self._agree(step, stop=request.discard or cancelled()):
                self._note(request, cancelled=True)
                return GenerateResult(request.id, cancelled=True)
        timings = {
            "steps": request.steps,
            "computeMs": 20.0,
            "copyMs": 10.0,
            "waitMs": 1.0,
            "copiedBytes": 64,
        }
        self._last = timings
        main = self._config.tensor_rank(self._rank) == 0 and not request.discard
        images = tuple(self._png(request, index) for index in range(request.n)) if main else ()
        return GenerateResult(request.id, images, timings=timings)

    def status(self) -> dict[str, Any]:
        """A share as the real runtime reports it."""
        tensor_rank = self._config.tensor_rank(self._rank)
        return {
            "backing": self.backing,
            "entries": [
                {
                    "component": "transformer",
                    "coordinate": f"{tensor_rank}/{self._config.tensor}",
                    "inputKey": f"key-{tensor_rank}",
                    "manifestSha256": "00",
                    "bytes": 100,
                    "registeredBytes": 10,
                    "pssBytes": 50,
                }
            ],
            "start": {"mapMs": 1, "verifyMs": 2 + self._rank, "registerMs": 0, "importMs": 3, "warmupMs": 4},
            "lastRequest": self._last,
        }

    def close(self) -> None:
        """Leave a trace of an ordered end."""
        self._calls.with_name(f"closed-{self._rank}").touch()

    def _agree(self, step: int, *, stop: bool) -> bool:
        """Barrier with a vote: all stop when tensor rank 0 of every replica in it says so."""
        tensor = self._config.tensor
        if self._config.transfer == "AllGather":
            peers = range(self._config.world)
        else:
            first = self._config.data_index(self._rank) * tensor
            peers = range(first, first + tensor)
        stem = f"{self._wave}-{step}"
        mine = self._meeting / f"{stem}-{self._rank}"
        mine.with_suffix(".new").write_text("stop" if stop else "go")
        mine.with_suffix(".new").rename(mine)
        votes = {}
        for peer in peers:
            path = self._meeting / f"{stem}-{peer}"
            while not path.exists():
                time.sleep(0.002)
            votes[peer] = path.read_text()
        return all(votes[peer] == "stop" for peer in peers if peer % tensor == 0)

    def _note(self, request: GenerateRequest, **more: Any) -> None:
        with self._calls.open("a") as calls:
            record = {"prompt": request.prompt, "steps": request.steps, "discard": request.discard, **more}
            calls.write(json.dumps({**record, "seed": request.seed, "guidance": request.guidance}) + "\n")

    def _png(self, request: GenerateRequest, index: int) -> bytes:
        from PIL import Image

        buffer = io.BytesIO()
        colour = ((request.seed + index) % 256, self._rank, 0)
        Image.new("RGB", (request.width, request.height), colour).save(buffer, "PNG")
        return buffer.getvalue()


class FallbackRuntime(FakeRuntime):
    """Did not get the cache."""

    backing = {"kind": "PrivateLoad", "fallbackCode": "entry_rejected", "verified": False}  # noqa: RUF012


class CorruptRuntime(FakeRuntime):
    """Rank 1 finds a damaged entry, as dlo_cache reports it; the others wait for it."""

    @classmethod
    def start(cls, config: EngineConfig, rank: int, rendezvous: str, report: Report) -> FakeRuntime:
        """Fail on rank 1, hang elsewhere."""
        from dlo_engine.errors import BadEntry

        if rank == 1:
            raise BadEntry("entry ab12: tensor x does not match", hint="rebuild it", code="Corrupt")
        time.sleep(600)
        return super().start(config, rank, rendezvous, report)


class UnexpectedRuntime(FakeRuntime):
    """Has a defect."""

    @classmethod
    def start(cls, config: EngineConfig, rank: int, rendezvous: str, report: Report) -> FakeRuntime:
        """Raise what nobody foresaw."""
        report("broken", {"rank": rank, "rendezvous": rendezvous, "model": config.model_name})
        raise KeyError("defect")


class NeverReadyRuntime(FakeRuntime):
    """Starts for ever; its first phase says so."""

    @classmethod
    def start(cls, config: EngineConfig, rank: int, rendezvous: str, report: Report) -> FakeRuntime:
        """Report and hang."""
        report("verify", {})
        time.sleep(600)
        return super().start(config, rank, rendezvous, report)
