"""How long the operator waits for more, so that one look and one write do for many changes. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Longest pause between two statuses in which nothing urgent has changed, as a multiple of the shortest.
CALMEST: Final = 6


@dataclass(frozen=True)
class Pace:
    """Pauses in seconds.

    Attributes:
        calm: shortest time between two writes of a status in which nothing urgent has changed; doubles from one to
            the next, up to a minute.
        settle: from news to the look at what they concern; a changed spec is looked at at once.
        node: shortest time between two looks at a node, each of which writes what all deployments need there.
    """

    calm: float = 10.0
    settle: float = 0.25
    node: float = 2.0


PACE: Final = Pace()
