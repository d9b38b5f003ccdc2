"""Waiting for whichever of several things happens first."""

from __future__ import annotations

import asyncio
from typing import Any


async def first_done(*waiting: asyncio.Future[Any]) -> None:
    """Return when one of the futures is done; none is cancelled."""
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
