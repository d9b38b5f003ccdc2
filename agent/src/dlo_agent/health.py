"""``/healthz``, ``/readyz`` and ``/metrics`` over HTTP, in threads of their own.

Alive means that the work loop turns and its threads live, nothing more: a bad disk or an API server that is
away is reported, and a restart would not mend it. Must not call the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Check = Callable[[], str]


class HealthServer:
    """Serves until ``stop``. ``alive`` and ``ready`` return "" where all is well, else what is wrong."""

    def __init__(self, port: int, *, alive: Check, ready: Check, registry: CollectorRegistry) -> None:
        self._server = ThreadingHTTPServer(("", port), _handler(alive, ready, registry))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="dlo-health", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on, also where 0 was asked for."""
        return self._server.server_port

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Ends and closes."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(alive: Check, ready: Check, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif self.path in ("/healthz", "/readyz"):
                problem = alive() if self.path == "/healthz" else ready()
                self._answer(503 if problem else 200, f"{problem or 'ok'}\n".encode(), "text/plain")
            else:
                self._answer(404, b"not found\n", "text/plain")

        def log_message(self, format: str, *args: object) -> None:
            """Probes are not worth a line."""

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
