"""A repository of a Hugging Face hub at one commit, through ``huggingface_hub``: metadata, URLs, its session.

The token goes to the hub's own address and nowhere else: a request that would leave it is refused, but for
the bytes of a file whose sha256 the hub stated, which may come from another host and then without the token.
No word of a server gets into an error, since a server may repeat what it was sent.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urljoin, urlsplit

import httpx2
from huggingface_hub import HfApi, get_session, hf_hub_url, set_client_factory
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from dlo_sources.errors import (
    SourceChanged,
    SourceError,
    SourceInvalid,
    SourceNotFound,
    SourceUnauthorized,
    SourceUnreachable,
    SourceUntrusted,
)
from dlo_sources.remote import CONNECT_SECONDS, MOST_OBJECTS, READ_SECONDS, RemoteObject

PUBLIC_HUB: Final = "https://huggingface.co"
_MOST_REDIRECTS: Final = 5
_SHORT: Final = 12
_COMMIT: Final = 40
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
                        f"{what}: the hub sends to {urlsplit(url).hostname} for a file whose digest it does not state",
                        hint="serve it from the hub itself, or store it with LFS",
                        file=found.name,
                    )
                own = build_hf_headers(token=self.token or False) if home else {}
                with get_session().stream(
                    "GET", url, headers={**own, **headers}, follow_redirects=False, timeout=_TIMEOUT
                ) as answer:
                    if answer.has_redirect_location:
                        url = _followed(url, answer.headers["Location"], what)
                        continue
                    self._check(answer, what, partial="Range" in headers)
                    yield from answer.iter_bytes()  # as they come: what a break swallows is fetched again
                    return
        raise SourceUntrusted(f"{what}: more than {_MOST_REDIRECTS} redirects")

    def _check(self, answer: httpx2.Response, what: str, *, partial: bool) -> None:
        if answer.status_code >= 400:
            raise failure(answer.status_code, what, self.token)
        commit = answer.headers.get("X-Repo-Commit")
        if commit is not None and commit != self.revision:
            raise SourceChanged(
                f"{what} was served of commit {commit[:_SHORT]}", hint="the hub serves another commit"
            )
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
    commit = info.sha or ""
    if len(commit) != _COMMIT:
        raise SourceInvalid(f"{what}: the hub names no commit", hint="check the endpoint's address")
    if len(revision) == _COMMIT and set(revision) <= set("0123456789abcdef") and commit != revision:
        raise SourceChanged(f"{what}: the hub answers with commit {commit[:_SHORT]}")
    siblings = info.siblings or []
    if len(siblings) > MOST_OBJECTS:
        raise SourceInvalid(f"{what} holds more than {MOST_OBJECTS} files")
    objects = {}
    for each in siblings:
        if each.size is None:
            raise SourceInvalid(f"{what}: the hub states no size of {each.rfilename[:200]!r}")
        sha256 = each.lfs.sha256 if each.lfs is not None else None
        tag = f"hub|{endpoint}|{repo}|{each.blob_id or commit}|{each.rfilename}|{each.size}"
        objects[each.rfilename] = RemoteObject(each.rfilename, each.size, sha256, tag)
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
    except (ValueError, TypeError, KeyError, AttributeError):
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


def _followed(url: str, location: str, what: str) -> str:
    target = urljoin(url, location)
    scheme = urlsplit(target).scheme
    if scheme not in ("http", "https") or (urlsplit(url).scheme == "https" and scheme != "https"):
        raise SourceUntrusted(f"{what}: the hub sends from {urlsplit(url).scheme} to {scheme or 'nowhere'}")
    return target


def _origin(url: str) -> str:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def _stay(request: httpx2.Request) -> None:
    """What the hub says about a repository comes from the hub: no redirect to elsewhere is followed."""
    bound = _bound_to.get()
    if bound is not None and _origin(str(request.url)) != bound:
        raise SourceUntrusted(
            f"the hub sends to {request.url.host} for what it should say itself",
            hint="correct the endpoint's address",
        )


def _client() -> httpx2.Client:
    return httpx2.Client(event_hooks={"request": [_stay]}, follow_redirects=True, timeout=_TIMEOUT)


set_client_factory(_client)
# It tells every address at INFO, and those of a content network are signed.
logging.getLogger("httpx2").setLevel(logging.WARNING)
