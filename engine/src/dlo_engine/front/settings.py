"""What the front does when something goes wrong, as values that tests shorten.

None of these is a flag: they are promises of the product, and `runtime` is code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FrontSettings:
    """Time limits of supervision, in seconds, and the runtime that ranks load."""

    runtime: str = "dlo_engine.runtime:Runtime"
    fault_serve_seconds: float = 20.0
    """How long the front answers 503 after the death of a rank."""
    close_seconds: float = 30.0
    """How long ranks may take to close before they are killed."""
    straggler_seconds: float = 15.0
    """How long the other ranks of a request may take once one of them has failed it."""
    cancel_seconds: float = 10.0
    """How long cancelled requests may take to stop at the end of the drain limit."""
    max_body_bytes: int = 1 << 20
    client_seconds: float = 30.0
    """How long a client may take to send the head of a request, and then its body."""
