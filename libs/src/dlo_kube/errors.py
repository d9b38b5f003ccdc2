"""The kinds of failure of a call to the API server.

Every method of a gateway fails with one of these, never with an error of the client library or the network.
`message` says what and where and keeps the server's own words, `hint` says what to do. Whether to retry or to
stop is the caller's decision: nothing here retries, logs or exits.
"""

from __future__ import annotations

from typing import NamedTuple

from dlo_obs.explained import ExplainedError


class Cause(NamedTuple):
    """One field that the server refuses: its path (may be empty) and the server's words."""

    field: str
    message: str


class KubeError(ExplainedError):
    """Base of all failures of this package."""

    code: str = "KubeError"


class NotFound(KubeError):
    """The kind is not served (code `KindNotServed`), or what the call needs is not there."""

    code = "NotFound"


class Conflict(KubeError):
    """A precondition failed, another manager owns a field, or the object exists (code `AlreadyExists`)."""

    code = "Conflict"


class Expired(KubeError):
    """The resource version is too old to go on from: list again."""

    code = "Expired"


class Denied(KubeError):
    """The server does not let this caller do it (`Forbidden`) or does not know the caller (`Unauthorized`)."""

    code = "Forbidden"


class Invalid(KubeError):
    """The server refuses the object or the request as it is; sending it again will not help.

    Attributes:
        causes: the refused fields, in the server's order.
    """

    code = "Invalid"

    def __init__(
        self, message: str, *, hint: str = "", code: str | None = None, causes: tuple[Cause, ...] = ()
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.causes = causes


class Unavailable(KubeError):
    """No usable answer: network, time limit, overload or a fault of the server; a later try may help.

    Attributes:
        retry_after: seconds that the server asks to wait; None when it names none.
    """

    code = "Unavailable"

    def __init__(
        self, message: str, *, hint: str = "", code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.retry_after = retry_after
