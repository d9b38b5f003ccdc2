"""The process of one rank: starts the runtime, then runs one request after the other until told to close.

Started by the front as `python -m dlo_engine.rank FD PARENT`; everything else arrives over the socket FD.
The main thread belongs to the runtime, a second one reads messages so that a cancel arrives in mid-request.
Must not outlive the front and must not open a port.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, cast

import structlog
from dlo_obs.logs import configure, describe, where

from dlo_engine.errors import EngineError, RankDied
from dlo_engine.lifeline import end_with
from dlo_engine.protocol import (
    Cancel,
    Close,
    Done,
    Failed,
    Generate,
    GenerateRequest,
    Launch,
    Phase,
    RankMessage,
    RankRuntime,
    Ready,
    RuntimeFactory,
    StartFailed,
)

_BAD_ENTRY_STATUS = 4
_log = structlog.get_logger()


class Outbox:
    """Messages to the front, whole even when the runtime reports from several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: RankMessage) -> None:
        """Send one message."""
        with self._lock:
            self._connection.send(message)


class Mailbox:
    """What the front has sent: work to do in order, and the ids that are cancelled."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._work: queue.SimpleQueue[Generate | Close] = queue.SimpleQueue()
        self._cancelled: set[str] = set()

    def listen(self) -> None:
        """Read messages until the front is gone, which ends this process at once."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(message, Cancel):
                self._cancelled.add(message.id)
            else:
                self._work.put(message)

    def next(self) -> Generate | Close:
        """The next piece of work; blocks."""
        return self._work.get()

    def cancelled(self, request_id: str) -> bool:
        """Whether this request was given up by its client."""
        return request_id in self._cancelled

    def forget(self, request_id: str) -> None:
        """Drop the mark of a request that has ended."""
        self._cancelled.discard(request_id)


def main(argv: list[str]) -> int:
    """Run one rank to its end; returns the exit status."""
    if not end_with(int(argv[2]), signal.SIGKILL):
        return 1
    descriptor = int(argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    launch = cast(Launch, connection.recv())
    configure(rank=launch.rank)
    _prepare_environment(launch)
    outbox = Outbox(connection)
    runtime = _start(outbox, launch)
    if isinstance(runtime, StartFailed):
        outbox.send(runtime)
        return runtime.exit_status
    mailbox = Mailbox(connection)
    threading.Thread(target=mailbox.listen, daemon=True, name="mailbox").start()
    outbox.send(Ready(launch.rank, runtime.limits, runtime.status()))
    while isinstance(message := mailbox.next(), Generate):
        outbox.send(_run(launch.rank, runtime, message.request, mailbox))
    return _close(runtime)


def _prepare_environment(launch: Launch) -> None:
    """Settings that libraries read once when they load. NCCL's are the user's own."""
    config = launch.config
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Everything an engine reads lies in its entries: no library may look for more on a hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if config.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)


def _start(outbox: Outbox, launch: Launch) -> RankRuntime | StartFailed:
    rank = launch.rank

    def report(phase: str, details: dict[str, Any]) -> None:
        outbox.send(Phase(rank, phase, details))

    try:
        module, _, attribute = launch.runtime.partition(":")
        factory = cast(RuntimeFactory, getattr(importlib.import_module(module), attribute))
        return factory.start(launch.config, rank, launch.rendezvous, report)
    except Exception as error:
        code, message, hint = _explain(error)
        _log.error("Rank failed to start", code=code, reason=message, where=where(error))
        return StartFailed(rank, code, message, hint, _exit_status(error))


def _run(rank: int, runtime: RankRuntime, request: GenerateRequest, mailbox: Mailbox) -> Done | Failed:
    try:
        result = runtime.generate(request, lambda: mailbox.cancelled(request.id))
    except RankDied:
        raise
    except Exception as error:
        code, message, hint = _explain(error)
        _log.error("Request failed", request_id=request.id, code=code, reason=message, where=where(error))
        return Failed(rank, request.id, code, message, hint, runtime.status())
    finally:
        mailbox.forget(request.id)
    return Done(rank, result, runtime.status())


def _close(runtime: RankRuntime) -> int:
    try:
        runtime.close()
    except Exception as error:
        _log.error("Rank failed to close", reason=describe(error), where=where(error))
        return 1
    return 0


def _explain(error: Exception) -> tuple[str, str, str]:
    """Code, message and hint: the error's own where it has them (ours and the cache's do)."""
    code, message = getattr(error, "code", None), getattr(error, "message", None)
    if isinstance(code, str) and isinstance(message, str):
        return code, message, str(getattr(error, "hint", ""))
    return "Internal", describe(error), "see this rank's log lines"


def _exit_status(error: Exception) -> int:
    if isinstance(error, EngineError):
        return error.exit_status
    from_cache = type(error).__module__.startswith("dlo_cache.")
    return _BAD_ENTRY_STATUS if from_cache else 1


if __name__ == "__main__":
    try:
        status = main(sys.argv)
    except Exception as defect:
        _log.critical("Rank ended in an unexpected error", error=describe(defect), where=where(defect))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The runtime has given everything back; tearing down the interpreter with torch in it takes seconds.
    os._exit(status)
