"""A web server that answers as a test says, so that answers no healthy API server gives can be seen too."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from dlo_kube.client import ClusterGateway
from dlo_kube.connection import by_address

Body = bytes | Iterator[bytes]


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """What to send: an iterator is streamed in chunks; `cut` closes the connection before the end of the body."""

    code: int = 200
    body: Body = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False


def status(code: int, reason: str, message: str, **details: Any) -> Answer:
    """A failure as the API server writes it."""
    value = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return Answer(code, json.dumps({**value, "message": message, "details": details}).encode())


def events(*values: dict[str, Any]) -> Iterator[bytes]:
    """Lines of a watch."""
    for value in values:
        yield json.dumps(value).encode() + b"\n"


class HttpServer:
    """Serves on loopback while it is open."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.asked: list[Asked] = []
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                text = self.rfile.read(length)
                parts = urlsplit(self.path)
                asked = Asked(
                    self.command,
                    parts.path,
                    dict(parse_qsl(parts.query)),
                    {name.lower(): value for name, value in self.headers.items()},
                    json.loads(text) if text else None,
                )
                outer.asked.append(asked)
                self._send(answer(asked))

            do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - names that the base class looks for

            def _send(self, made: Answer) -> None:
                self.send_response(made.code)
                for name, value in made.headers.items():
                    self.send_header(name, value)
                if isinstance(made.body, bytes):
                    self.send_header("Content-Length", str(len(made.body) + made.cut))
                    self.end_headers()
                    self.wfile.write(made.body)
                else:
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    for part in made.body:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                        self.wfile.flush()
                    if not made.cut:
                        self.wfile.write(b"0\r\n\r\n")
                self.close_connection = made.cut

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that goes away is what some tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def gateway(self, **options: Any) -> ClusterGateway:
        """A gateway that talks to it."""
        return ClusterGateway(by_address(self.url, token="secret"), **options)

    def silence(self, after: Iterator[bytes]) -> Iterator[bytes]:
        """These parts, and then nothing, with the connection open, for as long as the test lasts."""
        yield from after
        self.closing.wait(20)

    def trickle(self, seconds: float) -> Iterator[bytes]:
        """A body that comes byte by byte and has no end."""
        while not self.closing.is_set():
            yield b" "
            time.sleep(seconds)
