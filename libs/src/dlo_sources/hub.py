"""A repository of a Hugging Face hub at one commit, through ``huggingface_hub``: metadata, URLs, its session.

The token goes to the hub's own address and nowhere else: a request that would leave it is refused, but for
the bytes of a file whose sha256 the hub stated, which may come from another host and then without the token.
No word of a server gets into an error, since a server may repeat what it was sent.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from typing import Final
from urllib.parse import urljoin, urlsplit

import httpx2
from huggingface_hub import HfApi, get_session, hf_hub_url, set_client_factory
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from dlo_sources.bounds import bounded, check_redirect
from dlo_sources.errors import (
    SourceChanged,
    SourceError,
    SourceInvalid,
    SourceNotFound,
    SourceUnauthorized,
    SourceUnreachable,
    SourceUntrusted,
)
from dlo_sources.remote import CONNECT_SECONDS, MOST_OBJECTS, READ_SECONDS, RemoteObject, checked

PUBLIC_HUB: Final = "https://huggingface.co"
_MOST_REDIRECTS: Final = 5
_SHORT: Final = 12
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_TIMEOUT: Final = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
_bound_to: ContextVar[str | None] = ContextVar("hub_origin", default=None)


@dataclass(frozen=True)
class HubStore:
    """See ``dlo_sources.remote.Store``; made by ``open_hub``."""

    repo: str
    revision: str
    endpoint: str
    objects: dict[str, RemoteObject]
    token: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Repository and commit."""
        return f"{self.repo}@{self.revision[:_SHORT]}"

    def stream(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """See ``Store.stream``."""
        what = f"{self.name}: {found.name}"
        url = hf_hub_url(self.repo, found.name, revision=self.revision, endpoint=self.endpoint)
        headers = {"Accept-Encoding": "identity"}
        if (start, stop) != (0, found.size):
            headers["Range"] = f"bytes={start}-{stop - 1}"
        with _explained(what, self.token):
            for _ in range(_MOST_REDIRECTS):
                home = _origin(url) == _origin(self.endpoint)
                if not home and found.sha256 is None:
                    raise SourceUntrusted(
                        f"{what}: the hub sends to {_host(url, self.token)} for a file whose digest it does not"
                        " state",
                        hint="serve it from the hub itself, or store it with LFS",
                        file=found.name,
                    )
                own = build_hf_headers(token=self.token or False) if home else {}
                with get_session().stream(
                    "GET", url, headers={**own, **headers}, follow_redirects=False, timeout=_TIMEOUT
                ) as answer:
                    if answer.has_redirect_location:
                        url = _followed(url, answer.headers["Location"], self.endpoint, what)
                        continue
                    self._check(answer, what, partial="Range" in headers)
                    yield from answer.iter_raw()  # as they come: what a break swallows is fetched again
                    return
        raise SourceUntrusted(f"{what}: more than {_MOST_REDIRECTS} redirects")

    def _check(self, answer: httpx2.Response, what: str, *, partial: bool) -> None:
        if answer.status_code >= 400:
            raise failure(answer.status_code, what, self.token)
        commit = answer.headers.get("X-Repo-Commit")
        if commit is not None and commit != self.revision:
            raise SourceChanged(f"{what} was served of another commit", hint="the hub serves another commit")
        _check_encoding(answer, what)
        if answer.status_code != (206 if partial else 200):
            raise SourceInvalid(
                f"{what}: the answer to a range request has status {answer.status_code}",
                hint="use a hub, or a proxy before it, that serves ranges",
            )


def open_hub(repo: str, revision: str, *, endpoint: str = PUBLIC_HUB, token: str | None = None) -> HubStore:
    """The repository at the commit that ``revision`` (a branch, tag or commit) is now.

    Raises SourceUnauthorized, SourceNotFound, SourceUnreachable, SourceUntrusted, SourceInvalid.
    """
    endpoint = endpoint.rstrip("/")
    what = f"{repo}@{revision}"
    with _explained(what, token):
        bound = _bound_to.set(_origin(endpoint))
        try:
            info = HfApi(endpoint=endpoint, token=token or False).model_info(
                repo, revision=revision, files_metadata=True, timeout=READ_SECONDS
            )
        finally:
            _bound_to.reset(bound)
    commit = info.sha
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise SourceInvalid(f"{what}: the hub names no commit", hint="check the endpoint's address")
    if _COMMIT.fullmatch(revision) and commit != revision:
        raise SourceChanged(f"{what}: the hub answers with commit {commit[:_SHORT]}")
    siblings = info.siblings or []
    if len(siblings) > MOST_OBJECTS:
        raise SourceInvalid(f"{what} holds more than {MOST_OBJECTS} files")
    objects = {}
    for each in siblings:
        sha256 = each.lfs.sha256 if each.lfs is not None else None
        tag = f"hub|{endpoint}|{repo}|{each.blob_id or commit}|{each.rfilename}|{each.size}"
        found = checked(RemoteObject(each.rfilename, each.size, sha256, tag), what)  # type: ignore[arg-type]
        objects[found.name] = found
    return HubStore(repo, commit, endpoint, objects, token)


def failure(status: int, what: str, token: str | None) -> SourceError:
    """The error for an HTTP status of a hub."""
    if status == 401:
        who = "the token is not valid, or expired" if token else "it is private or gated, or does not exist"
        return SourceUnauthorized(
            f"{what}: the hub answers 401: {who}",
            hint="renew the token in the Secret"
            if token
            else "name a Secret with a token, or correct the name",
        )
    if status == 403:
        return SourceUnauthorized(
            f"{what}: the hub answers 403: this {'token' if token else 'visitor'} may not read it",
            hint="ask for access on the repository's page, or use a token of somebody who has it",
        )
    if status == 404:
        return SourceNotFound(
            f"{what}: the hub has no such repository, revision or file",
            hint="check the name",
            code="RemoteNotFound",
        )
    if status in (408, 425, 429) or status >= 500:
        return SourceUnreachable(f"{what}: the hub answers {status}", hint="it is tried again")
    return SourceInvalid(f"{what}: the hub answers {status}", hint="check the endpoint's address")


@contextmanager
def _explained(what: str, token: str | None) -> Iterator[None]:
    """Turns every error of the libraries into ours; theirs are not chained, since they may carry secrets."""
    try:
        yield
    except GatedRepoError:
        raise SourceUnauthorized(
            f"{what}: the repository is gated and {'this token has' if token else 'no token was given for'}"
            f" {'no access' if token else 'it'}",
            hint="accept its terms on the hub, and name a Secret with a token of that account",
        ) from None
    except RevisionNotFoundError:
        raise SourceNotFound(
            f"{what}: the repository has no such revision", hint="check the revision", code="RemoteNotFound"
        ) from None
    except HfHubHTTPError as error:
        raise failure(error.response.status_code, what, token) from None
    except HFValidationError:
        raise SourceNotFound(
            f"{what}: this is no name of a repository", hint="write it as org/name", code="RemoteNotFound"
        ) from None
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
        raise _broken(error, what) from None
    except SourceError:
        raise
    except Exception:  # whatever a parser raises for an answer that it was not made for
        raise SourceInvalid(
            f"{what}: the answer is not that of a hub", hint="check the endpoint's address"
        ) from None


def _broken(error: Exception, what: str) -> SourceError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return SourceUntrusted(
                f"{what}: the hub's certificate is not trusted: {cause.verify_message}",
                hint="add its authority to the agent's certificates, or correct the endpoint",
            )
        cause = cause.__cause__ or cause.__context__
    return SourceUnreachable(
        f"{what}: the hub gave no answer ({type(error).__name__})", hint="check the network and the endpoint"
    )


def _followed(url: str, location: str, endpoint: str, what: str) -> str:
    target = urljoin(url, location)
    scheme = urlsplit(target).scheme
    if scheme not in ("http", "https") or (urlsplit(url).scheme == "https" and scheme != "https"):
        kind = "http" if scheme == "http" else "something else"
        raise SourceUntrusted(
            f"{what}: the hub sends from {urlsplit(url).scheme} to {kind}",
            hint="correct the endpoint's address",
        )
    if _origin(target) != _origin(endpoint):
        check_redirect(urlsplit(endpoint).hostname or "", urlsplit(target).hostname or "", what)
    return target


def _host(url: str, token: str | None) -> str:
    """The host of an address that the hub gave, unless it repeats the token in it."""
    host = urlsplit(url).hostname or ""
    return "another host" if not host or (token and token.lower() in host) else host[:100]


def _origin(url: str) -> str:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def _check_encoding(answer: httpx2.Response, what: str) -> None:
    """Bytes are asked for as they are: packed ones could be a thousand times what was sent."""
    if answer.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise SourceInvalid(
            f"{what}: the answer is packed, which was not asked for", hint="switch compression off at the hub"
        )


def _stay(request: httpx2.Request) -> None:
    """What the hub says about a repository comes from the hub: no redirect to elsewhere is followed."""
    bound = _bound_to.get()
    if bound is None:
        return
    if _origin(str(request.url)) != bound:
        raise SourceUntrusted(
            "the hub sends to another address for what it should say itself",
            hint="correct the endpoint's address",
        )
    request.headers["Accept-Encoding"] = "identity"


def _bind(answer: httpx2.Response) -> None:
    """What the hub says about a repository is not packed, not endless, and comes in good time."""
    if _bound_to.get() is not None:
        _check_encoding(answer, "the hub")
        assert isinstance(answer.stream, httpx2.SyncByteStream)  # noqa: S101 - the client is a synchronous one
        answer.stream = _Bounded(answer.stream)


class _Bounded(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        return bounded(self._stream, "the hub")

    def close(self) -> None:
        self._stream.close()


def _client() -> httpx2.Client:
    client = httpx2.Client(
        event_hooks={"request": [_stay], "response": [_bind]}, follow_redirects=True, timeout=_TIMEOUT
    )
    # One client serves all sources: a cookie that came with one's token must not go out with another's request.
    client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return client


set_client_factory(_client)
# It tells every address at INFO, and those of a content network are signed.
logging.getLogger("httpx2").setLevel(logging.WARNING)
# It repeats what a server words as a warning, which may be what it was sent.
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
