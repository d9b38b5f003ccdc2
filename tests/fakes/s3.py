"""A stand-in for an S3 store: ListObjectsV2, HeadObject and GetObject over folders, for the real client library.

Requests must be signed (SigV4, with the right key id) unless a bucket is public; signatures are not computed
again. ``python tests/fakes/s3.py --folder DIR --port N`` serves one bucket.
"""

from __future__ import annotations

import base64
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.serving import Fault, Handler, Log, Stored, parser_of, serve_until_told, serving

_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d{8}/[^/]+/s3/aws4_request, ?SignedHeaders=[^,]+, ?Signature=[0-9a-f]{64}"
)
_PAGE = 7  # small, so that every listing has several


@dataclass
class Bucket:
    """Objects by key. ``with_sha256`` are the keys whose SHA-256 was stored with them."""

    objects: dict[str, Stored] = field(default_factory=dict)
    with_sha256: set[str] = field(default_factory=set)
    public: bool = False


@dataclass
class S3:
    """The store, which keeps its objects in ``blobs``; ``key_ids`` may read buckets that are not public."""

    blobs: Path
    key_ids: set[str] = field(default_factory=set)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    moved_to: str = ""
    log: Log = field(default_factory=Log)
    url: str = ""

    def put(self, bucket: str, prefix: str, folder: Path, *, sha256: bool = False) -> None:
        """Uploads a folder."""
        found = self.buckets.setdefault(bucket, Bucket())
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                key = f"{prefix}/{path.relative_to(folder)}".lstrip("/")
                found.objects[key] = Stored.of(path, self.blobs)
                if sha256:
                    found.with_sha256.add(key)

    def break_down(self, kind: str, match: str = "", times: int = -1) -> None:
        """Requests misbehave from now on."""
        self.log.faults.append(Fault(kind, match, times))

    def mend(self) -> None:
        """All is well again."""
        self.log.faults.clear()


class _S3Handler(Handler):
    s3: S3

    def answer(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path.lstrip("/")).partition("/")
        found = self.s3.buckets.get(bucket)
        if self.s3.moved_to:
            self._refuse(301, "PermanentRedirect", {"Location": self.s3.moved_to})
        elif found is None:
            self._refuse(404, "NoSuchBucket")
        elif not found.public and not self._may_read():
            return
        elif not key:
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            self._list(bucket, found, query)
        else:
            self._object(found, key)

    def _may_read(self) -> bool:
        signed = _SIGNED.fullmatch(self.headers.get("Authorization", ""))
        if signed is None:
            self._refuse(403, "AccessDenied")
        elif signed[1] not in self.s3.key_ids:
            self._refuse(403, "InvalidAccessKeyId")
        return signed is not None and signed[1] in self.s3.key_ids

    def _list(self, name: str, bucket: Bucket, query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        keys = sorted(key for key in bucket.objects if key.startswith(prefix) and key > after)
        page, more = keys[:_PAGE], len(keys) > _PAGE
        items = []
        for key in page:
            stored = bucket.objects[key]
            sums = "<ChecksumAlgorithm>SHA256</ChecksumAlgorithm><ChecksumType>FULL_OBJECT</ChecksumType>"
            items.append(
                f"<Contents><Key>{quote(key)}</Key><Size>{stored.size}</Size>"
                f"<ETag>&quot;{stored.sha1}&quot;</ETag>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"{sums if key in bucket.with_sha256 else ''}</Contents>"
            )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{name}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<EncodingType>url</EncodingType><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{''.join(items)}</ListBucketResult>"
        )
        self.plain(200, body.encode(), kind="application/xml")

    def _object(self, bucket: Bucket, key: str) -> None:
        stored = bucket.objects.get(key)
        if stored is None:
            self._refuse(404, "NoSuchKey")
            return
        etag = f'"{stored.sha1}"'
        if self.headers.get("If-Match", etag) != etag:
            self._refuse(412, "PreconditionFailed")
            return
        headers = {"ETag": etag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if key in bucket.with_sha256 and self.headers.get("x-amz-checksum-mode") == "ENABLED":
            stated = base64.b64encode(bytes.fromhex(stored.sha256)).decode()
            headers |= {"x-amz-checksum-sha256": stated, "x-amz-checksum-type": "FULL_OBJECT"}
        self.file(stored, headers)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'
        self.plain(status, body.encode(), headers, "application/xml")


@contextmanager
def running_s3(*, host: str = "127.0.0.1", port: int = 0) -> Iterator[S3]:
    """A store for the block."""
    with tempfile.TemporaryDirectory() as blobs:
        s3 = S3(Path(blobs))
        handler = type("S3Handler", (_S3Handler,), {"s3": s3, "log": s3.log})
        with serving(handler, host=host, port=port) as server:
            s3.url = f"http://{host}:{server.server_port}"
            yield s3


def main() -> None:
    """Serves one bucket until it is told to end; prints its address."""
    parser = parser_of(__doc__)
    parser.add_argument("--bucket", default="models")
    parser.add_argument("--prefix", default="digits")
    parser.add_argument("--access-key-id", default="", help="without one the bucket is public")
    parser.add_argument("--sha256", action="store_true", help="objects state their SHA-256")
    given = parser.parse_args()
    with running_s3(host=given.host, port=given.port) as s3:
        s3.put(given.bucket, given.prefix, given.folder, sha256=given.sha256)
        s3.buckets[given.bucket].public = not given.access_key_id
        s3.key_ids.add(given.access_key_id)
        serve_until_told(f"s3://{given.bucket}/{given.prefix} at {s3.url}")


if __name__ == "__main__":
    main()
