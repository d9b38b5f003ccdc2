"""An agent whose checkpoints lie in stores: a hub and S3, each spoken to with its real client library."""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dlo_api.identity import source_id
from dlo_api.v1alpha1.node_weight_cache import NodeWeightCacheStatus
from dlo_api.v1alpha1.source import HuggingFaceSource, S3Source, Source
from dlo_cache.root import init_root
from dlo_cli.samples import samples_root
from dlo_kube.errors import Denied, Unavailable
from dlo_kube.kinds import NODE_WEIGHT_CACHE, SECRET
from dlo_sources.stage import Stage
from fakes.hub import Hub, running_hub
from fakes.s3 import S3, running_s3
from unit.agent.one_node import OneNode, SmallDisk, layout, rest, source, two_ranks

TOKEN = "hf_CanaryCanaryCanaryCanaryCanary"
KEY_ID, SECRET_KEY = "AKIACANARYCANARY0000", "CanarySecretCanarySecretCanarySecret"
SECRETS = "dlo-secrets"
IN_HUB = Source(hugging_face=HuggingFaceSource(repo="acme/digits", endpoint="mirror"))
IN_S3 = Source(s3=S3Source(bucket="models", prefix="digits", endpoint="minio"))


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A checkpoint of our own to push."""
    return shutil.copytree(samples_root() / "digits", tmp_path / "digits")


@pytest.fixture
def hub(digits: Path) -> Iterator[Hub]:
    """A hub with the sample model."""
    with running_hub() as made:
        made.push("acme/digits", digits)
        yield made


@pytest.fixture
def s3(digits: Path) -> Iterator[S3]:
    """A store with the sample model, whose objects state no SHA-256."""
    with running_s3() as made:
        made.put("models", "digits", digits)
        made.key_ids.add(KEY_ID)
        yield made


@pytest.fixture
def node(tmp_path: Path, hub: Hub, s3: S3) -> Iterator[OneNode]:
    """A node that knows both by name."""
    made = OneNode(
        init_root(tmp_path / "cache").path,
        hub_endpoints={"mirror": hub.url},
        s3_endpoints={"minio": s3.url},
        secrets_namespace=SECRETS,
    )
    yield made
    made.close()


def of(found: Source, entries: list[dict[str, Any]] | None = None, **more: Any) -> tuple[Any, Any]:
    """Entries and sources of a spec over one source."""
    listed = two_ranks() if entries is None else entries
    return [{**each, "sourceId": source_id(found)} for each in listed], [source(found) | more]


def put_secret(node: OneNode, name: str, **values: str) -> None:
    """The operator's copy of a credential."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    where = {"name": name, "namespace": SECRETS}
    if node.cluster.get(SECRET, name, SECRETS) is not None:
        node.cluster.edit(SECRET, name, lambda obj: obj.update(data=data), SECRETS)
    else:
        node.cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": where, "data": data})


def proof(status: dict[str, Any]) -> list[tuple[str, str]]:
    """What engines are told: keys and manifests."""
    return [(each["inputKey"], each["manifestSha256"]) for each in status["entries"]]


def fetched(node: OneNode) -> list[str]:
    """What lies in the stage."""
    folder = node.settings.root / "v1/ingest/fetched"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def the_folders(tmp_path: Path) -> dict[str, Any]:
    """The status of a node that has the same checkpoint as a folder."""
    other = OneNode(init_root(tmp_path / "other").path)
    other.ask(two_ranks())
    status = other.settle()
    other.close()
    return status


@pytest.mark.parametrize("kind", ["hub", "s3"])
def test_the_same_entries_as_from_a_folder(
    node: OneNode, hub: Hub, s3: S3, tmp_path: Path, kind: str
) -> None:
    """Same digest, same keys, same manifests; every large file is fetched once, and nothing stays behind."""
    s3.buckets["models"].public = True
    node.ask(*of(IN_HUB if kind == "hub" else IN_S3))
    status = node.settle()
    NodeWeightCacheStatus.model_validate_json(json.dumps(status))
    expected = the_folders(tmp_path)
    assert {each["phase"] for each in status["entries"]} == {"Ready"}
    assert proof(status) == proof(expected)
    found, wanted = status["sources"][0], expected["sources"][0]
    unlike = {"id", "revision"}
    assert {k: v for k, v in found.items() if k not in unlike} == {
        k: v for k, v in wanted.items() if k not in unlike
    }
    assert found["revision"] == (
        hub.repositories["acme/digits"].branches["main"] if kind == "hub" else found["digest"][:12]
    )
    assert fetched(node) == []
    log = hub.cdn_log if kind == "hub" else s3.log
    whole = [each for each in log.bodies("00001-of-00002") if "range" not in each.headers]
    assert len(whole) == 1


def test_a_branch_that_moves_changes_nothing(node: OneNode, hub: Hub, digits: Path) -> None:
    """Resolved once: the entries are built of the commit that was reported, pinned or not."""
    node.ask(*of(IN_HUB, []))
    first = node.settle()["sources"][0]
    (digits / "scheduler/scheduler_config.json").write_text("{}")
    later = hub.push("acme/digits", digits)
    assert later != first["revision"]
    node.ask(*of(IN_HUB))
    assert {each["phase"] for each in node.settle()["entries"]} == {"Ready"}
    assert node.status()["sources"][0]["digest"] == first["digest"]
    pin = {"revision": first["revision"], "digest": first["digest"]}
    node.ask(*of(IN_HUB, pin=pin))
    assert node.settle()["sources"][0] == first


def test_another_node_with_other_bytes_says_so(node: OneNode, s3: S3, hub: Hub) -> None:
    """A pin that this node cannot answer is SourceMismatch, of a hub and of S3."""
    s3.buckets["models"].public = True
    pin = {"revision": hub.repositories["acme/digits"].branches["main"], "digest": "ab" * 32}
    for found in (IN_HUB, IN_S3):
        node.ask(*of(found, pin=pin))
        assert node.settle()["sources"][0]["reason"] == "SourceMismatch"
    assert node.stored() == set()


def test_a_token_that_is_renewed(node: OneNode, hub: Hub) -> None:
    """No Secret, a token that is refused, one that may not read, then the right one: no restart between."""
    hub.token, hub.readers = TOKEN, {"hf_visitor"}
    hub.repositories["acme/digits"].gated = True
    node.ask(*of(IN_HUB, secretName="dlo-source-1"))
    seen = []
    for token in (None, "hf_expired", "hf_visitor", TOKEN):
        if token is not None:
            put_secret(node, "dlo-source-1", token=token)
        node.advance(2000)
        found = node.settle()["sources"][0]
        seen.append((found.get("reason"), found.get("message", "")))
    assert [reason for reason, _ in seen] == ["SourceUnauthorized"] * 3 + [None]
    assert "it is not there" in seen[0][1]
    assert "not valid, or expired" in seen[1][1]
    assert "gated" in seen[2][1]
    assert {each["phase"] for each in node.status()["entries"]} == {"Ready"}


def test_unauthorized_is_tried_again_slowly(node: OneNode, hub: Hub) -> None:
    """A refused token and a missing repository wait a minute; a hub that is away is asked after seconds."""
    hub.repositories["acme/digits"].private = True
    node.ask(*of(IN_HUB))
    assert node.settle()["sources"][0]["reason"] == "SourceUnauthorized"
    hub.repositories["acme/digits"].private = False
    node.advance(50)
    assert node.settle()["sources"][0]["reason"] == "SourceUnauthorized"
    node.advance(11)
    assert "digest" in node.settle()["sources"][0]
    absent = Source(hugging_face=HuggingFaceSource(repo="acme/none", endpoint="mirror"))
    hub.token = TOKEN
    put_secret(node, "dlo-source-2", token=TOKEN)
    node.ask(*of(absent, secretName="dlo-source-2"))
    assert node.settle()["sources"][0]["reason"] == "SourceNotFound"
    asked = len(hub.log.asked)
    node.advance(50)
    node.settle()
    assert len(hub.log.asked) == asked


def test_a_hub_that_is_away(node: OneNode, hub: Hub) -> None:
    """SourceUnreachable, and healed after a short pause."""
    hub.break_down("unavailable")
    node.ask(*of(IN_HUB))
    assert node.settle()["sources"][0]["reason"] == "SourceUnreachable"
    hub.mend()
    node.advance(6)
    assert {each["phase"] for each in node.settle()["entries"]} == {"Ready"}


def test_secrets_that_cannot_be_read(node: OneNode) -> None:
    """Forbidden is SourceUnauthorized; a server that is away SourceUnreachable."""
    reasons = []
    for error in (Denied("secrets is forbidden"), Unavailable("no answer")):

        def refuse(call: Any, error: Exception = error) -> None:
            if call.kind == "Secret":
                raise error

        node.cluster.before.append(refuse)
        node.advance(2000)
        node.ask(*of(IN_HUB, [], secretName="dlo-source-1"))
        reasons.append(node.settle()["sources"][0]["reason"])
        node.cluster.before.remove(refuse)
    assert reasons == ["SourceUnauthorized", "SourceUnreachable"]


def test_an_endpoint_that_this_node_does_not_know(node: OneNode) -> None:
    """Refused by name, with the names there are; no address from a spec is ever asked."""
    for found, known in (
        (Source(hugging_face=HuggingFaceSource(repo="acme/digits", endpoint="other")), "mirror"),
        (Source(s3=S3Source(bucket="models", prefix="digits", endpoint="other")), "minio"),
    ):
        node.ask(*of(found, []))
        said = node.settle()["sources"][0]
        assert said["reason"] == "SourceNotFound"
        assert known in said["message"]


def test_a_hub_that_damages_what_it_sends(node: OneNode, hub: Hub) -> None:
    """Bytes of another digest never become an entry; whole again, it is built."""
    node.ask(*of(IN_HUB, []))
    node.settle()
    hub.cdn_log.faults.clear()
    hub.break_down("damaged", "00001-of-00002")
    node.ask(*of(IN_HUB, [layout(0)]))
    entry = node.settle()["entries"][0]
    assert (entry["phase"], entry["reason"]) == ("Failed", "SourceMismatch")
    assert node.stored() == set()
    hub.mend()
    node.advance(100)
    assert node.settle()["entries"][0]["phase"] == "Ready"


def test_an_object_that_is_replaced_between(node: OneNode, s3: S3, digits: Path) -> None:
    """Resolved, then overwritten: SourceMismatch, and nothing is built of the new bytes."""
    s3.buckets["models"].public = True
    node.ask(*of(IN_S3, []))
    node.settle()
    (digits / "scheduler/scheduler_config.json").write_text("{}")
    s3.put("models", "digits", digits)
    node.ask(*of(IN_S3))
    assert {each["reason"] for each in node.settle()["entries"]} == {"SourceMismatch"}


def test_no_room_for_fetched_files_beside_the_entries(
    node: OneNode, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for little more than the entries, files go after their last use, or are not kept at all."""
    disk = SmallDisk()
    monkeypatch.setattr(os, "statvfs", disk)
    node.ask(*of(IN_HUB))
    status = node.settle()
    sizes = {each["kind"]: each["bytes"] for each in status["entries"]}
    node.ask([], [])
    node.settle()
    node.advance(200)
    node.settle()
    assert node.stored() == set()
    disk.free = sizes["Files"] + (1 << 20) + (1 << 17)
    with monkeypatch.context() as patch:
        patch.delattr(Stage, "fetch")
        node.ask(*of(IN_HUB, [rest()]))
        assert node.settle()["entries"][0]["phase"] == "Ready", "read straight through"
    node.ask(*of(IN_HUB, [layout(0, 1)]))
    assert node.settle()["entries"][0]["reason"] == "InsufficientDisk"
    # 8.98 MB of weights in shards of 4.9 and 4.0 MB: the first is needed to the end, for the resident part.
    disk.free = 18_500_000
    node.ask(*of(IN_HUB, [layout(0, 1)]))
    assert node.settle()["entries"][0]["phase"] == "Ready"
    assert fetched(node) == []


def test_taken_up_after_the_process_died(node: OneNode, hub: Hub) -> None:
    """What was fetched before an interruption is not fetched again."""
    node.ask(*of(IN_HUB, []))
    node.settle()
    hub.break_down("slow", "00002-of-00002")
    node.ask(*of(IN_HUB, [layout(0), layout(1)]))
    sha256 = hub.repositories["acme/digits"].commits[node.status()["sources"][0]["revision"]]
    second = next(each for name, each in sha256.items() if "00002-of" in name)
    part = node.settings.root / "v1/ingest/fetched" / second.sha256
    node.wait_for(lambda: part.is_file() and part.stat().st_size > 1 << 20)
    node.restart()
    have = part.stat().st_size
    assert 0 < have < second.size
    hub.mend()
    hub.cdn_log.asked.clear()
    assert {each["phase"] for each in node.settle()["entries"]} == {"Ready"}
    taken_up = [each.headers.get("range") for each in hub.cdn_log.bodies("00002-of")]
    assert f"bytes={have}-{second.size - 1}" in taken_up
    assert not any(each.headers.get("range") is None for each in hub.cdn_log.bodies("00001-of"))
    assert fetched(node) == []


def test_nobody_wants_it_any_more(node: OneNode, hub: Hub) -> None:
    """Cancelled in the middle of a file; what was fetched goes."""
    hub.break_down("slow", "00001-of-00002")
    node.ask(*of(IN_HUB, [layout(0)]))
    node.wait_for(
        lambda: bool(node.status()) and node.entries()["0/2"]["phase"] == "Fetching" and fetched(node) != []
    )
    node.ask([], [])
    node.settle()
    node.wait_for(lambda: fetched(node) == [])
    assert node.stored() == set()


def everything_said(
    node: OneNode, capture: pytest.CaptureFixture[str], logged: pytest.LogCaptureFixture
) -> str:
    """Status, both kinds of log, and every file of the root as text."""
    node.loop.board.flush()
    said = capture.readouterr()
    parts = [json.dumps(node.cluster.objects(NODE_WEIGHT_CACHE)), said.out, said.err, logged.text]
    for path in node.settings.root.rglob("*"):
        parts.append(path.name)
        if path.is_file():
            parts.append(path.read_bytes().decode("latin-1"))
    return "\n".join(parts)


def test_no_secret_is_ever_said(
    node: OneNode,
    hub: Hub,
    s3: S3,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The canaries are in no log, status, progress file, digest record or entry, in success and in failure,
    though the hub repeats a refused token in its answers; and the CDN never sees one."""
    caplog.set_level(logging.INFO)
    hub.token = TOKEN
    hub.repositories["acme/digits"].gated = True
    put_secret(node, "dlo-source-1", token=TOKEN)
    put_secret(node, "dlo-source-2", accessKeyId=KEY_ID, secretAccessKey=SECRET_KEY)
    heard = ""
    for found, secret in ((IN_HUB, "dlo-source-1"), (IN_S3, "dlo-source-2")):
        node.ask(*of(found, secretName=secret))
        assert {each["phase"] for each in node.settle()["entries"]} == {"Ready"}
        heard += everything_said(node, capsys, caplog)
        for key in node.stored():
            shutil.rmtree(node.settings.root / "v1/entries" / key)
        hub.token, s3.key_ids = "hf_other", set()
        for cause in ("refused", "unavailable", "truncated"):
            for log in (hub.log, hub.cdn_log, s3.log):
                log.faults.clear()
            if cause != "refused":
                hub.token, s3.key_ids = TOKEN, {KEY_ID}
                hub.break_down(cause, "/api/")
                s3.break_down(cause, "list-type")
            node.restart()
            node.advance(3000)
            node.settle()
            heard += everything_said(node, capsys, caplog)
        hub.mend()
        s3.mend()
    assert "SourceUnauthorized" in heard
    assert "SourceUnreachable" in heard
    for secret in (TOKEN, KEY_ID, SECRET_KEY, "s3cr3t"):
        assert secret not in heard
        assert base64.b64encode(secret.encode()).decode() not in heard
    assert hub.cdn_log.asked
    assert not any("authorization" in each.headers for each in hub.cdn_log.asked)
    assert any(each.headers.get("authorization") == f"Bearer {TOKEN}" for each in hub.log.asked)
