"""Streams and events of a device behind one small interface, and their do-nothing form for the host.

With `transfer.py` the only module that touches streams and events. Must not decide an order: it records and
waits where it is told to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """Streams of one device. Handles and events are opaque to the caller.

    `copy` is the one copy stream, `gather` the one that weight collectives run on.
    """

    copy: Any
    gather: Any

    def enter_thread(self) -> None:
        """Make the device current in the calling thread."""

    def compute(self) -> Any:
        """The stream that kernels started by the calling thread go to. Ask in the computing thread only."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """What is started inside goes to `stream`."""

    def record(self, stream: Any) -> Any:
        """An event behind everything put on `stream` so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """`stream` goes on only after `event`. Does not block the caller."""

    def synchronize(self, event: Any) -> None:
        """Block the caller until `event` has come."""

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Put a copy of equal sized byte tensors on `stream`; both must stay untouched until it has run."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds of device time between two events that have come."""

    def drain(self) -> None:
        """Block until the device has finished everything."""


class HostStreams:
    """The host as a device: everything is done when the call returns, an event is a point in time."""

    copy: Any = "host"
    gather: Any = "host"

    def enter_thread(self) -> None:
        """Nothing is current."""

    def compute(self) -> Any:
        """The one pretended stream."""
        return "host"

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:  # noqa: ARG002
        """Nothing to switch."""
        yield

    def record(self, stream: Any) -> Any:  # noqa: ARG002
        """Now, in seconds."""
        return time.perf_counter()

    def wait(self, stream: Any, event: Any) -> None:
        """Every recorded event has come already."""

    def synchronize(self, event: Any) -> None:
        """Every recorded event has come already."""

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:  # noqa: ARG002
        """A plain copy."""
        destination.copy_(source)

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Wall-clock time between two events."""
        return float(end - begin) * 1000.0

    def drain(self) -> None:
        """Nothing is outstanding."""


class CudaStreams:
    """Streams and timing events of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda  # its classes are typed in some releases only
        self._cuda = cuda
        self.copy: Any = cuda.Stream(device)
        self.gather: Any = cuda.Stream(device)

    def enter_thread(self) -> None:
        """The current device is a setting of each thread."""
        torch.cuda.set_device(self._device)

    def compute(self) -> Any:
        """The calling thread's current stream."""
        return torch.cuda.current_stream(self._device)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make `stream` current in this thread."""
        with torch.cuda.stream(stream):
            yield

    def record(self, stream: Any) -> Any:
        """A timing event on `stream`."""
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Order on the device; the host goes on."""
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        """Block this thread only."""
        event.synchronize()

    def copy_async(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """`source` is pinned host memory."""
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Device time between two events."""
        return float(begin.elapsed_time(end))

    def drain(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self._device)


def streams_for(device: torch.device) -> Streams:
    """The streams of a device: CUDA's own, or the host's pretended ones."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
