"""An S3 store, spoken to by the real client library: each reason by its real cause."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dlo_cli.samples import samples_root
from dlo_sources.digests import DigestCache, hash_files
from dlo_sources.errors import (
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceUnauthorized,
    SourceUnreachable,
    SourceUntrusted,
)
from dlo_sources.fetch import Fetcher
from dlo_sources.pipeline import open_directory, open_remote
from dlo_sources.remote import Patience
from dlo_sources.s3 import Credential, S3Store, open_s3
from dlo_sources.stage import Stage
from fakes.s3 import S3, running_s3

KEY_ID, SECRET_KEY = "AKIACANARYCANARY0000", "CanarySecretCanarySecretCanarySecret"
SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
HASTY = Patience(attempts=3, pause_seconds=0.0)


@pytest.fixture
def s3() -> Iterator[S3]:
    """A store with the sample model."""
    with running_s3() as made:
        made.put("models", "some/digits", samples_root() / "digits")
        made.key_ids.add(KEY_ID)
        yield made


def opened(
    s3: S3, bucket: str = "models", prefix: str = "some/digits/", key_id: str | None = KEY_ID
) -> S3Store:
    """The prefix."""
    credential = Credential(key_id, SECRET_KEY) if key_id else None
    return open_s3(bucket, prefix, endpoint=s3.url, credential=credential)


def body(store: S3Store, name: str, start: int = 0, stop: int = 0) -> bytes:
    """Bytes of an object, in one stream."""
    found = store.objects[name]
    return b"".join(store.stream(found, start, stop or found.size))


def refused(kind: type[SourceError], s3: S3, *words: str, **asked: str | None) -> SourceError:
    """The error of opening it: of this very kind, one line, with what to do, and without a key."""
    with pytest.raises(kind) as caught:
        opened(s3, **asked)  # type: ignore[arg-type]
    said = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in said
    assert caught.value.hint
    assert all(word in said for word in words), said
    assert KEY_ID not in said
    assert SECRET_KEY not in said
    assert caught.value.__cause__ is None
    return caught.value


def test_a_prefix(s3: S3) -> None:
    """All objects over several pages of the listing, without the prefix, and their bytes, whole or in part."""
    store = opened(s3)
    folder = samples_root() / "digits"
    assert {"model_index.json", SHARD, "vae/config.json"} <= store.objects.keys()
    assert len([each for each in s3.log.asked if "list-type=2" in each.path]) > 1
    assert {found.sha256 for found in store.objects.values()} == {None}
    assert body(store, SHARD) == (folder / SHARD).read_bytes()
    assert body(store, SHARD, 1000, 2000) == (folder / SHARD).read_bytes()[1000:2000]
    assert all(each.headers["if-match"] for each in s3.log.bodies(SHARD))
    assert SECRET_KEY not in repr(store) + repr(Credential(KEY_ID, SECRET_KEY))


@pytest.mark.parametrize("stated", [True, False])
def test_the_pipeline_is_that_of_the_folder(s3: S3, tmp_path: Path, stated: bool) -> None:
    """Same files and digests; where the store states SHA-256, no large object is read for them."""
    if stated:
        s3.put("models", "some/digits", samples_root() / "digits", sha256=True)
    with_digests = Fetcher(opened(s3), Stage(tmp_path))
    pipeline = open_remote(with_digests)
    files = hash_files(pipeline.all_files(), DigestCache(None))
    folder = open_directory(samples_root() / "digits")
    expected = hash_files(folder.all_files(), DigestCache(None))
    assert [(file.name, file.size, file.sha256) for file in files] == [
        (file.name, file.size, file.sha256) for file in expected
    ]
    whole = [each for each in s3.log.bodies(SHARD) if "range" not in each.headers]
    assert len(whole) == (0 if stated else 1)
    with_digests.close(done=True)


def test_what_is_not_there(s3: S3) -> None:
    """A bucket, a prefix without an object: SourceNotFound, to be asked again slowly."""
    assert refused(SourceNotFound, s3, "NoSuchBucket", bucket="other").code == "RemoteNotFound"
    assert refused(SourceNotFound, s3, "no object", prefix="some/dig").code == "RemoteNotFound"


def test_who_may_not_read(s3: S3) -> None:
    """Unsigned, and signed with a key that nobody knows; a public bucket needs neither."""
    refused(SourceUnauthorized, s3, "403", key_id=None)
    refused(SourceUnauthorized, s3, "InvalidAccessKeyId", key_id="AKIAOTHER")
    s3.buckets["models"].public = True
    assert body(opened(s3, key_id=None), "model_index.json")
    assert "authorization" not in s3.log.asked[-1].headers


def test_a_key_that_is_taken_back_in_the_middle(s3: S3) -> None:
    """Objects are refused as the listing is."""
    store = opened(s3)
    s3.key_ids.clear()
    with pytest.raises(SourceUnauthorized):
        body(store, SHARD)


@pytest.mark.parametrize("kind", ["unavailable", "busy"])
def test_a_store_that_cannot_now(s3: S3, kind: str) -> None:
    """503 and 429, of the listing and of an object."""
    store = opened(s3)
    s3.break_down(kind)
    refused(SourceUnreachable, s3, "503" if kind == "unavailable" else "429")
    with pytest.raises(SourceUnreachable):
        body(store, SHARD)


def test_nobody_answers() -> None:
    """A closed port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(SourceUnreachable, match="gave no answer"):
            open_s3("models", "", endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}")


def test_a_store_that_sends_elsewhere(s3: S3) -> None:
    """A redirect is said, not followed."""
    with running_s3() as other:
        s3.moved_to = f"{other.url}/models"
        refused(SourceUntrusted, s3, "another address")
        assert other.log.asked == []


def test_an_object_that_is_replaced(s3: S3, tmp_path: Path) -> None:
    """Every read names the ETag of the listing: SourceChanged, from the first byte or in the middle."""
    store = opened(s3)
    (tmp_path / SHARD).parent.mkdir()
    (tmp_path / SHARD).write_bytes(b"other")
    s3.put("models", "some/digits", tmp_path)
    with pytest.raises(SourceChanged, match="replaced"):
        body(store, SHARD, 10, 20)


def test_a_body_cut_short_is_taken_up(s3: S3, tmp_path: Path) -> None:
    """Half of the body, three times: every byte in the end."""
    store = opened(s3)
    s3.break_down("truncated", SHARD, times=3)
    s3.log.sent_bytes = 0
    fetcher = Fetcher(store, Stage(tmp_path), patience=HASTY)
    buffer = bytearray(store.objects[SHARD].size)
    assert fetcher.files[SHARD].readinto(buffer, 0) == len(buffer)
    assert bytes(buffer) == (samples_root() / "digits" / SHARD).read_bytes()
    assert s3.log.sent_bytes == len(buffer)
    fetcher.close(done=True)


def test_the_machine_s_own_keys_are_not_used(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a Secret requests are unsigned, whatever the environment of the process holds."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    refused(SourceUnauthorized, s3, "AccessDenied", key_id=None)
    assert not any("authorization" in each.headers for each in s3.log.asked)


def test_the_stand_in_as_a_process() -> None:
    """As cluster tests start it."""
    script = Path(__file__).parents[2] / "fakes/s3.py"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["--folder", str(samples_root() / "digits"), "--host", "127.0.0.1", "--access-key-id", KEY_ID]
    process = subprocess.Popen(
        [sys.executable, str(script), *words, "--port", port], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "s3://models/digits" in process.stdout.readline()
        store = open_s3(
            "models", "digits", endpoint=f"http://127.0.0.1:{port}", credential=Credential(KEY_ID, SECRET_KEY)
        )
        assert body(store, SHARD) == (samples_root() / "digits" / SHARD).read_bytes()
    finally:
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close() if process.stdout else None
