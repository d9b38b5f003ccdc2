"""`serve`: binds the port, starts the ranks, serves until a signal or a fault, and decides the exit status.

0 after an ordered shutdown, 1 after a failure, 2 for a wrong command line, 3 for a refused fallback, 4 for a
bad entry, 128 + signal when a second signal ends it at once. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn
from dlo_obs.logs import describe, where

from dlo_engine.config import EngineConfig
from dlo_engine.errors import EngineError, InvalidConfiguration, PortInUse
from dlo_engine.front.api import make_app
from dlo_engine.front.connection import connections
from dlo_engine.front.cores import usable_cores
from dlo_engine.front.engine import Engine, Fault
from dlo_engine.front.events import Events
from dlo_engine.front.metrics import Metrics
from dlo_engine.front.settings import FrontSettings
from dlo_engine.front.waiting import first_done
from dlo_engine.termination import write_termination_message

_BACKLOG = 128
_FLUSH_SECONDS = 5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = structlog.get_logger()


def serve(config: EngineConfig, *, events: bool, settings: FrontSettings | None = None) -> int:
    """Serve one engine to its end; returns the exit status and has printed why on stderr."""
    settings = settings or FrontSettings()
    channel = Events(enabled=events)
    try:
        _check_handover(config.handover)
        if config.device == "cpu" and config.threads is None:
            config = dataclasses.replace(config, threads=max(1, usable_cores() // config.world))
        with bind(config.host, config.port) as listener:
            return asyncio.run(_Service(config, settings, channel, listener).run())
    except EngineError as error:
        return fail(config, channel, error, error.exit_status)
    except Exception as error:
        _log.critical("Front ended in an unexpected error", error=describe(error), where=where(error))
        defect = EngineError(describe(error), hint="this is a defect: please report it", code="Internal")
        return fail(config, channel, defect, defect.exit_status)
    finally:
        channel.close()


def _check_handover(path: Path) -> None:
    """The ranks read it; that it is there at all can be said before they start."""
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise InvalidConfiguration(
            f"the hand-over file {path} cannot be read: {error.strerror}",
            hint="pass the file that the gate or `dlo run` wrote",
            code="HandoverNotFound",
        ) from error


def fail(config: EngineConfig, events: Events, error: EngineError, exit_status: int) -> int:
    """Say once, everywhere it is looked for, why the engine ends; returns the exit status."""
    events.emit({"event": "failed", "code": error.code, "message": error.message, "hint": error.hint})
    write_termination_message(config.termination_message_path, error.line)
    sys.stderr.write(f"error: {error.line}\n")
    sys.stderr.flush()
    return exit_status


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket. Raises PortInUse, or InvalidConfiguration for one that can never be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise InvalidConfiguration(f"--host {host} is no address", hint="use 127.0.0.1 or 0.0.0.0") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            what = f"cannot listen on {host} port {port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                hint = "choose another --port, or 0 for any free one"
                raise PortInUse(what, hint=hint) from error
            hint = "choose a --port above 1023 and a --host of this machine"
            raise InvalidConfiguration(what, hint=hint, code="PortDenied") from error
        listener.setblocking(False)
        yield listener


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Service:
    """One run: engine, HTTP server and signals."""

    def __init__(
        self, config: EngineConfig, settings: FrontSettings, events: Events, listener: socket.socket
    ) -> None:
        self._config = config
        self._settings = settings
        self._events = events
        self._listener = listener
        self._signals: list[signal.Signals] = []

    async def run(self) -> int:
        """Serve; returns the exit status."""
        loop = asyncio.get_running_loop()
        self._stop, self._force = asyncio.Event(), asyncio.Event()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._engine = engine = Engine(self._config, self._settings, self._events.emit)
        app = make_app(engine, Metrics(), self._settings)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=connections(self._settings.client_seconds),
                log_config=None,
                access_log=False,
                lifespan="off",
                loop="none",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )
        http = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._announce_listening()
        forced = asyncio.create_task(self._force.wait())
        life = asyncio.create_task(self._live())
        try:
            await first_done(life, forced, http)
            if life.done():
                return life.result()
            life.cancel()
            if forced.done():
                return 128 + self._signals[-1]
            raise EngineError("the HTTP server stopped by itself", hint="see the log", code="ServerStopped")
        finally:
            await engine.kill()
            self._server.should_exit = True
            self._server.force_exit = forced.done()
            forced.cancel()
            await asyncio.wait({http})

    async def _live(self) -> int:
        """Start, serve, and end in order; returns the exit status."""
        engine = self._engine
        engine.start()
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(engine.ready.wait())
        await first_done(stop, ready, engine.fault)
        if ready.done() and not engine.fault.done():
            status = engine.status()
            _log.info("Engine became ready", url=self._url, backing=status["backing"])
            self._events.emit({"event": "ready", "url": self._url, "port": self._port, "status": status})
        await first_done(stop, engine.fault)
        if not engine.fault.done():
            await self._shut_down()
        if engine.fault.done():
            return await self._end_failed(engine.fault.result(), stop)
        return 0

    async def _shut_down(self) -> None:
        """Drain and close, unless a fault comes between."""
        engine = self._engine
        _log.info("Shutdown was asked for", signal=self._signals[0].name)
        self._events.emit({"event": "draining"})
        drain = asyncio.create_task(engine.drain(self._config.drain_timeout_seconds))
        await first_done(drain, engine.fault)
        drain.cancel()
        if not engine.fault.done():
            await engine.close()
            _log.info("Engine was closed")

    async def _end_failed(self, fault: Fault, stop: asyncio.Task[bool]) -> int:
        """After the death of a rank answer 503 for a while; a failed start ends at once."""
        await self._engine.kill()
        exit_status = fail(self._config, self._events, fault.error, fault.exit_status)
        if fault.was_ready:
            await asyncio.wait({stop}, timeout=self._settings.fault_serve_seconds)
        return exit_status

    def _on_signal(self, number: int) -> None:
        self._signals.append(signal.Signals(number))
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    @property
    def _port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def _url(self) -> str:
        host = self._config.host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def _announce_listening(self) -> None:
        _log.info("Port was opened", url=self._url)
        self._events.emit({"event": "listening", "url": self._url, "port": self._port})
