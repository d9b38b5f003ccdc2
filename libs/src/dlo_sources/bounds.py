"""Bounds on what a store may send: how much of an answer, for how long, how slowly, and from which addresses.

Who speaks may be hostile or broken. Time limits of the client libraries count silences only, so that a server
that drips would hold a node's builder for ever. Pure but for the look-up of names.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from dlo_sources.errors import SourceInvalid, SourceUnreachable, SourceUntrusted

#: Of one answer that is no file: a listing of the most objects that count, generously.
ANSWER_BYTES: Final = 16 << 20
ANSWER_SECONDS: Final = 120.0
#: A file's bytes may come as slowly as a tenth of a megabyte a second; what came stays, and others get their turn.
SLOW_SECONDS: Final = 120.0
LEAST_BYTES_PER_SECOND: Final = 100_000

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def bounded(
    pieces: Iterable[bytes],
    what: str,
    *,
    most_bytes: int = ANSWER_BYTES,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """The pieces of one answer. Raises SourceInvalid for one that is too large, SourceUnreachable for one that
    takes too long."""
    began, count = clock(), 0
    for piece in pieces:
        count += len(piece)
        if count > most_bytes:
            raise SourceInvalid(
                f"{what}: an answer of the store is larger than {most_bytes} bytes",
                hint="check the endpoint's address",
            )
        if clock() - began > ANSWER_SECONDS:
            raise SourceUnreachable(
                f"{what}: an answer of the store takes longer than {ANSWER_SECONDS:g} s",
                hint="check the network and the endpoint",
            )
        yield piece


class Pace:
    """Whether bytes come fast enough, counted over the time spent waiting for them alone."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited, self._came = 0.0, 0

    def timed(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The same pieces; the waits for them count."""
        while True:
            before = self._clock()
            piece = next(pieces, None)
            self._waited += self._clock() - before
            if piece is None:
                return
            self._came += len(piece)
            yield piece

    def rested(self, seconds: float) -> None:
        """A pause before asking again counts too."""
        self._waited += seconds

    def is_too_slow(self) -> bool:
        """Asked after every piece: true once a whole window brought too little."""
        if self._waited < SLOW_SECONDS:
            return False
        slow = self._came < self._waited * LEAST_BYTES_PER_SECOND
        self._waited, self._came = 0.0, 0
        return slow


def check_redirect(home: str, target: str, what: str) -> None:
    """Refuses that a store at the host ``home`` sends this agent to a ``target`` inside the network around it.

    A store on a public address sends to public ones; none sends to link-local ones (a cloud's metadata) or, but
    from there, to this machine. Raises SourceUntrusted. A name that does not resolve is left to the connection.
    """
    places = _addresses(target)
    at_home = _addresses(home)
    public = bool(at_home) and all(each.is_global for each in at_home)
    local = any(each.is_loopback for each in at_home)
    for each in places:
        if (
            each.is_link_local
            or each.is_multicast
            or each.is_unspecified
            or (each.is_loopback and not local)
            or (public and not each.is_global)
        ):
            raise SourceUntrusted(
                f"{what}: the store sends to an address inside the network, which is not asked",
                hint="name that store as an endpoint of its own in the Helm values, or correct the endpoint",
            )


def _addresses(host: str) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    made = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    return [getattr(each, "ipv4_mapped", None) or each for each in made]
