"""A pod that is asked through the API server, and what listens in it: anything."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable

import pytest
from dlo_kube.connection import by_address
from dlo_kube.errors import Denied, KubeError, NotFound, Unavailable
from dlo_kube.podproxy import PodProxy
from fakes.serving import Handler, Log, serving

TOKEN = "canary-token"


def asked(answer: Callable[[Handler], None], log: Log | None = None) -> object:
    """What comes of asking."""
    made = type("Pod", (Handler,), {"log": log or Log(), "answer": answer})
    with serving(made) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        proxy = PodProxy(by_address(url, token=TOKEN), seconds=0.5)
        try:
            return proxy.get_json("team", "digits-0", 8000, "/v1/engine/status")
        finally:
            proxy.close()


def plain(body: bytes, status: int = 200, **headers: str) -> Callable[[Handler], None]:
    """A whole answer."""
    return lambda handler: handler.plain(status, body, headers, "application/json")


def test_a_status() -> None:
    """The object, from the pod's port through the API server's proxy."""
    log = Log()
    assert asked(plain(b'{"backing": {"kind": "Cache"}}'), log) == {"backing": {"kind": "Cache"}}
    assert [each.path for each in log.asked] == [
        "/api/v1/namespaces/team/pods/digits-0:8000/proxy/v1/engine/status"
    ]
    assert log.asked[0].headers["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nonsense",
        b"\xff",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": "' + b"x" * (2 << 20) + b'"}',
    ],
    ids=["empty", "list", "words", "bytes", "deep-list", "deep-object", "huge"],
)
def test_what_is_no_status(body: bytes) -> None:
    """One error, whatever it is."""
    with pytest.raises(Unavailable, match="digits-0"):
        asked(plain(body))


@pytest.mark.parametrize(("status", "kind"), [(403, Denied), (404, NotFound), (500, Unavailable)])
def test_a_refusal(status: int, kind: type[KubeError]) -> None:
    """As the API server gives it."""
    with pytest.raises(kind):
        asked(plain(b"{}", status))


def test_a_redirect_is_not_followed() -> None:
    """A pod does not choose what is asked of the API server with this person's token."""
    log = Log()
    with pytest.raises(Unavailable):
        asked(plain(b"", 302, Location="/api/v1/namespaces/kube-system/secrets"), log)
    assert len(log.asked) == 1


def test_an_answer_that_drips() -> None:
    """Its silences are short; all of it is not waited for."""

    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while True:
            handler.wfile.write(b" ")
            time.sleep(0.05)

    began = time.monotonic()
    with pytest.raises(Unavailable, match="takes longer"):
        asked(drip)
    assert time.monotonic() - began < 4


def test_a_packed_answer_is_not_unfolded_beyond_the_bound() -> None:
    """Read up to the bound, then it is no JSON."""
    packed = gzip.compress(b'{"a": "' + b"0" * (64 << 20) + b'"}')
    with pytest.raises(Unavailable, match="not JSON"):
        asked(lambda handler: handler.plain(200, packed, {"Content-Encoding": "gzip"}))
