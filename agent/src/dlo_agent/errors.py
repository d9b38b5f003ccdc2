"""The kinds of failure the agent itself reports; those of the libraries keep their own.

Same form as everywhere: a stable ``code`` word, what and where in ``message``, what to do in ``hint``.
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of the agent's own failures."""

    code: str = "AgentError"

    def __init__(self, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message} — {self.hint}" if self.hint else self.message


class UsageError(AgentError):
    """The command line or the environment is wrong."""

    code = "Usage"


class SourceProblem(AgentError):
    """A source that the spec names and this node cannot use."""

    code = "SourceNotFound"


class DeadlinePassed(AgentError):
    """The gate waited as long as it may."""

    code = "DeadlineExceeded"
