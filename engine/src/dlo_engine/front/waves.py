"""PURE: which queued requests run together.

With AllGather the replicas of a group step in lockstep, so a wave holds only requests that run the same
blocks the same number of times; a member without a request runs a copy whose result is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlo_engine.protocol import GenerateRequest

WaveKey = tuple[str, int, int, int, int, bool]
_ENDPOINT = "images/generations"


def wave_key(request: GenerateRequest) -> WaveKey:
    """Endpoint, steps, width, height, n, guidance on or off: equal for requests that may share a wave."""
    guided = request.guidance is not None and request.guidance > 1
    return (_ENDPOINT, request.steps, request.width, request.height, request.n, guided)


def pick_wave(queued: Sequence[GenerateRequest], members: int) -> list[int]:
    """Positions of the next wave: the oldest request and up to `members - 1` later ones like it."""
    if not queued:
        return []
    key = wave_key(queued[0])
    return [index for index, request in enumerate(queued) if wave_key(request) == key][:members]


def fill_wave(chosen: Sequence[GenerateRequest], members: int) -> list[GenerateRequest]:
    """One request per member: the chosen ones, then copies of the first whose results are discarded."""
    copies = (
        replace(chosen[0], id=f"{chosen[0].id}-copy{index}", discard=True)
        for index in range(len(chosen), members)
    )
    return [*chosen, *copies]
