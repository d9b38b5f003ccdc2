"""The HTTP surface: OpenAI images, health, models, status, metrics.

Routes translate between HTTP and the engine and decide nothing else. A client that disconnects cancels its
request.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from typing import Any

import structlog
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from dlo_engine.errors import Cancelled, EngineError
from dlo_engine.front.admission import MAX_SEED, Admitted, RequestRefused, admit, parse_body
from dlo_engine.front.dispatcher import Job, QueueFull
from dlo_engine.front.engine import Engine
from dlo_engine.front.metrics import Metrics
from dlo_engine.front.responses import RequestIds, error_response
from dlo_engine.front.settings import FrontSettings
from dlo_engine.front.waiting import first_done
from dlo_engine.protocol import GenerateResult

_RETRY_SECONDS = 5
_RETRY = {"retry-after": str(_RETRY_SECONDS)}
_CLIENT_CLOSED = 499
_log = structlog.get_logger()


def make_app(engine: Engine, metrics: Metrics, settings: FrontSettings) -> FastAPI:
    """The application of one engine."""
    app = FastAPI(title="DLO engine", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    both = ["GET", "HEAD"]
    app.add_middleware(RequestIds)
    created = int(time.time())

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        code = {404: "NotFound", 405: "MethodNotAllowed"}.get(error.status_code, "InvalidRequest")
        what = f"{request.method} {request.url.path[:200]}"
        message = f"{what} is no method of this path" if code == "MethodNotAllowed" else f"{what} is not here"
        return error_response(
            request.state.request_id,
            status=error.status_code,
            message=message if code != "InvalidRequest" else str(error.detail),
            code=code,
            headers=error.headers,
        )

    @app.api_route("/livez", methods=both)
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.api_route("/health", methods=both)
    async def health() -> Response:
        if engine.state == "ready":
            return JSONResponse({"status": "ready"})
        body = {"status": engine.state, "reason": engine.reason}
        if engine.state == "failed":
            body["code"] = engine.fault.result().error.code
        return JSONResponse(body, status_code=503, headers=_RETRY)

    @app.api_route("/v1/models", methods=both)
    async def models() -> dict[str, Any]:
        name = engine.config.model_name
        model = {"id": name, "object": "model", "created": created, "owned_by": "dlo"}
        return {"object": "list", "data": [model] if engine.state == "ready" else []}

    @app.api_route("/metrics", methods=both)
    async def render_metrics() -> Response:
        if engine.ready.is_set():
            metrics.show(engine.status())
        queued, running = engine.dispatcher.queued, engine.dispatcher.running
        text = metrics.render(queued=queued, running=running, ready=engine.state == "ready")
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/v1/engine/status", methods=both)
    async def status(request: Request) -> Response:
        if not engine.ready.is_set() or engine.state in ("failed", "closed"):
            return _unavailable(request, engine)
        return JSONResponse(engine.status())

    @app.post("/v1/images/generations")
    async def generate(request: Request) -> Response:
        return await _generate(request, engine, metrics, settings)

    return app


async def _generate(request: Request, engine: Engine, metrics: Metrics, settings: FrontSettings) -> Response:
    started = time.monotonic()
    request_id = request.state.request_id
    try:
        body = await _read_body(request, settings.max_body_bytes, settings.client_seconds)
        if engine.state != "ready":
            metrics.count("unavailable")
            return _unavailable(request, engine)
        admitted = admit(
            parse_body(body),
            request_id=_engine_id(request_id),
            model_name=engine.config.model_name,
            limits=engine.limits,
            defaults=engine.defaults,
            random_seed=lambda: secrets.randbelow(MAX_SEED + 1),
        )
        job = engine.submit(admitted.request, on_start=metrics.started)
        result = await _result_unless_gone(request, engine, job)
    except ClientDisconnect:
        metrics.count("cancelled")
        return Response(status_code=_CLIENT_CLOSED)
    except EngineError as error:
        return _refused(request_id, engine, metrics, error)
    metrics.finished(time.monotonic() - started, result.timings)
    _log.info("Request was served", seconds=round(time.monotonic() - started, 3), images=len(result.images))
    return JSONResponse({"created": int(time.time()), "data": _pictures(admitted, result)})


async def _read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The whole body. Raises RequestRefused: 413 as soon as it is known to be longer than `limit` bytes, 408 late."""
    refused = RequestRefused(
        f"the body is larger than {limit} bytes", param=None, code="BodyTooLarge", status=413
    )
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise refused
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise refused
    except TimeoutError as error:
        raise RequestRefused(
            f"the body did not arrive within {seconds:.0f} s",
            param=None,
            code="BodyTooSlow",
            status=408,
        ) from error
    return bytes(body)


async def _result_unless_gone(request: Request, engine: Engine, job: Job) -> GenerateResult:
    """The job's result; cancels the job when the client disconnects (ClientDisconnect)."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await first_done(gone, job.result)
        if not job.result.done():
            raise ClientDisconnect
        return job.result.result()
    finally:
        gone.cancel()
        if not job.result.done():
            engine.dispatcher.cancel(job)
            _log.info("Request was cancelled by its client")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _pictures(admitted: Admitted, result: GenerateResult) -> list[dict[str, str]]:
    texts = [base64.b64encode(image).decode("ascii") for image in result.images]
    if admitted.response_format == "url":
        return [{"url": f"data:image/png;base64,{text}"} for text in texts]
    return [{"b64_json": text} for text in texts]


def _engine_id(request_id: str) -> str:
    """Unique inside the engine even when clients send the same id twice."""
    return f"{request_id}.{secrets.token_hex(4)}"


def _unavailable(request: Request, engine: Engine) -> Response:
    code = {"starting": "Starting", "failed": "Failed"}.get(engine.state, "Draining")
    if engine.state == "failed":
        code = engine.fault.result().error.code
    return error_response(
        request.state.request_id, status=503, message=engine.reason, code=code, headers=_RETRY
    )


def _refused(request_id: str, engine: Engine, metrics: Metrics, error: EngineError) -> Response:
    """Count and answer a request that got no pictures."""
    if isinstance(error, RequestRefused):
        metrics.count("refused")
        return error_response(
            request_id, status=error.status, message=error.message, code=error.code, param=error.param
        )
    if isinstance(error, QueueFull):
        outcome, status = "rejected", 429
    elif isinstance(error, Cancelled):
        outcome, status = "cancelled", 503
    else:
        outcome, status = "failed", 500 if engine.state == "ready" else 503
    metrics.count(outcome)
    headers = None if status == 500 else _RETRY
    return error_response(request_id, status=status, message=str(error), code=error.code, headers=headers)
