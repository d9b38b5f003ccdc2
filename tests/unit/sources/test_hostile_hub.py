"""A hub that means harm, or is broken: nothing it says becomes a path, fills the memory, or keeps us waiting."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dlo_sources import bounds
from dlo_sources.bounds import check_redirect
from dlo_sources.errors import SourceError, SourceInvalid, SourceUnreachable, SourceUntrusted
from dlo_sources.fetch import Fetcher
from dlo_sources.hub import HubStore, open_hub
from dlo_sources.remote import Patience, RemoteObject
from dlo_sources.stage import Stage
from fakes.serving import Handler
from unit.sources.hostile import COMMIT, Made, answering, endless, file_of, info

TOKEN = "hf_CanaryCanaryCanaryCanaryCanary"
DIGEST = "a" * 64


def said(body: bytes, kind: type[SourceError] = SourceInvalid) -> str:
    """The error of opening a hub that answers with this."""
    answer = answering(lambda handler: handler.plain(200, body, kind="application/json"))
    with answer as (url, _), pytest.raises(kind) as caught:
        open_hub("a/b", "main", endpoint=url, token=TOKEN)
    assert type(caught.value) is kind
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "sha256",
    ["../../../escaped", "/tmp/escaped", "A" * 64, "a" * 63, "a" * 64 + "\n", "", 7, ["a"], {"a": 1}],
)
def test_a_digest_that_is_none(sha256: object) -> None:
    """A digest is the name of a file here, so it is 64 hexadecimal digits or refused."""
    assert "a sha256 of 'w.safetensors'" in said(info([file_of(sha256=sha256)]))


@pytest.mark.parametrize("key", ["../escaped", "a/b", "", ".", "..", "tag-", "a" * 63, "A" * 64, "a" * 65])
def test_no_other_name_gets_into_the_stage(tmp_path: Path, key: str) -> None:
    """Whoever made the key: nothing is opened outside the folder."""
    (tmp_path / "ingest").mkdir()
    stage = Stage(tmp_path / "ingest")
    with pytest.raises(SourceInvalid, match="its digest is none"):
        stage.fetch(key, 4, None, lambda start: iter([b"evil"[start:]]), subject="w")
    with pytest.raises(SourceInvalid):
        stage.have(key, 4)
    assert [path.name for path in tmp_path.rglob("*")] == ["ingest"]


@pytest.mark.parametrize("size", [-1, 1.5, "4", None, True, 1 << 70, [4]])
def test_a_size_that_is_none(size: object) -> None:
    """Sizes are whole numbers that a disk could have."""
    assert "no usable size" in said(info([file_of(size=size)]))


@pytest.mark.parametrize("name", [None, 7, "", ["a"]])
def test_a_name_that_is_none(name: object) -> None:
    """Names are text."""
    said(info([file_of(name=name)]))


@pytest.mark.parametrize(
    "sha", [TOKEN.ljust(40, "x"), "G" * 40, COMMIT.upper(), None, 7, [], COMMIT + "\n", "../" + "a" * 37]
)
def test_a_commit_that_is_none(sha: object) -> None:
    """A commit gets into the status: 40 hexadecimal digits, and no token that was sent back."""
    assert "names no commit" in said(info([], sha))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"siblings": 7, "sha": 1}',
        b'{"id": "a", "siblings": [7]}',
        b'{"id": "a", "siblings": [{}]}',
        b'{"id": "a", "siblings": [{"rfilename": "a", "lfs": 7}]}',
        b'{"id": "a", "lastModified": 7, "siblings": []}',
        b"\xff\xfe",
        b"null",
    ],
    ids=["deep", "numbers", "odd", "empty", "lfs", "time", "bytes", "null"],
)
def test_an_answer_of_another_kind(body: bytes) -> None:
    """One line, whatever a parser made of it."""
    said(body)


def test_more_files_than_a_checkpoint_has() -> None:
    """Counted."""
    assert "more than 10000 files" in said(info([file_of(name=f"f{at}") for at in range(10_001)]))


def test_an_answer_without_an_end() -> None:
    """It ends at a bound, not where the memory does."""
    with answering(lambda handler: endless(handler, b" " * (1 << 20))) as (url, log):
        with pytest.raises(SourceInvalid, match="larger than"):
            open_hub("a/b", "main", endpoint=url)
        assert len(log.asked) == 1


def test_an_answer_that_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit for all of it, beside that for each silence."""
    monkeypatch.setattr(bounds, "ANSWER_SECONDS", 0.3)

    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    with answering(drip) as (url, _):
        began = time.monotonic()
        with pytest.raises(SourceUnreachable, match="takes longer"):
            open_hub("a/b", "main", endpoint=url)
        assert time.monotonic() - began < 3


def test_a_packed_answer() -> None:
    """It was not asked for, and could be a thousand times as large: refused unread, in both kinds of answer."""
    bomb = gzip.compress(b"0" * (8 << 20))

    def answer(handler: Handler) -> None:
        assert handler.headers["Accept-Encoding"] == "identity"
        handler.plain(200, bomb, {"Content-Encoding": "gzip"})

    with answering(answer) as (url, _):
        with pytest.raises(SourceInvalid, match="is packed"):
            open_hub("a/b", "main", endpoint=url)
        found = RemoteObject("w", len(bomb), DIGEST, "t")
        store = HubStore("a/b", COMMIT, url, {"w": found})
        with pytest.raises(SourceInvalid, match="is packed"):
            list(store.stream(found, 0, found.size))


def test_a_cookie_of_one_tenant_is_not_sent_for_another() -> None:
    """A hub that keeps its visitors by cookies does not mistake the second for the first."""

    def answer(handler: Handler) -> None:
        handler.plain(200, info([]), {"Set-Cookie": "session=first-tenant; Path=/"}, "application/json")

    with answering(answer) as (url, log):
        open_hub("a/b", "main", endpoint=url, token=TOKEN)
        open_hub("a/b", "main", endpoint=url)
    first, second = log.asked
    assert first.headers["authorization"] == f"Bearer {TOKEN}"
    assert "authorization" not in second.headers
    assert "cookie" not in second.headers


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[fe80::1]/",
        "http://0.0.0.0:1/",
        "http://224.0.0.1/",
    ],
)
def test_it_cannot_make_the_agent_ask_the_node(location: str) -> None:
    """A redirect of a file with a digest may lead to another host, but not to a cloud's metadata and the like."""
    found = RemoteObject("w", 4, DIGEST, "t")
    answer = answering(lambda handler: handler.plain(302, b"", {"Location": location}))
    with answer as (url, _), pytest.raises(SourceUntrusted, match="an address inside the network"):
        list(HubStore("a/b", COMMIT, url, {"w": found}).stream(found, 0, 4))


@pytest.mark.parametrize(
    ("home", "target", "allowed"),
    [
        ("9.9.9.9", "8.8.8.8", True),
        ("9.9.9.9", "10.0.0.7", False),
        ("9.9.9.9", "::ffff:10.0.0.7", False),
        ("9.9.9.9", "127.0.0.1", False),
        ("10.1.1.1", "10.0.0.7", True),
        ("10.1.1.1", "8.8.8.8", True),
        ("10.1.1.1", "127.0.0.1", False),
        ("10.1.1.1", "169.254.169.254", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "169.254.169.254", False),
        ("9.9.9.9", "no-such-name.invalid", True),
    ],
)
def test_where_a_store_may_send(home: str, target: str, allowed: bool) -> None:
    """From a public store to public ones; to this machine from this machine; nowhere link-local."""
    if allowed:
        check_redirect(home, target, "w")
        return
    with pytest.raises(SourceUntrusted):
        check_redirect(home, target, "w")


@pytest.mark.parametrize("location", [f"https://{TOKEN}.example.com/x", f"ftp://{TOKEN}/", f"{TOKEN}:/"])
def test_a_token_that_is_sent_back(location: str) -> None:
    """It gets into no error, whatever part of an address it stands in."""
    found = RemoteObject("w", 4, None, "t")
    answer = answering(lambda handler: handler.plain(302, b"", {"Location": location}))
    with answer as (url, _), pytest.raises(SourceError) as caught:
        list(HubStore("a/b", COMMIT, url, {"w": found}, TOKEN).stream(found, 0, 4))
    assert TOKEN.lower() not in str(caught.value).lower()


def test_redirects_in_a_circle() -> None:
    """Counted, for what the hub says and for files."""
    with answering(lambda handler: handler.plain(302, b"", {"Location": handler.path})) as (url, log):
        with pytest.raises(SourceUnreachable):
            open_hub("a/b", "main", endpoint=url)
        count = len(log.asked)
        found = RemoteObject("w", 4, None, "t")
        with pytest.raises(SourceUntrusted, match="redirects"):
            list(HubStore("a/b", COMMIT, url, {"w": found}).stream(found, 0, 4))
    assert count <= 21
    assert len(log.asked) - count == 5


def test_files_that_lie(tmp_path: Path) -> None:
    """Of other lengths and other ranges than asked for: refused, and nothing that is not right stays."""
    right = b"x" * (2 << 20)

    def answer(handler: Handler) -> None:
        start = int((handler.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        body = {"long": right + b"more", "other": b"y" * (len(right) - start)}[
            handler.path.rpartition("/")[2]
        ]
        handler.plain(206 if start else 200, body, {"Content-Range": f"bytes {start}-9/10"} if start else {})

    (tmp_path / "ingest").mkdir()
    with answering(answer) as (url, _):
        objects = {name: RemoteObject(name, len(right), DIGEST, name) for name in ("long", "other")}
        fetcher = Fetcher(
            HubStore("a/b", COMMIT, url, objects), Stage(tmp_path / "ingest"), patience=Patience(2, 0.0)
        )
        buffer = bytearray(10)
        for name in objects:
            with pytest.raises(SourceError):
                fetcher.files[name].readinto(buffer, 0)
        fetcher.close()
    assert buffer == bytearray(10)


def test_bytes_that_come_too_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is not enough: a lane of the node is not held for days. What came is not lost."""
    monkeypatch.setattr(bounds, "SLOW_SECONDS", 0.2)

    def drip(start: int, stop: int) -> Iterator[bytes]:
        for _ in range(3):
            time.sleep(0.01)
            yield b"."
        raise SourceUnreachable("it broke off")

    store = Made(1 << 30, drip)
    came: list[bytes] = []
    began = time.monotonic()
    with pytest.raises(SourceUnreachable, match="too slowly"):
        came.extend(store.read())
    assert time.monotonic() - began < 5
    assert len(store.asked) > 1
    assert store.asked == list(range(0, 3 * len(store.asked), 3))


def test_a_quick_store_with_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only waiting for the store counts, not what is done with its bytes meanwhile."""
    monkeypatch.setattr(bounds, "SLOW_SECONDS", 0.05)
    data = json.dumps(list(range(100))).encode()

    def quick(start: int, stop: int) -> Iterator[bytes]:
        for at in range(start, stop, 50):
            yield data[at : min(at + 50, stop)]

    got = b""
    for piece in Made(len(data), quick).read():
        time.sleep(0.03)
        got += piece
    assert got == data
