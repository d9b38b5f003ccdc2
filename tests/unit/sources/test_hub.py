"""A hub, spoken to by the real client library: each reason by its real cause, and where the token goes."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from dlo_cli.samples import samples_root
from dlo_sources.errors import (
    SourceChanged,
    SourceError,
    SourceInvalid,
    SourceNotFound,
    SourceUnauthorized,
    SourceUnreachable,
    SourceUntrusted,
)
from dlo_sources.fetch import Fetcher
from dlo_sources.hub import HubStore, open_hub
from dlo_sources.pipeline import open_directory, open_remote
from dlo_sources.remote import Patience
from dlo_sources.stage import Stage
from fakes.hub import Hub, running_hub

REPO = "acme/digits"
TOKEN = "hf_CanaryCanaryCanaryCanaryCanary"
SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
HASTY = Patience(attempts=3, pause_seconds=0.0)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with the sample model and a token."""
    with running_hub() as made:
        made.push(REPO, samples_root() / "digits")
        made.token = TOKEN
        yield made


def opened(hub: Hub, repo: str = REPO, revision: str = "main", token: str | None = None) -> HubStore:
    """The repository."""
    return open_hub(repo, revision, endpoint=hub.url, token=token)


def body(store: HubStore, name: str, start: int = 0, stop: int = 0) -> bytes:
    """Bytes of a file, in one stream."""
    found = store.objects[name]
    return b"".join(store.stream(found, start, stop or found.size))


def refused(kind: type[SourceError], hub: Hub, *words: str, **asked: str) -> SourceError:
    """The error of opening it: of this very kind, one line, with what to do, and without a token."""
    with pytest.raises(kind) as caught:
        opened(hub, **asked)
    said = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in said
    assert caught.value.hint
    assert all(word in said for word in words), said
    assert TOKEN not in said
    assert caught.value.__cause__ is None
    return caught.value


def test_a_repository_at_its_commit(hub: Hub) -> None:
    """Names and sizes of all files, digests of the large ones, and their bytes, whole or in part."""
    store = opened(hub)
    folder = samples_root() / "digits"
    assert store.revision == hub.repositories[REPO].branches["main"]
    assert store.name == f"{REPO}@{store.revision[:12]}"
    assert store.objects[SHARD].sha256 == hub.repositories[REPO].commits[store.revision][SHARD].sha256
    assert store.objects["model_index.json"].sha256 is None
    assert body(store, SHARD) == (folder / SHARD).read_bytes()
    assert body(store, SHARD, 1000, 2000) == (folder / SHARD).read_bytes()[1000:2000]
    assert body(store, "model_index.json", 3, 9) == (folder / "model_index.json").read_bytes()[3:9]


def test_the_pipeline_is_that_of_the_folder(hub: Hub, tmp_path: Path) -> None:
    """Same components, files, tensors and places; large weights are not fetched for it."""
    pipeline = open_remote(Fetcher(opened(hub), Stage(tmp_path)))
    folder = open_directory(samples_root() / "digits")
    assert [(file.name, file.size) for file in pipeline.all_files()] == [
        (file.name, file.size) for file in folder.all_files()
    ]
    for name, component in folder.components.items():
        found = pipeline.component(name)
        assert found.config == component.config
        assert {key: tensor[2:] for key, tensor in found.tensors.items()} == {
            key: tensor[2:] for key, tensor in component.tensors.items()
        }
    assert not [each for each in hub.cdn_log.bodies(SHARD) if "range" not in each.headers]
    assert not hub.log.bodies("digits.py")


def test_a_commit_is_a_revision(hub: Hub, tmp_path: Path) -> None:
    """A branch that moved is not followed by who names the commit."""
    first = hub.repositories[REPO].branches["main"]
    (tmp_path / "model_index.json").write_text("{}")
    second = hub.push(REPO, tmp_path)
    assert opened(hub, revision=first).revision == first
    assert opened(hub).revision == second


def test_what_is_not_there(hub: Hub) -> None:
    """A repository, a revision, a name that is none: SourceNotFound, to be asked again slowly."""
    for asked in ({"repo": "acme/none", "token": TOKEN}, {"revision": "v9"}, {"repo": "a/b/c"}):
        assert refused(SourceNotFound, hub, **asked).code == "RemoteNotFound"


def test_who_may_not_read(hub: Hub) -> None:
    """No token, a wrong one, a gate: SourceUnauthorized, each with its own words, though the hub repeats the
    token in what it says."""
    hub.repositories[REPO].private = True
    refused(SourceUnauthorized, hub, "private or gated, or does not exist")
    refused(SourceUnauthorized, hub, "not valid, or expired", token="hf_" + TOKEN)
    assert opened(hub, token=TOKEN).objects
    hub.repositories[REPO].private, hub.repositories[REPO].gated = False, True
    refused(SourceUnauthorized, hub, "gated", "no token was given")
    hub.readers = {"hf_visitor"}
    refused(SourceUnauthorized, hub, "gated", "no access", token="hf_visitor")


def test_a_token_that_is_taken_back_in_the_middle(hub: Hub) -> None:
    """Files are refused as the repository is."""
    hub.repositories[REPO].private = True
    store = opened(hub, token=TOKEN)
    hub.token = "hf_new"
    with pytest.raises(SourceUnauthorized, match="401"):
        body(store, SHARD)


@pytest.mark.parametrize("kind", ["unavailable", "busy"])
def test_a_hub_that_cannot_now(hub: Hub, kind: str) -> None:
    """503 and 429, of the API and of a file."""
    store = opened(hub)
    hub.break_down(kind)
    refused(SourceUnreachable, hub, "503" if kind == "unavailable" else "429")
    with pytest.raises(SourceUnreachable):
        body(store, SHARD)


def test_nobody_answers(hub: Hub) -> None:
    """A closed port, and a name that does not resolve."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for url in (f"http://127.0.0.1:{taken.getsockname()[1]}", "http://hub.invalid"):
            with pytest.raises(SourceUnreachable, match="gave no answer"):
                open_hub(REPO, "main", endpoint=url)


def test_silence_ends(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the connection and says nothing is left after the time limit."""
    monkeypatch.setattr("dlo_sources.hub.READ_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SourceUnreachable, match="Timeout"):
        open_hub(REPO, "main", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_a_body_cut_short_is_taken_up(hub: Hub, tmp_path: Path) -> None:
    """Half of the body, three times: every byte in the end, and none fetched twice."""
    store = opened(hub)
    for log in (hub.log, hub.cdn_log):
        log.faults.clear()
    hub.break_down("truncated", SHARD, times=3)
    hub.cdn_log.sent_bytes = 0
    fetcher = Fetcher(store, Stage(tmp_path), patience=HASTY)
    buffer = bytearray(store.objects[SHARD].size)
    assert fetcher.files[SHARD].readinto(buffer, 0) == len(buffer)
    assert bytes(buffer) == (samples_root() / "digits" / SHARD).read_bytes()
    assert hub.cdn_log.sent_bytes == len(buffer)


def test_the_token_stays_with_the_hub(hub: Hub) -> None:
    """Large files come from the CDN without it, and it is in no address."""
    hub.repositories[REPO].private = True
    body(opened(hub, token=TOKEN), SHARD)
    assert hub.cdn_log.asked
    assert not any("authorization" in each.headers for each in hub.cdn_log.asked)
    assert all(each.headers["authorization"] == f"Bearer {TOKEN}" for each in hub.log.asked)
    assert not any(TOKEN in each.path for each in [*hub.log.asked, *hub.cdn_log.asked])
    assert TOKEN not in repr(opened(hub, token=TOKEN))


def test_a_hub_that_sends_its_visitors_elsewhere(hub: Hub) -> None:
    """What the hub says about a repository comes from the hub: the other host is not even asked."""
    with running_hub() as other:
        other.push(REPO, samples_root() / "digits")
        hub.elsewhere = other.url
        refused(SourceUntrusted, hub, "another address")
        assert other.log.asked == []


def test_a_redirect_for_a_file_without_a_digest(hub: Hub) -> None:
    """Bytes that nothing can be compared with do not come from another host."""
    hub.states_lfs = False
    store = opened(hub)
    with pytest.raises(SourceUntrusted, match="whose digest it does not state"):
        body(store, SHARD)
    assert hub.cdn_log.asked == []


def test_a_file_of_another_commit(hub: Hub) -> None:
    """The hub says of which commit a file is, and is taken at its word."""
    store = opened(hub)
    hub.serves = "f" * 40
    with pytest.raises(SourceChanged, match="of another commit"):
        body(store, "model_index.json")


def test_a_certificate_that_nobody_vouches_for(tmp_path: Path) -> None:
    """SourceUntrusted, with the words of the check."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def answer(listening: socket.socket) -> None:
        taken, _ = listening.accept()
        with taken:
            try:
                context.wrap_socket(taken, server_side=True).close()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        with pytest.raises(SourceUntrusted, match="certificate is not trusted"):
            open_hub(REPO, "main", endpoint=f"https://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def test_what_is_no_hub(tmp_path: Path) -> None:
    """Another service at the endpoint's address is SourceInvalid or SourceNotFound, never a traceback."""
    (tmp_path / "index.html").write_text("hello")
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(tmp_path), "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split("port ")[1].split()[0]
        with pytest.raises(SourceNotFound):
            open_hub(REPO, "main", endpoint=f"http://127.0.0.1:{port}")
        (tmp_path / "api/models" / REPO / "revision").mkdir(parents=True)
        for text in ("hello", "[]", '{"id": "x"}'):
            (tmp_path / "api/models" / REPO / "revision/main").write_text(text)
            with pytest.raises(SourceInvalid):
                open_hub(REPO, "main", endpoint=f"http://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()
        server.stdout.close() if server.stdout else None


def test_the_stand_in_as_a_process() -> None:
    """As cluster tests start it: serves the sample, is broken and mended from outside, ends on SIGTERM."""
    script = Path(__file__).parents[2] / "fakes/hub.py"
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(str(free.getsockname()[1]))
    words = ["--folder", str(samples_root() / "digits"), "--host", "127.0.0.1", "--gated", "--token", TOKEN]
    process = subprocess.Popen(
        [sys.executable, str(script), *words, "--port", ports[0], "--cdn-port", ports[1]],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "dlo/digits@" in process.stdout.readline()
        url = f"http://127.0.0.1:{ports[0]}"
        store = open_hub("dlo/digits", "main", endpoint=url, token=TOKEN)
        assert body(store, SHARD) == (samples_root() / "digits" / SHARD).read_bytes()
        for fault in (b"unavailable", b""):
            request = urllib.request.Request(f"{url}/stand-in/fault", data=fault, method="PUT")  # noqa: S310
            urllib.request.urlopen(request, timeout=5).close()  # noqa: S310
            if fault:
                with pytest.raises(SourceUnreachable):
                    open_hub("dlo/digits", "main", endpoint=url, token=TOKEN)
        assert open_hub("dlo/digits", "main", endpoint=url, token=TOKEN).objects
    finally:
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close() if process.stdout else None
