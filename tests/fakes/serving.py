"""What the stand-ins of stores share: answers with ranges, faults, and a server that runs beside a test."""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHUNK = 1 << 18
KINDS = ("unavailable", "slow", "truncated", "damaged", "busy")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The command line that stand-ins have in common: what is served, and where."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", default="0.0.0.0")  # noqa: S104 - pods of a cluster beside it ask
    parser.add_argument("--port", type=int, required=True)
    return parser


def serve_until_told(line: str) -> None:
    """Says where it serves, and waits for SIGTERM or Ctrl-C."""
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: end.set())
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    end.wait()


@dataclass
class Fault:
    """A misbehaviour of requests whose path holds ``match``, ``times`` times (-1: always).

    ``unavailable`` answers 503, ``busy`` 429; ``truncated`` ends after half of the body; ``damaged`` flips a
    bit at the end of a body of 1 MiB and more; ``slow`` sends 64 KiB every 0.05 s.
    """

    kind: str
    match: str = ""
    times: int = -1


@dataclass(frozen=True)
class Stored:
    """One file as it is served."""

    path: Path
    size: int
    sha256: str
    sha1: str

    @classmethod
    def of(cls, path: Path, blobs: Path) -> Stored:
        """A copy of the file in ``blobs``, which stays as it is when the file changes."""
        size = path.stat().st_size
        sha256, sha1 = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                sha256.update(chunk)
                sha1.update(chunk)
        blob = blobs / sha256.hexdigest()
        if not blob.exists():
            shutil.copyfile(path, blob)
        return cls(blob, size, sha256.hexdigest(), sha1.hexdigest())


@dataclass
class Asked:
    """A request that came; header names in small letters."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class Log:
    """Faults to come and requests that came; shared by the threads of a server."""

    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    sent_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, path: str) -> str:
        """The kind of the fault that this request meets, "" for none."""
        with self.lock:
            for each in self.faults:
                if each.match in path and each.times != 0:
                    each.times -= 1
                    return each.kind
        return ""

    def bodies(self, match: str) -> list[Asked]:
        """GET requests whose path holds ``match``."""
        return [each for each in self.asked if each.method == "GET" and match in each.path]


class Handler(BaseHTTPRequestHandler):
    """Answers with files; a subclass has ``log`` and ``answer``."""

    protocol_version = "HTTP/1.1"
    log: Log

    def answer(self) -> None:
        """Answers one request."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Any request; the control path sets the standing fault."""
        with self.log.lock:
            self.log.asked.append(
                Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
            )
        self.kind = self.log.fault(self.path)
        if self.kind in ("unavailable", "busy"):
            self.plain(503 if self.kind == "unavailable" else 429, b"come again")
        else:
            self.answer()

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        """``PUT /stand-in/fault`` with a kind, or with nothing: how a test in another process breaks it."""
        kind = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode().strip()
        if self.path != "/stand-in/fault" or kind not in ("", *KINDS):
            self.plain(404, b"no such control")
            return
        with self.log.lock:
            self.log.faults[:] = [Fault(kind)] if kind else []
        self.plain(200, b"ok")

    def plain(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, kind: str = "text/plain"
    ) -> None:
        """A short answer."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def file(self, stored: Stored, headers: Mapping[str, str]) -> None:
        """A file, or the range of it that was asked for."""
        start, stop, status = 0, stored.size, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            start, stop = int(wanted[1]), min(int(wanted[2] or stored.size) + 1, stored.size)
            status = 206
            if start >= stored.size:
                self.plain(416, b"", {"Content-Range": f"bytes */{stored.size}"})
                return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{stored.size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command != "HEAD":
            self._body(stored, start, stop)

    def _body(self, stored: Stored, start: int, stop: int) -> None:
        first = start
        end = start + (stop - start) // 2 if self.kind == "truncated" else stop
        step = 1 << 16 if self.kind == "slow" else CHUNK
        with stored.path.open("rb") as file:
            file.seek(start)
            while start < end:
                data = bytearray(file.read(min(step, end - start)))
                if not data:
                    break
                start += len(data)
                if self.kind == "damaged" and start == end and stop - first >= 1 << 20:
                    data[-1] ^= 1
                with self.log.lock:
                    self.log.sent_bytes += len(data)
                self.wfile.write(data)
                if self.kind == "slow":
                    time.sleep(0.05)
        if self.kind == "truncated":
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


class Server(ThreadingHTTPServer):
    """Threads that do not outlive it; a client that went away is no event."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients break off on purpose here."""


@contextmanager
def serving(handler: type[Handler], *, host: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
    """A server of its own thread for the block."""
    server = Server((host, port), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
