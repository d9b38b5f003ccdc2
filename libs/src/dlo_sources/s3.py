"""A prefix of an S3 bucket, through ``botocore``: every read names the ETag that was listed.

Objects that were stored with a SHA-256 of the whole state their digest; the others are hashed once.
No word of a server gets into an error but its code, since a server may repeat what it was sent.
"""

from __future__ import annotations

import base64
import time
from binascii import Error as NotBase64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, SSLError
from botocore.session import Session
from dlo_cache.errors import Cancelled
from dlo_cache.progress import Cancel, check_cancel
from urllib3.exceptions import HTTPError

from dlo_sources.bounds import bounded
from dlo_sources.errors import (
    SourceChanged,
    SourceError,
    SourceInvalid,
    SourceNotFound,
    SourceUnauthorized,
    SourceUnreachable,
    SourceUntrusted,
)
from dlo_sources.remote import (
    CHUNK_BYTES,
    CONNECT_SECONDS,
    MOST_OBJECTS,
    READ_SECONDS,
    RemoteObject,
    checked,
)

_REGION: Final = "us-east-1"
_STREAMS: Final = 8
_ANSWER_BYTES: Final = 8 << 20  # a page of a listing has a thousand objects at most
_MOST_PAGES: Final = 2_000
_LISTING_SECONDS: Final = 600.0
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_ABSENT: Final = frozenset({"404", "NoSuchBucket", "NoSuchKey", "NotFound"})
_REFUSED: Final = frozenset(
    {
        "401",
        "403",
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
    }
)
# Codes that help; a server could say anything in the place of one, and what it was sent.
_TOLD: Final = (
    _ABSENT
    | _REFUSED
    | {
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "InternalError",
        "InvalidBucketName",
        "InvalidObjectState",
        "InvalidRequest",
        "PermanentRedirect",
        "PreconditionFailed",
        "RequestTimeTooSkewed",
        "ServiceUnavailable",
        "SlowDown",
    }
)


@dataclass(frozen=True)
class Credential:
    """A key pair of S3; without one, requests are not signed."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)


@dataclass(frozen=True)
class S3Store:
    """See ``dlo_sources.remote.Store``; made by ``open_s3``."""

    bucket: str
    prefix: str
    objects: dict[str, RemoteObject]
    etags: dict[str, str]
    client: Any = field(repr=False)
    revision: str = ""

    @property
    def name(self) -> str:
        """Bucket and prefix."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def stream(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """See ``Store.stream``."""
        what = f"{self.name}: {found.name}"
        wanted = {} if (start, stop) == (0, found.size) else {"Range": f"bytes={start}-{stop - 1}"}
        with _explained(what):
            answer = self.client.get_object(
                Bucket=self.bucket, Key=self.prefix + found.name, IfMatch=self.etags[found.name], **wanted
            )
            body = answer["Body"]
            try:
                if wanted and answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
                    raise SourceInvalid(
                        f"{what}: the store does not serve ranges", hint="use a store that does"
                    )
                if answer["ETag"] != self.etags[found.name]:
                    raise _changed(what)
                while chunk := body.read(CHUNK_BYTES):
                    yield chunk
            finally:
                body.close()


def open_s3(
    bucket: str,
    prefix: str,
    *,
    endpoint: str | None = None,
    credential: Credential | None = None,
    cancel: Cancel | None = None,
) -> S3Store:
    """The objects below ``prefix`` as they are listed now; without ``endpoint`` those of AWS.

    Raises SourceUnauthorized, SourceNotFound, SourceUnreachable, SourceUntrusted, SourceInvalid, Cancelled.
    """
    prefix = prefix.strip("/")
    prefix = f"{prefix}/" if prefix else ""
    what = f"s3://{bucket}/{prefix}".rstrip("/")
    with _explained(what):
        client = _client(endpoint, credential)
        listed = _listed(client, bucket, prefix, what, cancel)

        def stated(each: dict[str, Any]) -> str | None:
            check_cancel(cancel, f"asking for the digests of {what}")
            return _stated_sha256(client, bucket, each, what)

        with ThreadPoolExecutor(_STREAMS, "s3-head") as pool:
            digests = list(pool.map(stated, listed))
    if not listed:
        raise SourceNotFound(
            f"{what}: there is no object", hint="check bucket and prefix", code="RemoteNotFound"
        )
    objects, etags = {}, {}
    for each, sha256 in zip(listed, digests, strict=True):
        name, etag, size = each["Key"].removeprefix(prefix), each["ETag"], each["Size"]
        tag = f"s3|{endpoint or 'aws'}|{bucket}|{each['Key']}|{etag}|{size}"
        objects[name], etags[name] = checked(RemoteObject(name, size, sha256, tag), what), etag
    return S3Store(bucket, prefix, objects, etags, client)


def _client(endpoint: str | None, credential: Credential | None) -> Any:
    session = Session()
    session.set_config_variable("config_file", "/dev/null")
    session.set_config_variable("credentials_file", "/dev/null")
    keys: dict[str, str] = {}
    if credential is not None:
        keys = {
            "aws_access_key_id": credential.access_key_id,
            "aws_secret_access_key": credential.secret_access_key,
        }
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"total_max_attempts": 1},
        max_pool_connections=_STREAMS + 2,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if endpoint else {},
        signature_version=UNSIGNED if credential is None else "s3v4",
    )
    client = session.create_client("s3", region_name=_REGION, endpoint_url=endpoint, config=config, **keys)
    if endpoint is not None:
        # The client would follow AWS's redirects to a bucket's region, and a store that only redirects for ever.
        client.meta.events.register_first("needs-retry.s3", _follow_nothing)
    # The library has no public way to bound what it reads of an answer.
    client._endpoint.http_session = _Session(client._endpoint.http_session)
    return client


class _Session:
    """The library's way to send a request; an answer's body is read in bounds, by what came rather than by full
    pieces, so that a store that drips is noticed."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def send(self, request: Any) -> Any:
        request.stream_output = True  # else all of it would be read in here
        answer = self._inner.send(request)
        answer.raw = _Body(answer.raw)
        return answer

    def close(self) -> None:
        self._inner.close()


class _Body:
    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def stream(self) -> Iterator[bytes]:
        pieces = iter(lambda: self._raw.read1(CHUNK_BYTES), b"")
        yield from bounded(pieces, "S3", most_bytes=_ANSWER_BYTES)

    def read(self, amt: int | None = None) -> bytes:
        return bytes(self._raw.read1(CHUNK_BYTES if amt is None else amt))

    def close(self) -> None:
        self._raw.close()


def _follow_nothing(response: tuple[Any, Any] | None, **_: object) -> None:
    if response is not None and response[0].status_code in _REDIRECTS:
        raise SourceUntrusted(
            "the S3 endpoint sends to another address, which is not followed",
            hint="name the right address of the store in the Helm values",
        )


def _listed(client: Any, bucket: str, prefix: str, what: str, cancel: Cancel | None) -> list[dict[str, Any]]:
    """The objects that can be files of a checkpoint: folder marks and hidden names are left out."""
    listed: list[dict[str, Any]] = []
    began = time.monotonic()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    for number, page in enumerate(pages):
        check_cancel(cancel, f"listing {what}")
        for each in page.get("Contents", ()):
            name = each["Key"].removeprefix(prefix)
            if not each["Key"].startswith(prefix):
                raise SourceInvalid(
                    f"{what}: the store lists what was not asked for", hint="check the endpoint's address"
                )
            if not name.endswith("/") and not name.startswith(".") and "/." not in name:
                listed.append(each)
        if len(listed) > MOST_OBJECTS or number > _MOST_PAGES:
            raise SourceInvalid(
                f"{what} holds more than {MOST_OBJECTS} objects", hint="name a narrower prefix"
            )
        if time.monotonic() - began > _LISTING_SECONDS:
            raise SourceUnreachable(f"{what}: listing it takes too long", hint="name a narrower prefix")
    return listed


def _stated_sha256(client: Any, bucket: str, each: dict[str, Any], what: str) -> str | None:
    """The digest that was stored with an object; one made of parts' digests says nothing of the whole."""
    algorithms = each.get("ChecksumAlgorithm")
    if (
        not algorithms
        or "SHA256" not in algorithms
        or each.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT"
    ):
        return None
    head = client.head_object(Bucket=bucket, Key=each["Key"], IfMatch=each["ETag"], ChecksumMode="ENABLED")
    if head["ContentLength"] != each["Size"]:
        raise _changed(what)
    stated = head.get("ChecksumSHA256", "")
    if head.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT" or "-" in stated:
        return None
    try:
        digest = base64.b64decode(stated, validate=True)
    except NotBase64:
        return None
    return digest.hex() if len(digest) == 32 else None


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns every error of the library into ours; theirs are not chained, since they may carry secrets."""
    try:
        yield
    except ClientError as error:
        raise _failure(error, what) from None
    except SSLError:
        raise SourceUntrusted(
            f"{what}: the store's certificate is not trusted",
            hint="add its authority to the agent's certificates, or correct the endpoint",
        ) from None
    except (BotoCoreError, HTTPError, OSError) as error:
        raise SourceUnreachable(
            f"{what}: the store gave no answer ({type(error).__name__})",
            hint="check the network and the endpoint",
        ) from None
    except (SourceError, Cancelled):
        raise
    except Exception:  # whatever a parser raises for an answer that it was not made for
        raise SourceInvalid(
            f"{what}: the answer is not that of an S3 store", hint="check the endpoint's address"
        ) from None


def _failure(error: ClientError, what: str) -> SourceError:
    stated = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = stated if stated in _TOLD else "without a known code"
    if status == 412 or code == "PreconditionFailed":
        return _changed(what)
    if code in _REFUSED or status in (401, 403):
        return SourceUnauthorized(
            f"{what}: the store answers {status} {code}", hint="check the keys in the Secret and their rights"
        )
    if code in _ABSENT or status == 404:
        return SourceNotFound(
            f"{what}: the store answers {status} {code}",
            hint="check bucket and prefix",
            code="RemoteNotFound",
        )
    if status in (408, 429) or status >= 500:
        return SourceUnreachable(f"{what}: the store answers {status} {code}", hint="it is tried again")
    return SourceInvalid(f"{what}: the store answers {status} {code}", hint="check the endpoint's address")


def _changed(what: str) -> SourceChanged:
    return SourceChanged(
        f"{what}: the object was replaced while it was read",
        hint="write new weights under a new prefix, and let a prefix come to rest",
    )
