"""JSON lines on stderr, for every process of ours.

Only process entries call `configure`. Messages are constant, capital first letter, past tense, with key-value
pairs. Must not print tracebacks: an unexpected error becomes one line with the places it came through.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

import structlog

_PLACES = 6


def configure(**bound: Any) -> None:
    """Send structlog and the standard library's warnings to stderr as JSON lines; bind these pairs to all."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _flatten_error,
    ]
    render = structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[*shared, render],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**bound)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _flatten_error, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def where(error: BaseException) -> str:
    """The last places an error came through, innermost last, on one line."""
    frames = traceback.extract_tb(error.__traceback__)[-_PLACES:]
    return " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames)


def describe(error: BaseException) -> str:
    """Type and text of an error on one bounded line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _flatten_error(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    found = event.pop("exc_info", None)
    if found is True:
        found = sys.exc_info()
    error = found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
        event["error"] = describe(error)
        event["where"] = where(error)
    return event
