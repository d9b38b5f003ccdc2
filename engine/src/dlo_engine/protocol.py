"""Messages between the front process and the rank processes, and what a rank expects of its runtime.

Plain frozen dataclasses that travel pickled over one socket pair per rank. Must not import torch: the front
process reads every one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dlo_engine.config import EngineConfig

Report = Callable[[str, dict[str, Any]], None]
"""`report(phase, details)`: progress of a start. Details are JSON values."""


@dataclass(frozen=True)
class GenerateRequest:
    """One admitted request with every default filled in. Sizes are pixels, `seed` is 0..2^63-1.

    With `discard` the request is a copy that only keeps a wave whole: run it, return no images.
    """

    id: str
    prompt: str
    n: int
    width: int
    height: int
    steps: int
    guidance: float | None
    seed: int
    discard: bool = False


@dataclass(frozen=True)
class GenerateResult:
    """What one rank returns: PNG files on tensor rank 0 (empty elsewhere, when cancelled or discarded)."""

    id: str
    images: tuple[bytes, ...] = ()
    cancelled: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds and counts: `steps`, `computeMs`, `copyMs`, `waitMs`, `copiedBytes`."""


@dataclass(frozen=True)
class Limits:
    """What the loaded model accepts, and its own defaults where the command line names none."""

    pixel_multiple: int = 16
    max_side: int = 4096
    default_width: int = 1024
    default_height: int = 1024
    default_steps: int = 28
    default_guidance: float | None = 3.5


class RankRuntime(Protocol):
    """The seam: what the rank's main loop calls. `dlo_engine.runtime.Runtime` is the real one."""

    @property
    def limits(self) -> Limits:
        """Size limits and defaults of the loaded model; the same on every rank."""

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> GenerateResult:
        """Run one request on this rank. `cancelled` is polled between steps.

        An `EngineError` (or any exception) must mean that this rank left no collective half done and can
        serve the next request; a rank that cannot go on lets `RankDied` out, or exits.
        """

    def status(self) -> dict[str, Any]:
        """This rank's share of `/v1/engine/status` (JSON values)."""

    def close(self) -> None:
        """Synchronize, unregister, remove hooks, unmap, release leases, destroy groups."""


class RuntimeFactory(Protocol):
    """A class with the `start` that builds a runtime, returning when its weights are usable."""

    def start(self, config: EngineConfig, rank: int, rendezvous: str, report: Report) -> RankRuntime:
        """Open, verify, import, build, warm up. `rendezvous` is a `file://` URL in a private directory."""


# ---- front -> rank -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """First message to a rank: everything it needs to start. `runtime` is `module:attribute`."""

    config: EngineConfig
    rank: int
    rendezvous: str
    runtime: str


@dataclass(frozen=True)
class Generate:
    """Run this request now (one at a time per rank)."""

    request: GenerateRequest


@dataclass(frozen=True)
class Cancel:
    """Stop the request with this id between steps, if it is still running."""

    id: str


@dataclass(frozen=True)
class Close:
    """Finish, close the runtime and exit 0."""


# ---- rank -> front -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Progress of a start."""

    rank: int
    phase: str
    details: dict[str, Any]


@dataclass(frozen=True)
class Ready:
    """The runtime's weights are usable."""

    rank: int
    limits: Limits
    status: dict[str, Any]


@dataclass(frozen=True)
class StartFailed:
    """The runtime could not start; the rank exits after this message."""

    rank: int
    code: str
    message: str
    hint: str
    exit_status: int


@dataclass(frozen=True)
class Done:
    """A request ran (or was cancelled); the rank is idle. `status` is the rank's status afterwards."""

    rank: int
    result: GenerateResult
    status: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """A request failed; the rank is idle and usable."""

    rank: int
    id: str
    code: str
    message: str
    hint: str
    status: dict[str, Any]


FrontMessage = Launch | Generate | Cancel | Close
RankMessage = Phase | Ready | StartFailed | Done | Failed
