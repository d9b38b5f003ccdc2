"""An S3 store that means harm, or is broken: bounded in bytes, pages and time, and never a word of it in an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from dlo_cache.errors import Cancelled
from dlo_sources import s3
from dlo_sources.errors import SourceError, SourceInvalid, SourceUnreachable
from dlo_sources.fetch import Fetcher
from dlo_sources.remote import Patience
from dlo_sources.remote_folder import RemoteFolder
from dlo_sources.s3 import Credential, open_s3
from dlo_sources.stage import Stage
from fakes.serving import Handler
from unit.sources.hostile import Answer, answering, endless

SECRET = "CanarySecretCanarySecretCanarySecret"
HEAD = '<?xml version="1.0" encoding="UTF-8"?>'


def listing(keys: list[str], *, size: str = "4", token: str = "", etag: str = "e") -> bytes:
    """One page."""
    items = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>{etag}</ETag></Contents>" for key in keys
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return (
        f"{HEAD}<ListBucketResult><IsTruncated>{'true' if token else 'false'}</IsTruncated>{more}{items}"
        "</ListBucketResult>"
    ).encode()


def refused(answer: Answer, kind: type[SourceError] = SourceInvalid) -> str:
    """The error of opening a store that answers like this."""
    with answering(answer) as (url, _), pytest.raises(kind) as caught:
        open_s3("b", "p", endpoint=url, credential=Credential("AKIACANARY", SECRET))
    assert type(caught.value) is kind
    assert SECRET not in str(caught.value)
    assert "AKIACANARY" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def page(body: bytes) -> Answer:
    """Every request gets this."""
    return lambda handler: handler.plain(200, body, kind="application/xml")


@pytest.mark.parametrize("size", ["-1", "4.5", "x", str(1 << 70), ""])
def test_a_size_that_is_none(size: str) -> None:
    """Whole numbers that a disk could have."""
    refused(page(listing(["p/a"], size=size)))


@pytest.mark.parametrize("key", ["/etc/passwd", "q/a", "pa"])
def test_objects_that_nobody_asked_for(key: str) -> None:
    """What is not below the prefix is another object than its name would say."""
    assert "what was not asked for" in refused(page(listing([key])))


@pytest.mark.parametrize("key", ["p/t//x", "p/t/a\\b", "p/t/\u202ex", f"p/t/{'n' * 300}"])
def test_names_that_lead_elsewhere(key: str, tmp_path: Path) -> None:
    """They are listed, and refused when somebody would open them."""
    with answering(page(listing([key, "p/t/config.json"]))) as (url, _):
        store = open_s3("b", "p", endpoint=url)
        folder = RemoteFolder(Fetcher(store, Stage(tmp_path)))
        with pytest.raises(SourceError) as caught:
            folder.names("t")
    assert caught.value.code == "SourceUntrusted"


@pytest.mark.parametrize("key", ["p/t/../../x", "p/t/./x", "p/../x", "p/.x", "p/t/.git/config"])
def test_dots_are_no_files(key: str) -> None:
    """A name that is hidden, or a way up, is none of the checkpoint's."""
    with answering(page(listing([key, "p/t/config.json"]))) as (url, _):
        assert list(open_s3("b", "p", endpoint=url).objects) == ["t/config.json"]


def test_pages_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither empty pages nor hidden names are listed for ever."""
    monkeypatch.setattr(s3, "_MOST_PAGES", 20)
    for keys in ([], ["p/.hidden", "p/folder/"]):
        numbers = count()

        def answer(handler: Handler, keys: list[str] = keys, numbers: Iterator[int] = numbers) -> None:
            handler.plain(200, listing(keys, token=f"t{next(numbers)}"), kind="application/xml")

        assert "more than" in refused(answer)
        assert next(numbers) < 30


def test_the_same_page_again() -> None:
    """A listing that does not move on."""
    refused(page(listing(["p/a"], token="same")), SourceUnreachable)


def test_listing_ends_when_it_is_cancelled() -> None:
    """At the next page."""
    numbers = count()

    def answer(handler: Handler) -> None:
        assert parse_qs(urlsplit(handler.path).query)
        handler.plain(200, listing(["p/a"], token=f"t{next(numbers)}"), kind="application/xml")

    asked = count()
    with answering(answer) as (url, log), pytest.raises(Cancelled):
        open_s3("b", "p", endpoint=url, cancel=lambda: next(asked) >= 2)
    assert len(log.asked) == 3


def test_an_answer_without_an_end() -> None:
    """Bounded, for a listing and for an error."""
    assert "larger than" in refused(lambda handler: endless(handler, b" " * (1 << 20)))

    def error(handler: Handler) -> None:
        handler.send_response(400)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")

    assert "larger than" in refused(error)


def test_a_bomb_of_entities() -> None:
    """Ten times ten times ten: never unfolded."""
    layers = "".join(f'<!ENTITY e{at} "{f"&e{at - 1};" * 10}">' for at in range(1, 12))
    text = (
        f'{HEAD}<!DOCTYPE x [<!ENTITY e0 "{"x" * 100}">{layers}]><ListBucketResult>&e11;</ListBucketResult>'
    )
    began = time.monotonic()
    refused(page(text.encode()), SourceUnreachable)
    assert time.monotonic() - began < 5


def test_an_error_that_repeats_what_it_was_sent() -> None:
    """The words of a server are nobody's."""

    def answer(handler: Handler) -> None:
        sent = handler.headers["Authorization"]
        body = f"{HEAD}<Error><Code>{SECRET}</Code><Message>{sent}</Message></Error>"
        handler.plain(400, body.encode(), {"x-amz-request-id": SECRET}, "application/xml")

    refused(answer)


def test_an_object_that_drips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What came is counted as it comes, so that a cancelled fetch ends at once and a slow one is noticed."""

    def answer(handler: Handler) -> None:
        if "list-type" in handler.path:
            handler.plain(200, listing(["p/a"], size=str(1 << 30)), kind="application/xml")
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 30))
        handler.send_header("ETag", "e")
        handler.end_headers()
        while True:
            handler.wfile.write(b".")
            time.sleep(0.02)

    with answering(answer) as (url, _):
        store = open_s3("b", "p", endpoint=url)
        began = time.monotonic()
        fetcher = Fetcher(
            store,
            Stage(tmp_path),
            patience=Patience(2, 0.0),
            cancel=lambda: time.monotonic() - began > 0.3,
        )
        with pytest.raises(Cancelled):
            fetcher.files["a"].readinto(bytearray(10), 0)
        assert time.monotonic() - began < 3
        fetcher.close()


def test_an_object_of_another_length(tmp_path: Path) -> None:
    """Longer, shorter, or whole where a range was asked for."""

    def answer(handler: Handler) -> None:
        if "list-type" in handler.path:
            handler.plain(200, listing(["p/longer", "p/shorter", "p/whole"], size="10"))
        else:
            body = {"longer": b"x" * 12, "shorter": b"x" * 5, "whole": b"x" * 10}[handler.path.split("/")[-1]]
            handler.plain(200, body, {"ETag": "e"})

    with answering(answer) as (url, _):
        store = open_s3("b", "p", endpoint=url)
        fetcher = Fetcher(store, Stage(tmp_path), patience=Patience(2, 0.0))
        for name in ("longer", "shorter"):
            with pytest.raises(SourceError):
                fetcher.files[name].read(0, 10)
        with pytest.raises(SourceInvalid, match="does not serve ranges"):
            list(store.stream(store.objects["whole"], 2, 4))
