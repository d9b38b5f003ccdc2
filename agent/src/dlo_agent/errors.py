"""The kinds of failure the agent itself reports; those of the libraries keep their own.

Same form as everywhere: a stable ``code`` word, what and where in ``message``, what to do in ``hint``.
"""

from __future__ import annotations

from dlo_obs.explained import ExplainedError


class AgentError(ExplainedError):
    """Base of the agent's own failures."""

    code: str = "AgentError"


class UsageError(AgentError):
    """The command line or the environment is wrong."""

    code = "Usage"


class SourceProblem(AgentError):
    """A source that the spec names and this node cannot use."""

    code = "SourceNotFound"


class DeadlinePassed(AgentError):
    """The gate waited as long as it may."""

    code = "DeadlineExceeded"
