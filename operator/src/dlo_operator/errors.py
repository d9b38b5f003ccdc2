"""The operator's own errors, and the one place where a failure becomes a retry or a stop."""

from __future__ import annotations

from enum import Enum

from dlo_kube.errors import Conflict, Denied, Expired, Invalid, KubeError, NotFound, Unavailable
from dlo_obs.explained import ExplainedError


class OperatorError(ExplainedError):
    """Base of what this package raises on purpose; message and hint as everywhere."""

    code: str = "OperatorError"


class LeadershipLost(OperatorError):
    """Another process leads, or this one could not renew in time; it must end."""

    code = "LeadershipLost"


class Response(Enum):
    """What to do about a failed reconcile."""

    SOON = "Soon"
    BACK_OFF = "BackOff"
    SLOW = "Slow"


def response_to(error: BaseException) -> Response:
    """How the key of a failed reconcile is tried again. Nothing is given up: the world may change.

    A conflict means that the object moved since it was read: again soon, from a fresh look. What the server
    refuses or forbids changes only by somebody's doing: rarely. Anything else backs off.
    """
    if isinstance(error, Conflict | Expired):
        return Response.SOON
    if isinstance(error, Invalid | Denied | NotFound):
        return Response.SLOW
    return Response.BACK_OFF


def retry_after(error: BaseException) -> float | None:
    """Seconds that the server asked to wait."""
    return error.retry_after if isinstance(error, Unavailable) else None


def reason_of(error: BaseException) -> str:
    """A stable word for metrics."""
    return error.code if isinstance(error, KubeError | OperatorError) else "Internal"
