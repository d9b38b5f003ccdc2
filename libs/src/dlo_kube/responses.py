"""What the API server answered, as an error of this package: the one place that knows status codes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from dlo_kube.errors import Cause, Conflict, Denied, Expired, Invalid, KubeError, NotFound, Unavailable

_LONGEST: Final = 2000
_LONGEST_WAIT: Final = 300.0
#: An object that does not have the shape of its kind; in an apply, the server calls that a fault of its own (500).
_MISSHAPEN: Final = re.compile("failed to create typed patch object|failed to convert new object")


def failure(code: int, body: bytes, what: str, headers: Mapping[str, str] | None = None) -> KubeError:
    """The error for an HTTP answer.

    Args:
        code: HTTP status code.
        body: the answer's body: a Status object, or whatever something in between has sent.
        what: the call, for the message.
        headers: the answer's headers.
    """
    status = _status(body)
    words = status.get("message") or body[:_LONGEST].decode(errors="replace").strip() or f"HTTP status {code}"
    return _error(code, status, f"{what}: {words}", _asked_wait((headers or {}).get("Retry-After")))


def failure_event(status: Mapping[str, Any], what: str) -> KubeError:
    """The error for an ERROR event in a watch; `status` is its object."""
    code = status.get("code", 0)
    return _error(code, status, f"{what}: {status.get('message', 'the watch failed')}", None)


def names_an_object(body: bytes) -> bool:
    """Whether a 404 says that one object is not there, and not that its kind is not served."""
    return bool(_details(_status(body)).get("name"))


def _error(code: int, status: Mapping[str, Any], message: str, retry_after: float | None) -> KubeError:
    if code == 410 or status.get("reason") in {"Expired", "Gone"}:
        return Expired(message)
    if code == 409:
        return Conflict(message, code="AlreadyExists" if status.get("reason") == "AlreadyExists" else None)
    if code in {401, 403, 404}:
        return _not_found(status, message) if code == 404 else _denied(code, status, message)
    if (code != 429 and 400 <= code < 500) or (code == 500 and _MISSHAPEN.search(message)):
        causes = tuple(Cause(_field(c.get("field", "")), c.get("message", "")) for c in _causes(status))
        if any(cause.field == "metadata.uid" for cause in causes):
            # An apply that names an object which is not the one of that name any more.
            return Conflict(message)
        return Invalid(message, causes=causes)
    if retry_after is None:
        retry_after = _asked_wait(_details(status).get("retryAfterSeconds"))
    return Unavailable(message, code="TooManyRequests" if code == 429 else None, retry_after=retry_after)


def _not_found(status: Mapping[str, Any], message: str) -> NotFound:
    if _details(status).get("name"):
        return NotFound(message)
    return NotFound(message, code="KindNotServed", hint="install the CRDs of this version")


def _denied(code: int, status: Mapping[str, Any], message: str) -> Denied:
    if code == 401:
        return Denied(message, code="Unauthorized", hint="check the credentials")
    if any(cause.get("reason") == "NamespaceTerminating" for cause in _causes(status)):
        return Denied(message, code="NamespaceTerminating")
    return Denied(message, hint="check the roles that are bound to this account")


def _status(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and value.get("kind") == "Status" else {}


def _details(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return status.get("details") or {}


def _causes(status: Mapping[str, Any]) -> list[dict[str, str]]:
    return _details(status).get("causes") or []


def _field(path: str) -> str:
    """A cause's path; rules of the whole object have none, for which the server writes `<nil>`."""
    return "" if path == "<nil>" else path


def _asked_wait(value: Any) -> float | None:
    """Seconds that the server asks to wait, bounded; a date instead of a number is not used by API servers."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return min(seconds, _LONGEST_WAIT) if seconds > 0 else None
