"""One HTTP connection: uvicorn's own, with errors in our shape and an end to clients that never finish.

A connection that sends no whole request head in time is closed, so that idle or slow clients cannot take every
file descriptor of the front. Bodies have their own limit in `api.py`. Knows no routes.
"""

from __future__ import annotations

import asyncio
import json
import secrets

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dlo_engine.front.responses import error_content


def connections(seconds: float) -> type[Connection]:
    """The class of connections whose clients may take so long to send the head of a request."""

    class Limited(Connection):
        head_seconds = seconds

    return Limited


class Connection(H11Protocol):
    """One client's connection."""

    head_seconds: float
    _head_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited from now on."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        if self._head_limit is not None:
            self._head_limit.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The next head may come."""
        super().on_response_complete()
        self._await_head()

    def _await_head(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
        self._head_limit = self.loop.call_later(self.head_seconds, self._end_without_head)

    def _end_without_head(self) -> None:
        running = self.cycle is not None and not self.cycle.response_complete
        if not running and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the same error document as everything else."""
        request_id = f"req-{secrets.token_hex(12)}"
        content = error_content(request_id, status=400, message=msg, code="InvalidHttp", param=None)
        body = json.dumps(content).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
