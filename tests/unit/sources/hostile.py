"""A server that answers as a test says, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dlo_sources.remote import Patience, RemoteObject, read_stream
from fakes.serving import Handler, Log, serving

Answer = Callable[[Handler], None]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def answering(answer: Answer) -> Iterator[tuple[str, Log]]:
    """Its address, and what it was asked."""
    log = Log()
    handler = type("Hostile", (Handler,), {"log": log, "answer": answer})
    with serving(handler) as server:
        yield f"http://127.0.0.1:{server.server_port}", log


def info(siblings: list[Any], sha: Any = COMMIT) -> bytes:
    """What a hub says of a repository."""
    return json.dumps({"id": "a/b", "modelId": "a/b", "sha": sha, "siblings": siblings}).encode()


def file_of(name: Any = "w.safetensors", size: Any = 4, sha256: Any = None) -> dict[str, Any]:
    """One file of it."""
    lfs = {"lfs": {"sha256": sha256, "size": size, "pointerSize": 134}} if sha256 is not None else {}
    return {"rfilename": name, "size": size, "blobId": "f" * 40, **lfs}


class Made:
    """A store of one file whose stream a test makes from start and stop."""

    name, revision = "made", ""

    def __init__(self, size: int, stream: Callable[[int, int], Iterator[bytes]]) -> None:
        self.objects = {"w": RemoteObject("w", size, "a" * 64, "w")}
        self.asked: list[int] = []
        self._stream = stream

    def stream(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """See Store.stream."""
        self.asked.append(start)
        return self._stream(start, stop)

    def read(self) -> Iterator[bytes]:
        """All of it, taken up at once where it breaks off."""
        found = self.objects["w"]
        return read_stream(self, found, 0, found.size, patience=Patience(3, 0.0), cancel=None)


def endless(handler: Handler, piece: bytes, *, kind: str = "application/json") -> None:
    """A body without an end, in chunks."""
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
