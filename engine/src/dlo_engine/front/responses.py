"""JSON answers in the shape of the OpenAI API, each with its request id.

`{"error": {"message", "type", "param", "code"}, "request_id"}`; the id also travels as `x-request-id`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

import structlog
from dlo_obs.logs import describe, where
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = structlog.get_logger()
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


def error_response(
    request_id: str,
    *,
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """One error as an answer."""
    content = error_content(request_id, status=status, message=message, code=code, param=param)
    return JSONResponse(content, status_code=status, headers=dict(headers or {}))


def error_content(
    request_id: str, *, status: int, message: str, code: str, param: str | None
) -> dict[str, object]:
    """The document of one error. `type` follows from the status as in the OpenAI API.

    Half characters, which JSON can spell and UTF-8 cannot, become question marks.
    """
    kind = {404: "not_found_error", 429: "rate_limit_error"}.get(status)
    if kind is None:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": _whole(message),
            "type": kind,
            "param": None if param is None else _whole(param),
            "code": code,
        },
        "request_id": request_id,
    }


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


class RequestIds:
    """ASGI middleware: an id for every request (the client's own if it is plain), and no answer without one.

    An unexpected error becomes a JSON 500 and one log line.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                _log.error("Request ended in an unexpected error", error=describe(error), where=where(error))
                if started:
                    raise
                response = error_response(
                    request_id, status=500, message="the server failed to answer", code="Internal"
                )
                await response(scope, receive, send_with_id)
