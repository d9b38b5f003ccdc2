"""A proxy in front of a real API server that breaks what passes through it, by rules that a test sets and lifts.

Plain HTTP towards the client, TLS towards the server. It counts writes, keeps what every delete asked for, and can
be told of each write between the server's answer and the client's receipt of it: the moment to kill the client.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

import urllib3

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
WRITES = frozenset(_VERBS.values())
_HOP = frozenset(
    {"connection", "transfer-encoding", "content-length", "accept-encoding", "host", "keep-alive"}
)

_IN_STREAMS = frozenset({"Gone", "Cut", "Mute", "Drop", "Hold"})

Kind = Literal["Refuse", "Gone", "Cut", "Mute", "Drop", "Hold", "Freeze"]


@dataclass(frozen=True)
class Request:
    """One request as the API server's audit log would name it."""

    verb: str
    resource: str
    name: str = ""
    subresource: str = ""
    agent: str = ""
    body: Any = None

    @property
    def writes(self) -> bool:
        """Whether it changes something."""
        return self.verb in WRITES


@dataclass
class Fault:
    """What happens to requests of some verbs on some resources (plurals; none named: all).

    Attributes:
        kind: `Refuse` answers `status` instead of the server; `Gone` ends a watch with an ERROR event of code 410;
            `Cut` breaks a watch off within an event, after `index` whole ones; `Mute` says nothing any more and
            closes nothing; `Drop` leaves out the watch event number `index`, bookmarks not counted; `Hold` keeps
            watch events back until it is lifted; `Freeze` answers lists as they were answered last. Watches that
            are open already are struck too, at their next event.
        times: how often it strikes; None for always.
        struck: how often it did.
    """

    kind: Kind
    verbs: frozenset[str]
    resources: frozenset[str] = frozenset()
    status: int = 503
    retry_after: int | None = None
    index: int = 0
    times: int | None = None
    struck: int = 0
    lifted: threading.Event = field(default_factory=threading.Event)

    def meant(self, request: Request) -> bool:
        """Whether this request is to be struck."""
        return (
            not self.lifted.is_set()
            and request.verb in self.verbs
            and (not self.resources or request.resource in self.resources)
            and (self.times is None or self.struck < self.times)
        )


class FaultProxy:
    """One proxy; a context manager.

    Attributes:
        url: its address.
        writes: writes that the server has answered with success, in order.
        attempts: all writes that came in.
        deletes: bodies of all deletes that came in.
        after_write: told of each write that the server took, before its answer goes back.
    """

    def __init__(self, server: str, ca_file: Path) -> None:
        self._server = server
        self._pool = urllib3.PoolManager(ca_certs=str(ca_file), retries=False, maxsize=32)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._open: set[Any] = set()
        self._closing = threading.Event()
        self._lists: dict[tuple[str, str], bytes] = {}
        self.writes: list[Request] = []
        self.attempts: list[Request] = []
        self.deletes: list[Request] = []
        self.after_write: Callable[[Request], None] = lambda _: None
        self._http = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.heal()
        self.sever()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self._pool.clear()

    def kubeconfig(self, direct: Path, file: Path) -> Path:
        """A kubeconfig with the users of another one, through this proxy."""
        config = json.loads(direct.read_text())
        config["clusters"][0]["cluster"] = {"server": self.url}
        file.write_text(json.dumps(config))
        file.chmod(0o600)
        return file

    def break_(self, fault: Fault) -> Fault:
        """From now on, until it is lifted."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Lifts every fault. What is mute stays mute: a half-open connection does not come back."""
        with self._lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            fault.lifted.set()

    def sever(self) -> None:
        """Breaks off every connection that is open now."""
        with self._lock:
            sockets = tuple(self._open)
        for each in sockets:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                each.shutdown(socket.SHUT_RDWR) if isinstance(each, socket.socket) else each.shutdown()

    # -- called by handlers ----------------------------------------------------------------------------------

    def strike(self, request: Request, *, streaming: bool = False) -> Fault | None:
        """The fault that this request meets, counted; `streaming` for a watch that was let through."""
        with self._lock:
            found = next(
                (
                    fault
                    for fault in self._faults
                    if fault.meant(request) and (fault.kind in _IN_STREAMS or not streaming)
                ),
                None,
            )
            if found is not None:
                found.struck += 1
            return found

    @contextlib.contextmanager
    def held(self, connection: Any) -> Iterator[None]:
        """A connection that `sever` breaks off."""
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> Any:
        """The server's answer, its body not read yet. Raises HTTPError."""
        return self._pool.request(
            method,
            self._server + path,
            headers=headers,
            body=body,
            preload_content=False,
            decode_content=False,
            timeout=urllib3.Timeout(connect=5, read=400),
        )

    def listed(self, place: tuple[str, str], content: bytes, *, frozen: bool) -> bytes:
        """What a list is answered with; remembers it for later."""
        with self._lock:
            if not frozen:
                self._lists[place] = content
            return self._lists.setdefault(place, content)

    def came(self, request: Request) -> None:
        """Notes a write before it goes on."""
        with self._lock:
            self.attempts.append(request)
            if request.verb == "delete":
                self.deletes.append(request)

    def went(self, request: Request) -> None:
        """Notes a write that the server took."""
        with self._lock:
            self.writes.append(request)
        self.after_write(request)

    def wait_closed(self, fault: Fault | None = None) -> bool:
        """Waits until the proxy closes, or the fault is lifted; whether the proxy closes."""
        while not self._closing.wait(0.05):
            if fault is not None and fault.lifted.is_set():
                return False
        return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed here all the time."""


def read_request(method: str, target: str, agent: str, body: bytes | None) -> Request:
    """What a request is about."""
    parts = urlsplit(target)
    query = parse_qs(parts.query)
    words = parts.path.strip("/").split("/")
    words = words[2:] if words[:1] == ["api"] else words[3:]
    if words[:1] == ["namespaces"] and len(words) > 2:
        words = words[2:]
    resource, name, sub = (*words, "", "", "")[:3]
    reads = "get" if name else "list"
    if query.get("watch", [""])[0] in ("true", "1"):
        reads = "watch"
    try:
        value = json.loads(body) if body else None
    except ValueError:
        value = None
    return Request(_VERBS.get(method, reads), resource, name, sub, agent, value)


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

        def _pass(self) -> None:
            with proxy.held(self.connection):
                try:
                    self._serve()
                except (OSError, urllib3.exceptions.HTTPError, ValueError):
                    # The client is gone, or the server is: the client's connection ends without an answer.
                    self.close_connection = True

        do_GET = _pass  # noqa: N815 - as the base class names it
        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else None
            request = read_request(self.command, self.path, self.headers.get("User-Agent", ""), body)
            if request.writes:
                proxy.came(request)
            fault = proxy.strike(request)
            if fault is not None and fault.kind == "Mute":
                proxy.wait_closed()
                self.close_connection = True
                return
            if fault is not None and fault.kind == "Refuse":
                self._refuse(fault)
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            headers["Accept-Encoding"] = "identity"
            answer = proxy.forward(self.command, self.path, headers, body)
            try:
                if request.verb == "watch" and answer.status == 200:
                    with proxy.held(answer):
                        self._stream(answer, request, fault)
                    return
                content = answer.read()
            finally:
                answer.close()
            if request.verb == "list" and answer.status == 200:
                place = self.path, self.headers.get("Accept", "")
                content = proxy.listed(place, content, frozen=fault is not None and fault.kind == "Freeze")
            if request.writes and 200 <= answer.status < 300:
                proxy.went(request)
            self._answer(answer.status, content, dict(answer.headers))

        def _refuse(self, fault: Fault) -> None:
            reasons = {410: "Expired", 429: "TooManyRequests", 403: "Forbidden", 500: "InternalError"}
            status = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": "refused by a test",
                "reason": reasons.get(fault.status, "ServiceUnavailable"),
                "code": fault.status,
            }
            more = {"Content-Type": "application/json"}
            if fault.retry_after is not None:
                more["Retry-After"] = str(fault.retry_after)
            self._answer(fault.status, json.dumps(status).encode(), more)

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, answer: Any, request: Request, fault: Fault | None) -> None:
            """A watch, line by line, as chunks."""
            self.send_response(200)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            seen = 0
            if fault is not None and fault.kind == "Gone":
                self._gone()
                return
            for line in _lines(answer):
                if fault is None or fault.lifted.is_set():
                    fault, seen = proxy.strike(request, streaming=True), 0
                kind = fault.kind if fault is not None else ""
                if kind == "Gone":
                    self._gone()
                    return
                if kind == "Mute":
                    proxy.wait_closed()
                    return
                if kind == "Hold" and proxy.wait_closed(fault):
                    return
                if fault is not None and kind == "Cut" and seen >= fault.index:
                    self._chunk(line[: len(line) // 2])
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                counts = b'"type":"BOOKMARK"' not in line[:40]
                if not (fault is not None and kind == "Drop" and counts and seen == fault.index):
                    self._chunk(line)
                seen += counts
            self._chunk(b"")

        def _gone(self) -> None:
            status = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "Expired",
                "code": 410,
            }
            event = {"type": "ERROR", "object": {**status, "message": "too old resource version"}}
            self._chunk(json.dumps(event).encode() + b"\n")
            self._chunk(b"")

        def _chunk(self, content: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    return Handler


def _lines(answer: Any) -> Iterator[bytes]:
    rest = b""
    for part in answer.stream(65_536):
        *lines, rest = (rest + part).split(b"\n")
        yield from (line + b"\n" for line in lines)
